"""Names the rows of a table that each side looks up: positions, token types, tokens."""

from collections.abc import Iterator

import numpy as np

from jaxformer.parity.diagnosis.evidence import Diagnosis, sides_of
from jaxformer.parity.recording.operators.graph import Operator
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# A longer list of rows is cut.
MOST_SHOWED = 12


def other_lookup(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds the rows of a parameter that each side is made of, and compares their numbers."""
    own, right = sides_of(divergence)
    for name, table in _tables(divergence, walk, own.shape):
        places = {row.tobytes(): i for i, row in reversed(list(enumerate(table + 0.0)))}
        rows = [_rows(array, places) for array in (own, right)]
        if rows[0] is None or rows[1] is None or rows[0] == rows[1]:
            continue
        # The first text in which they differ.
        length = own.shape[-2] if own.ndim > 1 else 1
        pairs = zip(rows[0], rows[1], strict=True)
        first = next(i for i, (one, other) in enumerate(pairs) if one != other)
        at = slice(first // length * length, first // length * length + length)
        maker = _maker_of_rows(divergence)
        return Diagnosis(
            f"the candidate looks up rows {_short(rows[0][at])} of {name}; the reference "
            f"{_short(rows[1][at])}",
            maker,
            is_operand=maker is not None and maker.name == "gather",
        )
    return None


def _maker_of_rows(divergence: Divergence) -> Operator | None:
    """Returns the last operator that makes the rows' numbers, before the line that looks them up.

    That line itself makes them whole and not negative.
    """
    lookup = next((op for op in reversed(divergence.operators) if op.name == "gather"), None)
    if lookup is None:
        return None
    known, found = {v.index for v in lookup.inputs if v.dtype.kind == "i"}, []
    for operator in reversed(divergence.operators):
        if any(v.index in known for v in operator.outputs):
            known |= {v.index for v in operator.inputs}
            if operator.source and operator.source != lookup.source:
                found.append(operator)
    # A cast or a copy makes no numbers; what only repeats a constant made them where it began.
    made = [operator for operator in found if operator.name not in LAYOUT_ONLY]
    return (made or found[-1:] or [lookup])[0]


def _tables(
    divergence: Divergence, walk: Walk, shape: tuple[int, ...]
) -> Iterator[tuple[str, np.ndarray]]:
    for name, value in walk.reference.parameters.items():
        data = value.data
        if data.ndim == 2 and shape and data.shape[1] == shape[-1] and len(data) > 1:
            yield name, data


def _rows(array: np.ndarray, places: dict[bytes, int]) -> list[int] | None:
    """Returns which row of a table each row of an array is, None if one is none."""
    found = []
    for row in np.ascontiguousarray(array.reshape(-1, array.shape[-1]) + 0.0):
        place = places.get(row.tobytes())
        if place is None:
            return None
        found.append(place)
    return found


def _short(rows: list[int]) -> str:
    if len(set(rows)) == 1:
        return f"{rows[0]} alone"
    text = ", ".join(map(str, rows[:MOST_SHOWED]))
    return f"{text}, …" if len(rows) > MOST_SHOWED else text
