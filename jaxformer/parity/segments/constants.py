"""What float32 does to the constants of a segment: its numbers and its tables."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.anchors import TABLE_ALLOWED
from jaxformer.parity.matching.layouts import distance, is_finite
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.tolerance import ROUNDOFF

# A number with no more bits than these was not rounded.
SHORT = np.float64(1 << 12)
# How many ways of rounding are tried.
DRAWS = 2


def constant_rounding(
    operators: Sequence[Operator],
    end: Value,
    arrays: Mapping[int, Any],
    unknown: Collection[str] = (),
) -> float:
    """Returns how far the end of a segment moves where its constants are rounded to float32.

    Numbers such as 0.7978846, tables of positions, and parameters that a conversion has computed
    (one plus a norm's weight, a matrix times a scale), may have been computed in float32 before the
    model saw them. A difference of this size says nothing of the model.

    Args:
        operators: of the segment, in order.
        end: what they compute.
        arrays: what takes the place of some values, by index.
        unknown: paths of parameters whose numbers the other side does not have.
    """
    before, moved = rounded_ends(operators, end, arrays, unknown)
    moves = [distance(after, before) for after in moved]
    return 2 * max((far for far in moves if np.isfinite(far)), default=0.0)


def rounded_ends(
    operators: Sequence[Operator],
    end: Value,
    arrays: Mapping[int, Any],
    unknown: Collection[str] = (),
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the end of a segment, and what it is with its constants rounded in some ways.

    Arguments as in ``constant_rounding``.
    """
    made = {value.index for operator in operators for value in operator.outputs}
    read = {v.index: v for operator in operators for v in operator.inputs if v.index not in made}
    constants = [
        v
        for v in read.values()
        if (v.is_constant or (v.kind == "parameter" and v.name in unknown))
        and _may_be_rounded(v.data)
    ]
    known = {i: arrays[i] for i in read if i in arrays}
    before = run_again(operators, known).get(end.index, end.data)
    random = np.random.default_rng(0)
    found = []
    for _ in range(DRAWS if constants else 0):
        moved = {
            v.index: _moved(arrays.get(v.index, v.data), v.is_constant, random) for v in constants
        }
        found.append(run_again(operators, known | moved).get(end.index, before))
    return before, found


def _may_be_rounded(array: np.ndarray) -> bool:
    """Returns whether an array holds floats that may have been rounded: not 0.5, -1e4 or -1e9."""
    if array.dtype.kind != "f":
        return False
    finite = array[is_finite(array)]
    finite = finite[finite != np.round(finite)]
    mantissa = np.frexp(finite)[0] * SHORT
    return bool((mantissa != np.round(mantissa)).any())


def _moved(array: np.ndarray, is_constant: bool, random: np.random.Generator) -> np.ndarray:
    """Returns an array with an error at each number: of its own size, or of that of a table.

    The angles of a table grow with its positions, and so do their errors. What is computed of
    parameters has the errors of a few products, and a vector, such as a bias, those of a sum.
    """
    signs = random.choice([-1.0, 1.0], array.shape)
    few = 2 * ROUNDOFF["float32"]
    if array.size == 1 or (array.ndim > 1 and not is_constant):
        return array * (1 + few * signs)
    step = (TABLE_ALLOWED * max(array.shape) if is_constant else few) * largest(array)
    return np.where(is_finite(array), array + step * signs, array)
