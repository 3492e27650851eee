"""Says of a call that fails why: an input that does not exist, or numbers that are not known."""

import contextlib
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxformer.errors import UsageError, suggest
from jaxformer.parity.recording.operators.sources import line_of_frames
from jaxformer.parity.words import shorten

# What JAX raises where code reads the numbers of what is traced.
UNKNOWN_NUMBERS = (
    jax.errors.ConcretizationTypeError,
    jax.errors.NonConcreteBooleanIndexError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)


def misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns why a function does not take arguments, "" if it does or that is not known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        unknown = [name for name in kwargs if name not in signature.parameters]
        if not unknown:
            return str(error)
        named = (f"{name}{suggest(name, signature.parameters)}" for name in unknown)
        return (
            f"it has no input {', '.join(named)}. To give inputs in order, pass a list, or name "
            "them arr_0, arr_1 … in an .npz file"
        )
    return ""


def positional_names(function: Callable[..., Any], count: int) -> dict[str, str]:
    """Returns the names of arguments that are given in order, by their places; {} if unknown.

    >>> positional_names(lambda tokens, mask=None, *more: 0, 3)
    {'0': 'tokens', '1': 'mask'}
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in kinds]
    return {str(place): name for place, name in enumerate(names[:count])}


@contextlib.contextmanager
def naming_misfits(
    side: str, function: Callable[..., Any] | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[None]:
    """Makes the TypeError of a call with wrong inputs an error that says what the inputs are.

    Args:
        side: "reference" or "candidate".
        function: what is called inside; None where the user's own code calls it.
        args: with these positional arguments.
        kwargs: with these named arguments.

    Raises:
        UsageError: the function does not take the arguments.
    """
    try:
        yield
    except TypeError as error:
        found = "" if function is None else misfit(function, args, kwargs)
        if function is None or not found:
            raise
        raise UsageError(
            f"the inputs do not fit the {side}, which takes {inspect.signature(function)}: {found}"
        ) from error


@contextlib.contextmanager
def naming_unknown_numbers() -> Iterator[None]:
    """Makes the error of a candidate that cannot be traced say where it reads numbers.

    Raises:
        UsageError: the candidate, or what calls it, reads numbers that are not known yet.
    """
    try:
        yield
    except UNKNOWN_NUMBERS as error:
        frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
        place = line_of_frames(reversed(frames))
        raise UsageError(
            f"the candidate cannot be traced: {shorten(place) + ' ' if place else 'it '}reads "
            "numbers of an array, as float() or numpy do. It must run under jax.jit; with "
            "jax_call=, what calls it too"
        ) from error
