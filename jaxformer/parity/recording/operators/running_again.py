"""Runs a part of a run once more, with other arrays in some places."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import is_out_of_memory
from jaxformer.parity.recording.operators.graph import Operator, Value

# What operators raise of arrays that do not fit them.
_DO_NOT_FIT = (IndexError, RuntimeError, TypeError, ValueError)


def run_again(
    operators: Sequence[Operator],
    given: Mapping[int, Any],
    cast: Callable[[Any], Any] | None = None,
) -> dict[int, Any]:
    """Runs operators once more, with other values in some places.

    Shapes may depend on numbers, such as those of the tokens that a router sends to an expert: of
    other numbers an operator may get arrays that do not fit it. What cannot be computed for that,
    or has another size than was recorded, is NaN, so that it agrees with nothing.

    Args:
        operators: in the order of the tape.
        given: arrays of values by their index, also of values that the operators make; every other
            value is as recorded.
        cast: applied to each array before an operator reads it.

    Returns:
        the arrays of all values that depend on what was given, and what was given.
    """
    arrays = dict(given)
    lacking: set[int] = set()
    for operator in operators:
        if cast is None and not any(value.index in arrays for value in operator.inputs):
            continue
        if all(value.index in given for value in operator.outputs):
            continue
        # What was given may have been forgotten, and is not made again for nothing.
        known = [arrays.get(value.index) for value in operator.inputs]
        read = [
            value.data if array is None else array
            for value, array in zip(operator.inputs, known, strict=True)
        ]
        made: Sequence[Any] | None = None
        if lacking.isdisjoint(value.index for value in operator.inputs):
            made = _made_by(operator, read if cast is None else list(map(cast, read)))
        for place, value in enumerate(operator.outputs):
            if value.index in given:
                continue
            # Of other numbers fewer experts may have tokens, and then fewer arrays are made.
            if made is None or place >= len(made):
                lacking.add(value.index)
                arrays[value.index] = _unknown(value)
            else:
                arrays[value.index] = made[place]
    for operator in operators:
        for value in operator.outputs:
            array = arrays.get(value.index)
            if value.index not in given and array is not None and array.size != value.size:
                arrays[value.index] = _unknown(value)
    return arrays


def _made_by(operator: Operator, read: Sequence[Any]) -> Sequence[Any] | None:
    """Returns what an operator makes of arrays; None if these do not fit it."""
    try:
        return operator.run(*read)
    except _DO_NOT_FIT as error:
        if is_out_of_memory(error):
            raise
        return None


def _unknown(value: Value) -> np.ndarray:
    """Returns an array of a value's shape that says nothing: NaN where it holds floats."""
    if value.dtype.kind in "fc":
        return np.full(value.shape, np.nan, value.dtype)
    return value.data
