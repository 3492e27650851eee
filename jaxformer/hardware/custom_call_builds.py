"""Builds the sources in C that custom calls of XLA are made of, once for a machine; free of JAX."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path

from jaxformer.hardware.processor import processor_kind
from jaxformer.hardware.user_folders import is_private, user_cache

FOLDER = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
OPTIONS = ("-std=c11", "-fPIC", "-shared")
# For this processor, with a product and a sum as one instruction.
_FAST = ("-march=native", "-ffp-contract=fast")
# The gradients of attention are as fast at a lower level, and are built in half the time.
_LEVEL, _OTHER_LEVELS = "-O3", {"attention_back_call": "-O2"}
# GCC's, which other compilers and old ones do not know. For AMD's processors it leaves some
# products and sums two instructions, so that a sum depended on the shape around it. And how fast
# the loop of a product is depends on where in a cache line it begins, by up to 4 %.
_OF_GCC = ("--param=avoid-fma-max-bits=0", "-falign-loops=64", "-falign-jumps=64")
# An environment variable, which turns off those of jaxformer's own.
SWITCH, OFF = "JAXFORMER_CUSTOM_CALLS", "off"
# In seconds. It takes one or two.
LONGEST_BUILD = 60
# The sources of what a training step calls. Products come first, as they are measured, and then
# what takes longest.
OF_A_STEP = (
    "matrix_products", "attention_call", "attention_back_call", "norm_calls", "activation_calls",
    "update_calls", "loss_calls",
)  # fmt: skip
# By path of a library: held while it is built.
_BEING_BUILT: defaultdict[Path, threading.Lock] = defaultdict(threading.Lock)


class UnavailableError(Exception):
    """Custom calls cannot be used here; the message says why."""


def are_off() -> bool:
    """Returns whether the user has turned off the products and the attention of jaxformer's own."""
    return os.environ.get(SWITCH) == OFF


def fast_options(name: str) -> tuple[Sequence[str], ...]:
    """Returns the compiler's options for this processor: first the better, for those that fail."""
    fast = (_OTHER_LEVELS.get(name, _LEVEL), *_FAST)
    return (*fast, *_OF_GCC), fast


def build(name: str, options: Sequence[str]) -> Path:
    """Returns where a library is, which a C compiler builds where the user's cache has none.

    Of threads that ask for the same one, one builds it.

    Args:
        name: of its source beside this file, without ``.c``.
        options: of the compiler, which may be to build for this processor alone.

    Raises:
        UnavailableError: there is no compiler, it fails, or others could write to the cache.
    """
    built = _path(name, options)
    try:
        built.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_private(built.parent):
            raise UnavailableError(f"others can write to {built.parent}")
        with _BEING_BUILT[built]:
            if not built.exists():
                _remove_abandoned(built.parent)
                _compile(_source(name), options, built)
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"the custom calls cannot be built: {error}") from error
    return built


def build_ahead(names: Sequence[str]) -> None:
    """Begins to build libraries for this processor, one after the other, and does not wait.

    ``build`` then waits for what is left of the one that it is asked for, and meets its error.
    A process that ends does not wait for those that are not begun.

    Args:
        names: of their sources; those that are built already cost nothing.
    """

    def build_all() -> None:
        for name in names:
            if not threading.main_thread().is_alive():
                return
            for options in fast_options(name):
                with contextlib.suppress(UnavailableError):
                    build(name, options)
                    break

    if not are_off():
        threading.Thread(target=build_all, name="custom_calls").start()


def check(name: str, options: Sequence[Sequence[str]]) -> None:
    """Checks that a library is built, or that there is a C compiler, which it does not wait for.

    Raises:
        UnavailableError: there is neither.
    """
    # Unlike Path.exists, this says no where the cache cannot be looked into.
    if not any(os.path.exists(_path(name, some)) for some in options):
        _compiler()


def include_folder() -> str:
    """Returns the folder of XLA's headers: that of ``jax.ffi.include_dir``, found without JAX."""
    spec = util.find_spec("jaxlib")
    origin = None if spec is None else spec.origin
    if origin is None:
        raise UnavailableError("there is no jaxlib")
    return str(Path(origin).parent / "include")


def _path(name: str, options: Sequence[str]) -> Path:
    """Returns where a library is once it is built."""
    known = [metadata.version("jaxlib"), processor_kind(), *OPTIONS, *options]
    sources = _source(name), *sorted(FOLDER.glob("*.h"))
    contents = [path.read_bytes() for path in sources] + list(map(str.encode, known))
    digest = hashlib.sha256(bytes(1).join(contents)).hexdigest()
    return user_cache() / "custom_calls" / f"{name}-{digest[:16]}.so"


def _source(name: str) -> Path:
    return FOLDER / f"{name}.c"


def _compiler() -> str:
    chosen = os.environ.get("CC") or next(filter(shutil.which, COMPILERS), None)
    if chosen is None:
        raise UnavailableError("there is no C compiler")
    return chosen


def _compile(source: Path, options: Sequence[str], target: Path) -> None:
    chosen = _compiler()
    # Two processes may build at once: each moves its own file, whole, into place.
    part = target.with_suffix(f".{os.getpid()}")
    include = ["-I", include_folder(), "-I", str(FOLDER)]
    words = [chosen, *OPTIONS, *options, *include, str(source), "-o", str(part)]
    try:
        made = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_BUILD)
        if made.returncode:
            first = next(iter(made.stderr.strip().splitlines()), f"exit code {made.returncode}")
            raise UnavailableError(f"{chosen} cannot build the custom calls: {first}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _remove_abandoned(folder: Path) -> None:
    """Removes what processes that were killed have left of libraries they were building."""
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):
            if path.suffix != ".so" and time.time() - path.stat().st_mtime > LONGEST_BUILD:
                path.unlink()
