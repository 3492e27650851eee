"""Where a wrong segment ends: the earliest value which, put right, makes the rest right."""

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.operators.anchors import Anchors
from jaxformer.parity.matching.operators.layouts import (
    Layout,
    find_layout,
    layouts,
    nearest_layout,
)
from jaxformer.parity.matching.operators.values import largest, rounding_allowed
from jaxformer.parity.matching.operators.weight_uses import KINDS
from jaxformer.parity.recording.operators.graph import Operator, Value, run_again
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.operators.constants import constant_rounding
from jaxformer.parity.segments.operators.divergences import MOST_RUN, REMAINS, digest
from jaxformer.parity.segments.operators.effects import depending

# How many steps of a wrong segment are tried as its end, for each size.
MOST_TRIED = 40
MOST_NEAR = 8
MOST_FACTORS = 6
MOST_PERMUTED = 4
# So many operators are run again at most to find an end; and after a bug of the forward pass, whose
# wrong gradients need no exact place.
MOST_RUN_TO_ENDS = 60_000
MOST_RUN_IF_EXPLAINED = 6_000
# Two segments do the same if what they make of the same is this near; their numbers may be rounded.
ALIKE = 1e-5
# The same product has a spread this near; the numbers in it may be rounded.
SAME_SPREAD = 1e-4

Shape = tuple[int, ...]


def earliest_end(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
    layout: Layout | None = None,
    most: int = MOST_RUN_TO_ENDS,
) -> tuple[Value, Value, Layout] | None:
    """Returns the first value of a segment that, replaced, makes the required value right.

    In a long segment, such as the steps of a recurrence, not all values can be tried in time. Then
    those are tried which all else passes through.

    Args:
        anchors: what is known to be right.
        value: the required value.
        wanted: what it must be.
        operators: between the last anchors and the value.
        reference_operators: the same of the reference.
        layout: from the reference's value to the candidate's, where that is known.
        most: how many operators are run again at most, each of the two times.
    """
    by_size: dict[int, list[Value]] = defaultdict(list)
    for operator in reference_operators:
        for made in operator.outputs:
            if made.dtype.kind == "f" and made.index not in anchors.reached:
                by_size[made.size].append(made)
    search = _Search(anchors, value, wanted, operators, reference_operators, by_size)
    end = search.run(most)
    if end is None and search.is_cut_short:
        end = search.run(most, _narrow_places(anchors, operators, value))
    if end is not None:
        return end
    if layout is not None:
        return value, wanted, layout
    # Between values that have little in common any layout may be the nearest.
    found = nearest_layout(wanted.data, anchors.array(value), gain=0.5)
    if found is None:
        return None
    usual = _permuted(anchors, operators, wanted, value)
    if usual is not None and usual[1] < 2 * found[1]:
        found = usual
    return value, wanted, found[0]


class _Search:
    """Tries values of a segment as its end. Arguments as in ``earliest_end``.

    Attributes:
        is_cut_short: whether not all of them were tried.
    """

    def __init__(
        self,
        anchors: Anchors,
        value: Value,
        wanted: Value,
        operators: Sequence[Operator],
        reference_operators: Sequence[Operator],
        by_size: Mapping[int, Sequence[Value]],
    ):
        self._anchors, self._value, self._wanted = anchors, value, wanted
        self._operators, self._reference_operators = operators, reference_operators
        self._by_size, self._inherited = by_size, _inherited(anchors, operators)
        self._limit = _allowed(anchors, operators, value, wanted)
        self.is_cut_short = False

    def run(
        self, most: int, among: Collection[int] | None = None
    ) -> tuple[Value, Value, Layout] | None:
        """Returns the first end that fits.

        Args:
            most: how many operators are run again at most.
            among: the values that are tried, by index; default all.
        """
        anchors, value, wanted = self._anchors, self._value, self._wanted
        known = anchors.arrays_before(self._operators)
        first = None
        ends = _ends(anchors, self._operators, value, self._by_size, self._inherited, among)
        for end, ways in itertools.groupby(ends, lambda way: way[0]):
            later = depending(self._operators, end)
            remade = {v.index for op in later for v in op.outputs}
            given = known | {
                v.index: anchors.arrays[v.index]
                for op in self._operators
                for v in op.outputs
                if v.index in anchors.arrays and v.index not in remade
            }
            tried = set()
            for _, other, layout in ways:
                trial = {end.index: layout.apply(other.data)}
                same = digest(trial), other.index
                if same in tried:
                    continue
                tried.add(same)
                most -= len(later)
                if most < 0:
                    self.is_cut_short = True
                    return first
                again = run_again(later, given | trial).get(value.index)
                if again is None or not find_layout(wanted.data, again, self._limit):
                    continue
                found = end, other, layout
                if _follows_alike(anchors, found, value, wanted, self._reference_operators):
                    return found
                first = first or found
        return first


def _narrow_places(anchors: Anchors, operators: Sequence[Operator], value: Value) -> set[int]:
    """Returns the values of a segment beside which no other leads to the required one.

    Anchors are right, so that they do not count.
    """
    last = {v.index: place for place, op in enumerate(operators) for v in op.inputs}
    last[value.index] = len(operators)
    open_ones: set[int] = set()
    found = set()
    for place, operator in enumerate(operators):
        open_ones |= {v.index for v in operator.outputs if v.index not in anchors.matches}
        open_ones = {index for index in open_ones if last.get(index, -1) > place}
        if len(open_ones) == 1:
            found |= open_ones
    return found


def _permuted(
    anchors: Anchors, operators: Sequence[Operator], wanted: Value, value: Value
) -> tuple[Layout, float] | None:
    """Returns the order of axes that values have which enter a segment, and how far it is off."""
    shape, own = _without_ones(wanted.shape), _without_ones(value.shape)
    array, best = anchors.array(value), None
    for entering, found in _inherited(anchors, operators).items():
        for layout in found:
            is_same = layout.split == entering and len(entering) == len(shape)
            if not is_same or tuple(shape[axis] for axis in layout.order) != own:
                continue
            one = Layout(shape, layout.order, value.shape)
            right = one.apply(wanted.data)
            with np.errstate(invalid="ignore"):
                far = float(np.sqrt(np.mean((right - array) ** 2) / (np.mean(right**2) or 1.0)))
            if math.isnan(far):
                continue
            if best is None or far < best[1]:
                best = one, far
    return best


def _allowed(anchors: Anchors, operators: Sequence[Operator], value: Value, wanted: Value) -> float:
    """Returns what may be left of an error once its cause is put right.

    What follows the cause may have numbers that were rounded to float32, such as a scale. They
    count where they are a small part of the error: else nothing need be put right.
    """
    exact, scale = rounding_allowed(wanted.data), largest(wanted.data)
    near = nearest_layout(wanted.data, anchors.array(value), is_plain=True)
    rounded = constant_rounding(operators, value, anchors.arrays_before(operators))
    is_small = near is None or rounded <= REMAINS * near[1] * scale
    return exact + rounded if is_small else exact


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
    own = layout.invert(anchors.array(end), other.shape)
    made = run_again(later, {other.index: own}).get(wanted.index)
    wrong = anchors.array(value)
    return made is None or find_layout(made, wrong, ALIKE * (largest(wrong) or 1.0)) is not None


def _ends(
    anchors: Anchors,
    operators: Sequence[Operator],
    value: Value,
    by_size: Mapping[int, Sequence[Value]],
    inherited: Mapping[Shape, Sequence[Layout]],
    among: Collection[int] | None,
) -> Iterator[tuple[Value, Value, Layout]]:
    """Yields values of a segment with what they might have to be, in order."""
    for operator in operators:
        for made in operator.outputs:
            array = anchors.array(made)
            if made is value or getattr(array, "dtype", np.dtype(int)).kind != "f":
                continue
            if made.index in anchors.matches or (among is not None and made.index not in among):
                continue
            tried = []
            for other in by_size.get(array.size, ())[:MOST_TRIED]:
                near = nearest_layout(other.data, array, is_plain=True)
                if near is not None:
                    tried.append((near[1], other.index, other, near[0]))
            for _, _, other, layout in sorted(tried, key=lambda t: t[:2])[:MOST_NEAR]:
                for one in _layouts(layout, other, made, inherited):
                    yield made, other, one


def _inherited(anchors: Anchors, operators: Sequence[Operator]) -> dict[Shape, list[Layout]]:
    """Returns the layouts of what enters a segment, by the reference's shape.

    Between wrong values and right ones the nearest layout may be any. What is made of an anchor,
    number by number, has its layout.
    """
    found: dict[Shape, list[Layout]] = defaultdict(list)
    made = {value.index for operator in operators for value in operator.outputs}
    read = {v: None for step in operators for v in step.inputs if v.index not in made}
    # Halves of heads have fewer numbers than what is made of them.
    whole = [v for part in read if part.producer is not None for v in part.producer.inputs]
    for value in dict.fromkeys([*read, *whole]):
        if not value.is_activation:
            continue
        for match in anchors.matches.get(value.index, ()):
            shape = _without_ones(match.value.shape)
            if match.layout not in found[shape]:
                found[shape].append(match.layout)
    return found


def _layouts(
    nearest: Layout, other: Value, made: Value, inherited: Mapping[Shape, Sequence[Layout]]
) -> Iterator[Layout]:
    """Yields the layouts in which a value of the reference may be one of the candidate."""
    same_shape = inherited.get(_without_ones(other.shape), ())
    found = [Layout(layout.split, layout.order, made.shape) for layout in same_shape]
    yield from dict.fromkeys([*found, nearest])


def _without_ones(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def wrong_factors(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
) -> list[tuple[Value, Value, Layout]]:
    """Returns the factors of a product that make the value right if both are replaced.

    Queries and keys may both be wrong, and then neither alone makes the scores right.
    """
    inherited, left = _inherited(anchors, operators), MOST_RUN
    for operator in reversed(operators):
        factors = [v for v in operator.inputs if v.is_activation]
        if KINDS.get(operator.name) != "product" or len(factors) != 2:
            continue
        # One of them may equal another value of the reference, like values in the place of keys.
        if all(_is_plain(anchors, factor) for factor in factors):
            continue
        later = [op for op in operators if op.index >= operator.index]
        known = anchors.arrays_before(later)
        limit = _allowed(anchors, later, value, wanted)
        spreads = _spreads(operator, reference_operators)
        tried = set()
        for pair in _pairs(anchors, factors, reference_operators):
            among = [
                _different(
                    (v, layout) for v in others for layout in _tried(anchors, inherited, factor, v)
                )
                for factor, others in zip(factors, pair, strict=True)
            ]
            for one, other in itertools.product(*among):
                trial = {factors[0].index: one[2], factors[1].index: other[2]}
                same = digest(trial)
                if same in tried or left <= 0:
                    continue
                tried.add(same)
                product = run_again([operator], known | trial)
                left -= 1
                if spreads and not _has_spread(product[operator.outputs[0].index], spreads):
                    continue
                again = run_again(later, product)
                left -= len(later)
                if value.index in again and find_layout(wanted.data, again[value.index], limit):
                    return [(factors[0], *one[:2]), (factors[1], *other[:2])]
    return []


def _different(
    ways: Iterable[tuple[Value, Layout]],
) -> list[tuple[Value, Layout, np.ndarray]]:
    """Returns the ways that give different arrays, with these."""
    found: dict[bytes, tuple[Value, Layout, np.ndarray]] = {}
    for value, layout in ways:
        array = layout.apply(value.data)
        found.setdefault(digest({0: array}), (value, layout, array))
    return list(found.values())


def _spreads(operator: Operator, reference_operators: Sequence[Operator]) -> list[float]:
    """Returns the spreads of the reference's products that may be a product of the candidate.

    None are returned where one of them adds something.
    """
    size = operator.outputs[0].size
    products = [
        other
        for other in reference_operators
        if KINDS.get(other.name) == "product" and other.outputs[0].size == size
    ]
    if any(len(other.inputs) != 2 for other in (operator, *products)):
        return []
    return [_spread(other.outputs[0].data) for other in products]


def _has_spread(array: np.ndarray, spreads: Sequence[float]) -> bool:
    own = _spread(array)
    # Infinite numbers have none.
    return any(not abs(own - other) > SAME_SPREAD * other for other in spreads)


def _spread(array: np.ndarray) -> float:
    """Returns what no layout changes, and no factor: the norm over the largest number."""
    norm = float(np.sqrt(np.einsum("i,i->", array.reshape(-1), array.reshape(-1))))
    return norm / (largest(array) or 1.0)


def _is_plain(anchors: Anchors, value: Value) -> bool:
    """Returns whether a value is an anchor with no part of an axis in another order."""
    matches = anchors.matches.get(value.index, ())
    turned = (match.layout.turns(match.value.shape) for match in matches)
    return bool(matches) and not any(turned)


def _tried(
    anchors: Anchors, inherited: Mapping[Shape, Sequence[Layout]], factor: Value, other: Value
) -> Iterator[Layout]:
    shape = other.shape
    nearest = nearest_layout(other.data, anchors.array(factor), is_plain=True)
    if nearest is not None:
        yield from _layouts(nearest[0], other, factor, inherited)
    # A product of two wrong factors has no nearest; axes that only change places are the likeliest.
    whole = (n for n in layouts(shape, factor.shape) if n.split == _without_ones(shape))
    yield from itertools.islice(whole, MOST_PERMUTED)


def _pairs(
    anchors: Anchors, factors: Sequence[Value], reference_operators: Sequence[Operator]
) -> Iterator[list[list[Value]]]:
    """Yields values of the reference that may be the two factors: those of its products first."""
    for operator in reversed(reference_operators):
        read = [v for v in operator.inputs if v.is_activation]
        if KINDS.get(operator.name) != "product" or len(read) != 2:
            continue
        for order in (read, read[::-1]):
            chains = [_chain(v) for v in order]
            yield [
                [v for v in reversed(chain) if v.size == factor.size]
                for chain, factor in zip(chains, factors, strict=True)
            ]
    made = [v for op in reference_operators for v in op.outputs if v.dtype.kind == "f"]
    yield [_nearest(anchors, factor, made) for factor in factors]


def _chain(value: Value) -> list[Value]:
    """Returns a value, and those of which it has the numbers in another layout."""
    found = [value]
    while value.producer is not None and value.producer.name in LAYOUT_ONLY:
        value = value.producer.inputs[0]
        found.append(value)
    return found


def _nearest(anchors: Anchors, factor: Value, among: Sequence[Value]) -> list[Value]:
    near = [
        (found[1], made.index, made)
        for made in among
        if made.size == factor.size
        for found in [nearest_layout(made.data, anchors.array(factor), is_plain=True)]
        if found is not None
    ]
    return [made for _, _, made in sorted(near, key=lambda item: item[:2])[:MOST_FACTORS]]
