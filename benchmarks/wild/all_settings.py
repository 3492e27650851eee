"""Every setting that is compared."""

from benchmarks.wild import flax_families, libraries


def all_settings():
    """Yields them, library by library."""
    yield from flax_families.settings()
    yield from libraries.settings()
