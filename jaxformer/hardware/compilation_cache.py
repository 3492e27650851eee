"""Keeps compiled programs between runs, so that only the first run waits for the compiler."""

import warnings
from pathlib import Path

import jax

from jaxformer.hardware.processor import processor_kind
from jaxformer.hardware.user_folders import is_private, user_cache

# Beyond this the oldest programs are removed first; one of nano takes 1 MB.
MOST_BYTES = 2 * 2**30


def use_compilation_cache(wanted: bool = True) -> Path | None:
    """Makes JAX keep compiled programs in the user's cache folder, and use those that are there.

    It must be called before anything is compiled. A folder that JAX was given already
    (``JAX_COMPILATION_CACHE_DIR``) stays, with its own settings. If the folder cannot be used, the
    disk is full, an entry is damaged or another process writes to it, JAX compiles again.

    Args:
        wanted: if False, no program is kept or reused.

    Returns:
        The folder in use, if any.
    """
    if not wanted:
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    given = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if given:
        return Path(given)
    try:
        folder = _make_folder()
    except (OSError, RuntimeError):
        return None
    if not is_private(folder):
        return None
    _remove_oldest(folder)
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # On a CPU most programs of a run compile in less than JAX's default of a second, and add up.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _make_folder() -> Path:
    folder = user_cache() / "xla" / processor_kind()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _remove_oldest(folder: Path) -> None:
    """Removes the oldest entries beyond the limit."""
    entries = []
    for path in folder.glob("*-cache"):
        try:
            about = path.stat()
        except OSError:
            continue  # another process has just removed it
        entries.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            break
        try:
            path.unlink()
        except OSError:
            return
        total -= size
