"""Every setting that is compared."""

from benchmarks.wild import flax_families, libraries, tunix_models


def all_settings():
    """Yields them, library by library."""
    yield from flax_families.settings()
    yield from libraries.settings()
    yield from tunix_models.settings()
