"""Builds the custom calls of XLA that are written in C, once for a machine, and loads them."""

import contextlib
import ctypes
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

import jax

from jaxformer.hardware.processor import processor_kind
from jaxformer.hardware.user_folders import is_private, user_cache

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-std=c11", "-fPIC", "-shared")
# For this processor, with a product and a sum as one instruction.
_FAST = ("-O3", "-march=native", "-ffp-contract=fast")
# GCC's, which other compilers and old ones do not know. For AMD's processors it leaves some
# products and sums two instructions, so that a sum depended on the shape around it. And how fast
# the loop of a product is depends on where in a cache line it begins, by up to 4 %.
_OF_GCC = ("--param=avoid-fma-max-bits=0", "-falign-loops=64", "-falign-jumps=64")
FAST_OPTIONS = ((*_FAST, *_OF_GCC), _FAST)
# An environment variable, which turns off those of jaxformer's own.
SWITCH, OFF = "JAXFORMER_CUSTOM_CALLS", "off"
# In seconds. It takes one or two.
LONGEST_BUILD = 60


class UnavailableError(Exception):
    """Custom calls cannot be used here; the message says why."""


def are_off() -> bool:
    """Returns whether the user has turned off the products and the attention of jaxformer's own."""
    return os.environ.get(SWITCH) == OFF


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
        return ctypes.CDLL(str(_build(name, options)))
    except OSError as error:
        raise UnavailableError(f"what was built cannot be loaded: {error}") from error


def check(name: str, options: Sequence[Sequence[str]]) -> None:
    """Checks that a library is built, or that there is a C compiler, which it does not wait for.

    Raises:
        UnavailableError: there is neither.
    """
    # Unlike Path.exists, this says no where the cache cannot be looked into.
    if not any(os.path.exists(_path(name, some)) for some in options):
        _compiler()


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
        library = load(name, FAST_OPTIONS)
    except UnavailableError:
        return False
    library.jaxformer_set_devices(devices)
    register(library, {target: target for target in targets})
    return True


def _path(name: str, options: Sequence[str]) -> Path:
    """Returns where a library is once it is built."""
    known = [metadata.version("jaxlib"), processor_kind(), *OPTIONS, *options]
    sources = _source(name), *sorted(FOLDER.glob("*.h"))
    contents = [path.read_bytes() for path in sources] + list(map(str.encode, known))
    digest = hashlib.sha256(bytes(1).join(contents)).hexdigest()
    return user_cache() / "custom_calls" / f"{name}-{digest[:16]}.so"


def _source(name: str) -> Path:
    return FOLDER / f"{name}.c"


def _build(name: str, options: Sequence[str]) -> Path:
    built = _path(name, options)
    try:
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(built.parent):
            raise UnavailableError(f"others can write to {built.parent}")
        if not built.exists():
            _compile(_source(name), options, built)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"the custom calls cannot be built: {error}") from error
    return built


def _compiler() -> str:
    chosen = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if chosen is None:
        raise UnavailableError("there is no C compiler")
    return chosen


def _compile(source: Path, options: Sequence[str], target: Path) -> None:
    chosen = _compiler()
    # Two processes may build at once: each moves its own file, whole, into place.
    part = target.with_suffix(f".{os.getpid()}")
    include = ["-I", jax.ffi.include_dir(), "-I", str(FOLDER)]
    words = [chosen, *OPTIONS, *options, *include, str(source), "-o", str(part)]
    try:
        made = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_BUILD)
        if made.returncode:
            first = next(iter(made.stderr.strip().splitlines()), f"exit code {made.returncode}")
            raise UnavailableError(f"{chosen} cannot build the custom calls: {first}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
