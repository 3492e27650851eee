"""Where a wrong segment ends: the earliest value which, put right, makes the rest right."""

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.layouts import (
    Layout,
    find_layout,
    nearest_layout,
)
from jaxformer.parity.matching.values import largest, rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.constants import constant_rounding
from jaxformer.parity.segments.divergences import REMAINS, digest
from jaxformer.parity.segments.effects import depending
from jaxformer.parity.segments.equal_ends import last_equal_end

# How many steps of a wrong segment are tried as its end, for each size.
MOST_TRIED = 40
MOST_NEAR = 8
# So many operators are run again at most to find an end.
MOST_RUN_TO_ENDS = 60_000
# After a bug of the forward pass, whose wrong gradients need no exact place: for one, and for all.
MOST_RUN_IF_EXPLAINED = 6_000
MOST_RUN_FOR_EXPLAINED = 30_000
# Two segments do the same if what they make of the same is this near; their numbers may be rounded.
ALIKE = 1e-5

Shape = tuple[int, ...]


@dataclasses.dataclass
class Tries:
    """How many operators may be run again.

    Attributes:
        left: in all that is still to come.
        most: in one search for an end, each of the two times.
    """

    left: int
    most: int


def earliest_end(
    anchors: Anchors,
    value: Value,
    wanted: Value,
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
    layout: Layout | None,
    tries: Tries,
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
        tries: how many operators may be run again.
    """
    by_size: dict[int, list[Value]] = defaultdict(list)
    for operator in reference_operators:
        for made in operator.outputs:
            if made.dtype.kind == "f" and made.index not in anchors.reached:
                by_size[made.size].append(made)
    search = _Search(anchors, value, wanted, operators, reference_operators, by_size)
    end = search.run(tries)
    if end is None and search.is_cut_short:
        end = search.run(tries, _narrow_places(anchors, operators, value))
    if end is not None:
        required = value, wanted, search.limit
        return last_equal_end(anchors, end, required, operators, reference_operators)
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
        limit: how far the required value may be off.
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
        self._by_size, self._inherited = by_size, inherited_layouts(anchors, operators)
        self.limit = allowed_left(anchors, operators, value, wanted)
        self.is_cut_short = False

    def run(
        self, tries: Tries, among: Collection[int] | None = None
    ) -> tuple[Value, Value, Layout] | None:
        """Returns the first end that fits.

        Args:
            tries: how many operators may be run again.
            among: the values that are tried, by index; default all.
        """
        anchors, value, wanted = self._anchors, self._value, self._wanted
        known = anchors.arrays_before(self._operators)
        first, most = None, tries.most
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
                tries.left -= len(later)
                if min(most, tries.left) < 0:
                    self.is_cut_short = True
                    return first
                again = run_again(later, given | trial).get(value.index)
                if again is None or not find_layout(wanted.data, again, self.limit):
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
    array, best = anchors.array(value), None
    for one in _in_same_order(inherited_layouts(anchors, operators), wanted, value):
        right = one.apply(wanted.data)
        with np.errstate(invalid="ignore"):
            far = float(np.sqrt(np.mean((right - array) ** 2) / (np.mean(right**2) or 1.0)))
        if not math.isnan(far) and (best is None or far < best[1]):
            best = one, far
    return best


def _in_same_order(
    inherited: Mapping[Shape, Sequence[Layout]], wanted: Value, value: Value
) -> Iterator[Layout]:
    """Yields the layouts that keep axes in the order of what enters a segment, of any sizes."""
    shape, own = without_ones(wanted.shape), without_ones(value.shape)
    for entering, found in inherited.items():
        for layout in found:
            is_same = layout.split == entering and len(entering) == len(shape)
            if is_same and tuple(shape[axis] for axis in layout.order) == own:
                yield Layout(shape, layout.order, value.shape)


def allowed_left(
    anchors: Anchors, operators: Sequence[Operator], value: Value, wanted: Value
) -> float:
    """Returns what may be left of an error once its cause is put right.

    What follows the cause may have numbers that were rounded to float32, such as a scale. They
    count where they are a small part of the error: else nothing need be put right.
    """
    exact, scale = rounding_allowed(wanted.data), largest(wanted.data)
    near = nearest_layout(wanted.data, anchors.array(value), is_plain=True)
    rounded = constant_rounding(operators, value, anchors.arrays_before(operators), anchors.unknown)
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
                for one in layouts_of(layout, other, made, inherited):
                    yield made, other, one


def inherited_layouts(anchors: Anchors, operators: Sequence[Operator]) -> dict[Shape, list[Layout]]:
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
            shape = without_ones(match.value.shape)
            if match.layout not in found[shape]:
                found[shape].append(match.layout)
    return found


def layouts_of(
    nearest: Layout, other: Value, made: Value, inherited: Mapping[Shape, Sequence[Layout]]
) -> Iterator[Layout]:
    """Yields the layouts in which a value of the reference may be one of the candidate."""
    same_shape = inherited.get(without_ones(other.shape), ())
    same = (Layout(layout.split, layout.order, made.shape) for layout in same_shape)
    found = [layout for layout in same if not _is_scrambled(layout)]
    # What is made of parts has other sizes than these.
    found = found or list(_in_same_order(inherited, other, made))
    yield from dict.fromkeys([*found, nearest])


def _is_scrambled(layout: Layout) -> bool:
    """Returns whether a layout has the axes of an array, and takes each for another one."""
    sizes = without_ones(tuple(layout.split[axis] for axis in layout.order))
    own = without_ones(layout.shape)
    return sizes != own and sorted(sizes) == sorted(own)


def without_ones(shape: Shape) -> Shape:
    """Returns a shape without its axes of one entry."""
    return tuple(n for n in shape if n != 1)
