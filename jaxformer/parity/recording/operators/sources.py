"""The user's line of code that made an equation of a jaxpr."""

import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# Code of these is not the user's.
LIBRARIES = (
    "jax", "jaxlib", "flax", "equinox", "haiku", "jaxtyping", "penzai", "chex", "optax", "einops",
)  # fmt: skip
_ROOTS = tuple(os.sep + os.path.join("site-packages", name) + os.sep for name in LIBRARIES)
# Files of JAX between a function of ``jax.lax`` and its equation.
_TRACING = tuple(
    os.path.join("jax", "_src", part)
    for part in ("lax", "interpreters", "core.py", "source_info_util.py", "tree_util.py")
)
# jaxformer/parity, which calls the user's code.
_HERE = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "..")) + os.sep
# What traces the user's code.
_END = os.path.join(os.path.abspath(os.path.dirname(__file__)), "tracing.py")


@functools.cache
def _is_users(path: str) -> bool:
    """Returns whether a file is neither of a library below the models nor of this package."""
    return not (path.startswith(("<frozen", _HERE)) or any(root in path for root in _ROOTS))


def source_of(equation: Any) -> str:
    """Returns "path:line" of the innermost code of the user that made an equation, or ""."""
    return next(_sources(equation), "")


def source_inside(equation: Any, jaxpr: Any) -> str:
    """Returns ``source_of`` an equation if that code runs inside of a jaxpr's function, else "".

    A jaxpr may come from a cache. What called its function then is the traceback of another call.
    """
    begin = jaxpr.debug_info.func_src_info or ""
    found = ""
    for frame in _all_frames(equation):
        if frame.file_name == _END:
            # The function of an equation of JAX's own, such as one of a gradient, is in no frame.
            return ""
        if not found and _is_users(frame.file_name):
            found = f"{frame.file_name}:{frame.line_num}"
        if begin.endswith(f" at {frame.file_name}:{frame.function_start_line}"):
            return found
    # JAX left out what is further out than a function inside of this one.
    return found


def caller_of(equation: Any) -> str:
    """Returns "path:line" of the user's code that called the function that made an equation."""
    found = _sources(equation)
    next(found, "")
    return next(found, "")


def line_of_frames(frames: Iterable[tuple[str, int]]) -> str:
    """Returns "path:line" of the first frame, path and line, that is the user's code, or ""."""
    return next((f"{path}:{line}" for path, line in frames if _is_users(path)), "")


def _sources(equation: Any) -> Iterator[str]:
    for frame in _frames(equation):
        if _is_users(frame.file_name):
            yield f"{frame.file_name}:{frame.line_num}"


def _frames(equation: Any) -> Iterator[Any]:
    """Yields the frames of the candidate in which an equation was made, the innermost first."""
    # Further out is the code that asked for the comparison.
    return itertools.takewhile(lambda frame: frame.file_name != _END, _all_frames(equation))


def _all_frames(equation: Any) -> Sequence[Any]:
    traceback = equation.source_info.traceback
    return () if traceback is None else traceback.frames


def is_called_by_user(equation: Any) -> bool:
    """Returns whether code of the user called a function of ``jax.lax`` itself."""
    frames = _all_frames(equation)
    callers = (f.file_name for f in frames if not any(part in f.file_name for part in _TRACING))
    return _is_users(next(callers, _HERE))


def is_users_function(jaxpr: Any) -> bool:
    """Returns whether a jaxpr is of a function of the user.

    One of a function of JAX itself may come from a cache, with the traceback of its first call.
    """
    return bool(line_of_function(jaxpr))


def line_of_function(traced: Any) -> str:
    """Returns "path:line" of a function of the user that JAX traced or wrapped, else ""."""
    name = getattr(traced.debug_info, "func_src_info", None) or ""
    _, found, where = name.rpartition(" at ")
    return where if found and _is_users(where) else ""
