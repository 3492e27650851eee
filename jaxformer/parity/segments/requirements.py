"""Holds what is known of modules against the candidate's values, in the order of its run."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.known_modules import Requirement
from jaxformer.parity.matching.layouts import (
    Layout,
    distance,
    find_layout,
    nearest_layout,
)
from jaxformer.parity.matching.values import Match, largest
from jaxformer.parity.recording.operators.graph import Operator, Value, region_before, same_numbers
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.tolerance import allowed_error

# Yields the rows of an array that are used, given the requirement; nothing if all are.
UsedRows = Callable[[np.ndarray, Requirement], Iterator[np.ndarray]]


class Requirements:
    """What values of the candidate must be, settled as soon as the walk has come to them.

    Args:
        walk: it puts right what is wrong.
        used_rows: of an array (B, T, ...) with tokens that nobody uses, the others.

    Attributes:
        all: the requirements, in the order in which they were added.
    """

    def __init__(self, walk: Walk, used_rows: UsedRows):
        self._walk, self._used_rows = walk, used_rows
        self._by_value: dict[int, list[Requirement]] = defaultdict(list)
        self.all: list[Requirement] = []

    def add(self, found: Iterable[Requirement]) -> None:
        """Adds requirements on values that the walk has not come to yet."""
        for one in found:
            self.all.append(one)
            if one.values:
                self._by_value[one.place].append(one)
            else:
                scale = largest(one.wanted.data)
                one.difference = Difference(scale, scale, 0.0) if one.is_known else None

    def settle(self, operator: Operator) -> None:
        """Holds the requirements on what an operator made against it."""
        for value in operator.outputs:
            for one in self._by_value.pop(value.index, ()):
                self._settle(one)

    def settle_rest(self) -> None:
        """Does so with those on values that no operator made."""
        for index in sorted(self._by_value):
            for one in self._by_value.pop(index):
                self._settle(one)

    def _settle(self, one: Requirement) -> None:
        walk, wanted = self._walk, one.wanted
        if self._is_same(one):
            return
        value = self._total(one)
        if one.source is not None and one.source.index in walk.arrays and value.producer:
            # What shows it was recorded after the run.
            (walk.arrays[value.index],) = value.producer.run(walk.array(one.source))
        array = walk.array(value)
        scale = walk.index.largest(wanted)
        allowed = allowed_error(scale)
        layout = _same_layout(wanted.data, array)
        if layout is None:
            found = find_layout(wanted.data, array, allowed)
        else:
            far = distance(layout.apply(wanted.data), array)
            found = (layout, far) if far <= allowed else None
        if found is not None:
            one.difference = Difference(max(found[1], self._rounding(value)), scale, allowed)
            walk.matches.setdefault(value.index, []).append(Match(wanted, *found))
            walk.reached.add(wanted.index)
            return
        if layout is None and (near := nearest_layout(wanted.data, array)) is not None:
            layout = near[0]
        if layout is not None:
            right = layout.apply(wanted.data)
            pairs = zip(self._used_rows(array, one), self._used_rows(right, one), strict=True)
            apart = [distance(made, other) for made, other in pairs]
            if apart and max(apart) <= allowed:
                one.difference = Difference(max(apart), scale, allowed)
                self._put_right(one, value, layout)
                return
            if not one.is_known:
                self._put_right(one, value, layout)
                return
            apart = apart or [distance(right, array)]
            operators, _ = region_before([value], lambda v: v.index in walk.matches)
            one.difference = Difference(max(apart), scale, walk.allowed(operators, value, scale))
        else:
            one.difference = Difference(float("inf"), scale, allowed)
        if one.measure is not None and one.source is not None:
            one.difference = one.measure(walk.array(one.source))
        walk.diverge(value, wanted, layout, " + ".join(one.owner))
        # What was found to be wrong may have led to a value that is right for tokens in use alone.
        is_derived = len(one.values) > 1 or one.source is not None
        if layout is not None and (is_derived or distance(right, walk.array(value)) > 0):
            self._put_right(one, value, layout)

    def _is_same(self, one: Requirement) -> bool:
        """Returns whether a value is known to be the right one; that costs no reading."""
        if one.same is None or one.values[0].index in self._walk.arrays:
            return False
        source, layout = one.same
        for match in self._walk.matches.get(one.values[0].index, ()):
            if match.value is source and match.layout == layout:
                scale = self._walk.index.largest(source)
                one.difference = Difference(match.error, scale, allowed_error(scale))
                return True
        return False

    def _rounding(self, value: Value | None) -> float:
        """Returns how far a value's numbers were off before the reference's took their place."""
        while value is not None:
            found = self._walk.matches.get(value.index)
            if found and same_numbers(value) is None:
                return min(match.error for match in found)
            value = same_numbers(value)
        return 0.0

    def _total(self, one: Requirement) -> Value:
        """Returns the value that a requirement is about: the sum, where there are several."""
        if len(one.values) == 1:
            return one.values[0]

        value = self._walk.candidate.derive(
            "add_any", list(one.values), one.values[0].shape,
            lambda *arrays: np.sum(arrays, axis=0), " + ".join(one.owner),
        )  # fmt: skip
        if any(each.index in self._walk.arrays for each in one.values):
            self._walk.arrays[value.index] = np.sum([*map(self._walk.array, one.values)], axis=0)
        return value

    def _put_right(self, one: Requirement, value: Value, layout: Layout) -> None:
        """Makes what later operators read right."""
        walk = self._walk
        right: Any = layout.apply(one.wanted.data)
        if one.source is not None:
            assert one.right is not None
            walk.replace(one.source, one.right(walk.array(one.source)))
        elif len(one.values) > 1:
            *others, last = one.values
            walk.replace(last, right - np.sum([walk.array(v) for v in others], axis=0))
        else:
            walk.put_right(value, one.wanted, layout)


def _same_layout(right: np.ndarray, array: np.ndarray) -> Layout | None:
    """Returns the layout of an array of the same shape; None where the shapes differ.

    Of known modules what has the same shape is laid alike: any other layout is a bug.
    """
    if right.shape != array.shape:
        return None
    shape = tuple(n for n in right.shape if n != 1)
    return Layout(shape, tuple(range(len(shape))), array.shape)
