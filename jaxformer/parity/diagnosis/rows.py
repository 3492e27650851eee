"""How far a segment is right in the rows that the reference computes.

Where experts are written densely, the candidate computes rows for tokens that the reference leaves
out. No value equals one of the reference then, but the rows of one may be among those of the other.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.parity.diagnosis.evidence import (
    FITS_IN_FLOAT32,
    Diagnosis,
    fits,
    has_many_numbers,
)
from jaxformer.parity.diagnosis.formulas import (
    FEWEST_NUMBERS,
    FUNCTIONS,
    NO_FUNCTION,
)
from jaxformer.parity.matching.values import rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# Rows of fewer numbers may be equal by chance; of a value, so many are looked for.
FEWEST, MOST_ROWS = 4, 4
# Larger arrays take too long.
MOST_NUMBERS = 1 << 22


def first_after_rows(divergence: Divergence) -> Operator | None:
    """Returns the first operator behind the last one whose rows the reference has.

    Args:
        divergence: a segment that makes more rows than the reference's.

    Returns:
        None where the reference's rows are in no operator of the segment.
    """
    right = _right_values(divergence)
    known = {value.index for value, _ in right}
    last = max((v.producer.index for v, _ in right if v.producer is not None), default=-1)
    for operator in divergence.operators:
        is_later = operator.index > last >= 0 and operator.name not in LAYOUT_ONLY
        if is_later and operator.source and any(v.index in known for v in operator.inputs):
            return operator
    return None


def other_function_of_rows(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the activation function of each side, of rows that both have."""
    operator = first_after_rows(divergence)
    for value, twin in _right_values(divergence) if operator else ():
        x = _array(divergence, value)
        if not has_many_numbers(x[(x != 0) & (np.abs(x) != 1)], FEWEST_NUMBERS):
            continue
        own = _last_function(x, [_array(divergence, v) for v in _made(divergence.operators)])
        right = _last_function(twin.data, [v.data for v in _made(divergence.reference_operators)])
        if own and right and own != right:
            text = f"the candidate computes {own}; the reference computes {right}"
            return Diagnosis(text, operator)
    return None


def _right_values(divergence: Divergence) -> list[tuple[Value, Value]]:
    """Returns values of a segment that hold the rows of one of the reference's, and that one."""
    twins = [v for v in _made(divergence.reference_operators) if _has_rows(v) and v.is_activation]
    found = []
    for made in _made(divergence.operators):
        if made is divergence.value or not _has_rows(made):
            continue
        array = _array(divergence, made).reshape(-1, made.shape[-1])
        for twin in twins:
            if twin.shape[-1] == made.shape[-1] and twin.size < made.size and _holds(array, twin):
                found.append((made, twin))
                break
    return found


def _made(operators: Sequence[Operator]) -> Iterator[Value]:
    return (value for operator in operators for value in operator.outputs)


def _array(divergence: Divergence, value: Value) -> np.ndarray:
    """Returns what the candidate computed, put right where that was wrong before the segment."""
    return np.asarray(divergence.arrays.get(value.index, value.data))


def _has_rows(value: Value) -> bool:
    """Returns whether a value is a matrix, or several, of rows that are not equal by chance."""
    is_matrix = value.ndim >= 2 and value.dtype.kind == "f" and value.shape[-1] >= FEWEST
    return is_matrix and 0 < value.size <= MOST_NUMBERS


def _holds(array: np.ndarray, twin: Value) -> bool:
    """Returns whether the first rows of a value are all among the rows (n, D) of an array."""
    rows = twin.data.reshape(-1, array.shape[1])[:MOST_ROWS]
    allowed = rounding_allowed(rows)
    with np.errstate(invalid="ignore"):
        return all(
            np.ptp(row) > 0 and bool((np.abs(array - row).max(-1) <= allowed).any()) for row in rows
        )


def _last_function(x: np.ndarray, arrays: Sequence[np.ndarray]) -> str:
    """Returns the name of the function that the last of some arrays is of x; "" if none is one.

    A part of a function, such as the sigmoid of SiLU, comes before the whole.
    """
    with np.errstate(all="ignore"):
        made = {name: of(x) for name, of in FUNCTIONS.items() if name != NO_FUNCTION}
    for array in reversed(arrays):
        if array.shape == x.shape and array.dtype.kind == "f":
            for name, one in made.items():
                if fits(one, array, FITS_IN_FLOAT32):
                    return name
    return ""
