"""Says of a model that fails on its inputs which one it is, where, and what it was given."""

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jaxformer.errors import JaxformerError, UsageError, is_out_of_memory
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.sources import line_of_frames
from jaxformer.parity.words import listed, name_error, shorten

# What models raise of inputs that they cannot compute with.
_OF_INPUTS = (IndexError, RuntimeError, TypeError, ValueError)
_TORCH = os.path.join("site-packages", "torch") + os.sep


@contextlib.contextmanager
def naming_failures(
    side: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    raised_by_model: Callable[[Exception], Exception | None],
) -> Iterator[None]:
    """Makes the error of a model that fails on its inputs say so; all else is raised as it is.

    Args:
        side: "reference" or "candidate".
        args: its positional arguments.
        kwargs: its named arguments.
        raised_by_model: returns what the model raised, given the error; None if the error is not
            the model's.

    Raises:
        UsageError: the model failed.
    """
    try:
        yield
    except JaxformerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raised = raised_by_model(error)
        if raised is None:
            raise
        raise UsageError(_describe(side, raised, args, kwargs)) from raised
    except SystemExit as error:
        # Its code would be taken for the verdict.
        raise UsageError(f"the {side} ended the program: SystemExit({error.code!r})") from error


def raised_by_candidate(error: Exception) -> Exception | None:
    """Returns an error that a candidate's own code raised; None for any other."""
    frames = traceback.walk_tb(error.__traceback__)
    return error if any(f.f_code is Candidate.call.__code__ for f, _ in frames) else None


def _describe(side: str, error: Exception, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    text = name_error(error)
    frames = [(f.f_code.co_filename, n) for f, n in traceback.walk_tb(error.__traceback__)]
    place = line_of_frames(frame for frame in reversed(frames) if _TORCH not in frame[0])
    text += f" at {shorten(place)}" if place else ""
    if isinstance(error, NotImplementedError) or not isinstance(error, _OF_INPUTS):
        return f"the {side} raised {text}"
    given = [*map(_kind, args), *(f"{name} {_kind(value)}" for name, value in kwargs.items())]
    text += f"; given: {listed(given)}"
    return f"the inputs do not fit the {side}: {text}" + (
        " (floats are compared in float64)" if "Double" in str(error) else ""
    )


def _kind(value: Any) -> str:
    leaves = jax.tree.leaves(value)
    kinds = [
        f"{leaf.dtype} {tuple(leaf.shape)}".removeprefix("torch.")
        if hasattr(leaf, "dtype")
        else type(leaf).__name__
        for leaf in leaves
    ]
    return listed(kinds) or str(value)
