"""Compiled programs kept between runs, so that only the first one waits for the compiler."""

import hashlib
import os
import platform
import warnings
from pathlib import Path

import jax

from jaxformer.hardware.user_folders import user_cache

# Beyond this the programs that were written longest ago go first; one of nano is 1 MB.
MOST_BYTES = 2 * 2**30


def use_compilation_cache(wanted: bool = True) -> Path | None:
    """Lets JAX keep what it compiles in the user's cache folder, and take it from there.

    To be called before anything is compiled. A folder that JAX was given already
    (``JAX_COMPILATION_CACHE_DIR``) stays, with its own settings. A folder that cannot be used, a
    full disk, a damaged entry or a second process writing to it costs time, never the run: JAX then
    compiles.

    Args:
        wanted: False keeps nothing and uses nothing.

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
    if not _is_ours(folder):
        return None
    _tidy(folder)
    warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache entry")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # On a CPU most of our programs compile in less than JAX's default of a second, and add up.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def _make_folder() -> Path:
    folder = user_cache() / "xla" / _processor()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _processor() -> str:
    """A name for this kind of processor.

    XLA loads machine code that was compiled on another CPU with no more than a message, and a home
    folder may be shared by machines of several kinds.
    """
    about = [platform.machine(), platform.processor()]
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    first = lines[: lines.index("")] if "" in lines else lines
    kinds = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    about += [line for line in first if line.startswith(kinds)]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:12]


def _is_ours(folder: Path) -> bool:
    """Whether nobody else can put programs there."""
    about = folder.stat()
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


def _tidy(folder: Path) -> None:
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
