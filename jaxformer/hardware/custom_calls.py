"""Loads the custom calls of XLA that are written in C, and makes them known to XLA."""

import contextlib
import ctypes
from collections.abc import Mapping, Sequence

import jax

from jaxformer.hardware.custom_call_builds import UnavailableError, are_off, build, fast_options


def load(name: str, options: Sequence[Sequence[str]]) -> ctypes.CDLL:
    """Returns a library, which a C compiler builds where the user's cache has none.

    Args:
        name: of its source beside this file, without ``.c``.
        options: of the compiler, which may be to build for this processor alone. Those are taken
            first that stand first, others where the compiler fails.

    Raises:
        UnavailableError: there is no compiler, it fails, or others could write to the cache.
    """
    *better, last = options
    for some in better:
        with contextlib.suppress(UnavailableError):
            return _load(name, some)
    return _load(name, last)


def _load(name: str, options: Sequence[str]) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(build(name, options)))
    except OSError as error:
        raise UnavailableError(f"what was built cannot be loaded: {error}") from error


def register(library: ctypes.CDLL, functions: Mapping[str, str]) -> None:
    """Makes functions of a library known to XLA, for CPUs.

    Args:
        library: that has them.
        functions: their names in the library, by those that XLA knows them by.
    """
    for target, function in functions.items():
        call = jax.ffi.pycapsule(getattr(library, function))
        jax.ffi.register_ffi_target(target, call, platform="cpu")


def register_own(name: str, targets: Sequence[str], *, devices: int = 1) -> bool:
    """Makes functions of a library that is built for this processor known to XLA, by their names.

    Args:
        name: of its source.
        targets: the functions.
        devices: of this process, which share its threads.

    Returns:
        Whether it could: not where the user wants none, nor where it cannot be built or loaded.
    """
    if are_off():
        return False
    try:
        library = load(name, fast_options(name))
    except UnavailableError:
        return False
    library.jaxformer_set_devices(devices)
    register(library, {target: target for target in targets})
    return True
