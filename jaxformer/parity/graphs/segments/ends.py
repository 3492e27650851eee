"""Where a wrong segment ends: the earliest value which, put right, makes the rest right."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.graphs.matching.anchors import Anchors
from jaxformer.parity.graphs.matching.layouts import Layout, find_layout, nearest_layout
from jaxformer.parity.graphs.matching.values import largest, rounding_allowed
from jaxformer.parity.graphs.matching.weight_uses import KINDS
from jaxformer.parity.graphs.recording.tape import Operator, Value, run_again
from jaxformer.parity.graphs.segments.effects import depending

# How many steps of a wrong segment are tried as its end, for each size.
MOST_TRIED = 40
MOST_NEAR = 8
# Two segments do the same if what they make of the same is this near; their numbers may be rounded.
ALIKE = 1e-5


def earliest_end(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
) -> tuple[Value, Value, Layout] | None:
    """Returns the first value of a segment that, replaced, makes the required value right."""
    by_size: dict[int, list[Value]] = defaultdict(list)
    for operator in reference_operators:
        for made in operator.outputs:
            if made.data.dtype.kind == "f" and made.index not in anchors.reached:
                by_size[made.data.size].append(made)
    limit = rounding_allowed(wanted.data)
    known = anchors.arrays_before(operators)
    first = None
    for end, other, layout in _ends(anchors, operators, value, by_size):
        later = depending(operators, end)
        remade = {v.index for op in later for v in op.outputs}
        given = {
            v.index: anchors.arrays[v.index]
            for op in operators
            for v in op.outputs
            if v.index in anchors.arrays and v.index not in remade
        }
        again = run_again(later, {**known, **given, end.index: layout.apply(other.data)})
        if value.index in again and find_layout(wanted.data, again[value.index], limit):
            if _follows_alike(anchors, (end, other, layout), value, wanted, reference_operators):
                return end, other, layout
            first = first or (end, other, layout)
    if first is not None:
        return first
    # Between values that have little in common any layout may be the nearest.
    found = nearest_layout(wanted.data, anchors.array(value), gain=0.5)
    return None if found is None else (value, wanted, found[0])


def _follows_alike(
    anchors: Anchors,
    pair: tuple[Value, Value, Layout],
    value: Value,
    wanted: Value,
    reference_operators: Sequence[Operator],
) -> bool:
    """Returns whether the reference makes of a wrong end what the candidate makes of it.

    If not, the two ends are not the same place: scores before a mask and after it.
    """
    end, other, layout = pair
    later = depending(reference_operators, other)
    if any(operator.name == "written" for operator in later):
        return True
    if not later:
        return other is wanted
    own = layout.invert(anchors.array(end), other.data.shape)
    made = run_again(later, {other.index: own}).get(wanted.index)
    wrong = anchors.array(value)
    return made is None or find_layout(made, wrong, ALIKE * (largest(wrong) or 1.0)) is not None


def _ends(
    anchors: Anchors,
    operators: Sequence[Operator],
    value: Value,
    by_size: Mapping[int, Sequence[Value]],
) -> Iterator[tuple[Value, Value, Layout]]:
    """Yields values of a segment with what they might have to be, in order."""
    for operator in operators:
        for made in operator.outputs:
            array = anchors.array(made)
            if made is value or getattr(array, "dtype", np.dtype(int)).kind != "f":
                continue
            if made.index in anchors.matches:
                continue
            tried = []
            for other in by_size.get(array.size, ())[:MOST_TRIED]:
                near = nearest_layout(other.data, array)
                if near is not None:
                    tried.append((near[1], other.index, other, near[0]))
            for _, _, other, layout in sorted(tried, key=lambda t: t[:2])[:MOST_NEAR]:
                yield made, other, layout


def wrong_factors(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
) -> list[tuple[Value, Value]]:
    """Returns the factors of a product that make the value right if both are replaced.

    Queries and keys may both be wrong, and then neither alone makes the scores right.
    """
    limit = rounding_allowed(wanted.data)
    for operator in reversed(operators):
        factors = [v for v in operator.inputs if v.is_activation]
        if KINDS.get(operator.name) != "product" or len(factors) != 2:
            continue
        if any(factor.index in anchors.matches for factor in factors):
            continue
        among = []
        for factor in factors:
            near = [
                (found[1], made.index, made, found[0])
                for other in reference_operators
                for made in other.outputs
                if made.data.size == factor.data.size and made.data.dtype.kind == "f"
                for found in [nearest_layout(made.data, anchors.array(factor))]
                if found is not None
            ]
            among.append(sorted(near, key=lambda item: item[:2])[:6])
        later = [op for op in operators if op.index >= operator.index]
        for one, other in itertools.product(*among):
            trial = anchors.arrays_before(later) | {
                factor.index: chosen[3].apply(chosen[2].data)
                for factor, chosen in zip(factors, (one, other), strict=True)
            }
            again = run_again(later, trial)
            if value.index in again and find_layout(wanted.data, again[value.index], limit):
                return [(factors[0], one[2]), (factors[1], other[2])]
    return []
