"""Values that hold within a ``with`` block, for the thread that enters it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")


@contextlib.contextmanager
def set_within(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Sets a context variable, and restores it at the end of the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def check_known(name: str, value: object, known: tuple[str, ...]) -> None:
    """Checks that a choice is one of the known ones.

    Raises:
        ValueError: it is not.
    """
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}: got {value!r}")
