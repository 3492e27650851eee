"""Says of a call that fails which of its inputs does not exist, and which one may be meant."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxformer.errors import UsageError
from jaxformer.parity.words import suggest


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
        return f"it has no input {', '.join(named)}"
    return ""


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
    except TypeError:
        found = "" if function is None else misfit(function, args, kwargs)
        if function is None or not found:
            raise
        raise UsageError(
            f"the inputs do not fit the {side}, which takes {inspect.signature(function)}: {found}"
        ) from None
