"""How far a segment is right in the rows that the reference computes.

Where experts are written densely, the candidate computes rows for tokens that the reference leaves
out. No value equals one of the reference then, but the rows of one may be among those of the other.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxformer.parity.matching.operators.values import rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.operators.divergences import Divergence

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
    rows = list(_rows_of(divergence.reference_operators))
    last, right = -1, set()
    for operator in divergence.operators:
        made = operator.outputs[0]
        if made is divergence.value or not _has_rows(made):
            continue
        array = divergence.arrays.get(made.index, made.data).reshape(-1, made.shape[-1])
        fewer = (one for one in rows if one.shape[1] == made.shape[-1] and one.size < made.size)
        if any(_holds(array, one) for one in fewer):
            last = operator.index
            right.add(made.index)
    later = (op for op in divergence.operators if op.index > last >= 0)
    return next(
        (
            operator
            for operator in later
            if operator.source
            and operator.name not in LAYOUT_ONLY
            and any(value.index in right for value in operator.inputs)
        ),
        None,
    )


def _has_rows(value: Value) -> bool:
    """Returns whether a value is a matrix, or several, of rows that are not equal by chance."""
    is_matrix = value.ndim >= 2 and value.dtype.kind == "f" and value.shape[-1] >= FEWEST
    return is_matrix and 0 < value.size <= MOST_NUMBERS


def _rows_of(operators: Sequence[Operator]) -> Iterator[np.ndarray]:
    """Yields the first rows (n, D) of each value that operators make of activations."""
    for operator in operators:
        for value in operator.outputs:
            if _has_rows(value) and value.is_activation:
                rows = value.data.reshape(-1, value.shape[-1])[:MOST_ROWS]
                if all(np.ptp(row) > 0 for row in rows):
                    yield rows


def _holds(array: np.ndarray, rows: np.ndarray) -> bool:
    """Returns whether some rows are all among the rows of an array."""
    allowed = rounding_allowed(rows)
    with np.errstate(invalid="ignore"):
        return all(bool((np.abs(array - row).max(-1) <= allowed).any()) for row in rows)
