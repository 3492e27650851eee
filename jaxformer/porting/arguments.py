"""Checks of what a program gives to public functions, each at the function's entrance."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from jaxformer.errors import UsageError, suggest


def wrong_kind(name: str, wanted: str, value: Any) -> UsageError:
    """Returns the error of an argument that is of another kind than the function takes.

    Args:
        name: of the argument.
        wanted: what follows "must be".
        value: what was given.
    """
    return UsageError(f"{name} must be {wanted}: got {type(value).__name__}")


def read_path(name: str, value: Any) -> Path:
    """Returns the path that an argument names.

    Args:
        name: of the argument.
        value: what was given.

    Raises:
        UsageError: it is no path.
    """
    if not isinstance(value, str | os.PathLike):
        raise wrong_kind(name, "the path of a file or a folder", value)
    return Path(value)


def read_names(name: str, values: Any) -> tuple[str, ...]:
    """Returns the names of a list of names.

    Args:
        name: of the argument.
        values: what was given.

    Raises:
        UsageError: it is no list, or not of names: a single text would be read letter by letter.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise wrong_kind(name, "a list of names", values)
    names = tuple(values)
    for each in names:
        if not isinstance(each, str):
            raise wrong_kind(name, "a list of names", each)
    return names


def check_text(name: str, value: Any) -> None:
    """Checks that an argument is a text.

    Args:
        name: of the argument.
        value: what was given; None passes.

    Raises:
        UsageError: it is something else.
    """
    if value is not None and not isinstance(value, str):
        raise wrong_kind(name, "a text", value)


def check_options(function: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Checks that a function takes the options that it was given.

    Args:
        function: its name.
        given: names of options.
        known: those that it takes.

    Raises:
        UsageError: it does not take one of them.
    """
    for name in given:
        if name not in known:
            raise UsageError(
                f"{name} is no option of {function}{suggest(name, known)}: there are "
                f"{', '.join(known)}"
            )
