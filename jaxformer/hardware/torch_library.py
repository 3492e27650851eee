"""Makes the matrix products of torch's library known to XLA, without importing torch.

torch for Linux on x86 carries Intel's MKL inside ``libtorch_cpu.so``. A custom call of XLA
(``torch_products.c``) calls it; a C compiler builds that once, into the user's cache.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import jax

from jaxformer.execution.torch_products import TARGETS
from jaxformer.hardware.user_folders import is_private, user_cache

SOURCE = Path(__file__).with_name("torch_products.c")
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-O2", "-std=c11", "-fPIC", "-shared")
# In seconds. It takes a tenth of one.
LONGEST_BUILD = 60


class UnavailableError(Exception):
    """torch's products cannot be used here; the message says why."""


def torch_version() -> str:
    """Returns the version of torch that is installed.

    Raises:
        UnavailableError: there is none.
    """
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        raise UnavailableError("torch is not installed") from None


@functools.cache
def register_products() -> None:
    """Makes the custom calls of ``execution.torch_products`` known to XLA, once in a process.

    Raises:
        UnavailableError: torch, its products or a C compiler are missing.
    """
    library = _load_torch()
    product, threads = _function(library, "sgemm_"), _function(library, "MKL_Set_Num_Threads_Local")
    try:
        handler = ctypes.CDLL(str(_build()))
    except OSError as error:
        raise UnavailableError(f"what was built cannot be loaded: {error}") from error
    handler.jaxformer_set_up(product, threads, jax.local_device_count("cpu"))
    for name in TARGETS:
        call = jax.ffi.pycapsule(getattr(handler, name))
        jax.ffi.register_ffi_target(name, call, platform="cpu")


def _load_torch() -> ctypes.CDLL:
    spec = importlib.util.find_spec("torch")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        path = Path(folder, "lib", "libtorch_cpu.so")
        if path.is_file():
            try:
                return ctypes.CDLL(str(path))
            except OSError as error:
                raise UnavailableError(f"torch's library cannot be loaded: {error}") from error
    version = torch_version()
    raise UnavailableError(f"torch {version} has no libtorch_cpu.so")


def _function(library: ctypes.CDLL, name: str) -> ctypes.c_void_p:
    try:
        return ctypes.cast(getattr(library, name), ctypes.c_void_p)
    except AttributeError:
        raise UnavailableError(f"torch {torch_version()} was built without Intel's MKL") from None


def _build() -> Path:
    """Returns the library with the custom calls, which is built where the cache has none.

    Raises:
        UnavailableError: there is no compiler, it fails, or others could write to the cache.
    """
    version = metadata.version("jaxlib")
    source = SOURCE.read_bytes()
    known = hashlib.sha256(b"\0".join([source, version.encode(), *map(str.encode, OPTIONS)]))
    folder = user_cache() / "torch_products"
    built = folder / f"{known.hexdigest()[:16]}.so"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(folder):
            raise UnavailableError(f"others can write to {folder}")
        if not built.exists():
            _compile(built)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"the custom calls cannot be built: {error}") from error
    return built


def _compile(target: Path) -> None:
    chosen = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if chosen is None:
        raise UnavailableError("there is no C compiler")
    # Two processes may build at once: each moves its own file, whole, into place.
    part = target.with_suffix(f".{os.getpid()}")
    words = [chosen, *OPTIONS, "-I", jax.ffi.include_dir(), str(SOURCE), "-o", str(part)]
    try:
        made = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_BUILD)
        if made.returncode:
            first = next(iter(made.stderr.strip().splitlines()), f"exit code {made.returncode}")
            raise UnavailableError(f"{chosen} cannot build the custom calls: {first}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
