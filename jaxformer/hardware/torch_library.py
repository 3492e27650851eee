"""Finds the matrix products of the library that torch brings along, without importing torch.

torch for Linux on x86 carries Intel's MKL inside ``libtorch_cpu.so``.
"""

import ctypes
import functools
import importlib.util
from importlib import metadata
from pathlib import Path

from jaxformer.hardware.custom_call_builds import UnavailableError


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
def load_functions() -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
    """Returns ``sgemm`` and what sets the number of its threads.

    Raises:
        UnavailableError: torch or its products are missing.
    """
    torch = _load_torch()
    return _function(torch, "sgemm_"), _function(torch, "MKL_Set_Num_Threads_Local")


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
