"""Which array of theirs is which of ours, where the two sides shape or order them differently."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jaxformer.parity.trace.padding import Padding

Shape = tuple[int, ...]
# A candidate must be this many times nearer than the first before order is not followed.
NEARER = 10.0


@dataclasses.dataclass(frozen=True)
class Way:
    """How an array of theirs becomes one of ours.

    Attributes:
        kind: as it is; time and batch swapped; time and heads swapped; axes before the last joined
            or parted; or the first of a batch whose rows are all alike.
        shape: of ours.
        rows: of a batch whose rows are alike but for padding, for each token one that has it.
    """

    kind: Literal["same", "time first", "heads first", "reshaped", "first"]
    shape: Shape
    rows: tuple[int, ...] = ()

    def values(self, array: np.ndarray) -> np.ndarray:
        """Values of theirs as ours."""
        if self.kind == "time first":
            return np.ascontiguousarray(array.swapaxes(0, 1))
        if self.kind == "heads first":
            return np.ascontiguousarray(array.swapaxes(1, 2))
        if self.kind == "first":
            return array[list(self.rows), range(len(self.rows))][None] if self.rows else array[:1]
        return array.reshape(self.shape)

    def gradients(self, array: np.ndarray) -> np.ndarray:
        """Gradients of theirs as ours."""
        return array.sum(axis=0, keepdims=True) if self.kind == "first" else self.values(array)


def ways(theirs: Shape, ours: Shape, padding: Padding | None = None) -> Iterator[Way]:
    """All ways from one shape to another, the likeliest first."""
    if theirs == ours:
        yield Way("same", ours)
    if len(theirs) == len(ours) >= 2:
        if (theirs[1], theirs[0], *theirs[2:]) == ours:
            yield Way("time first", ours)
        if len(ours) == 4 and (theirs[0], theirs[2], theirs[1], theirs[3]) == ours:
            yield Way("heads first", ours)
        if theirs[0] != 1 == ours[0] and theirs[1:] == ours[1:]:
            unused = (padding or {}).get(theirs[:2])
            rows = () if unused is None else tuple(unused.argmin(axis=0).tolist())
            yield Way("first", ours, rows)
    same_width = theirs and ours and theirs[-1] == ours[-1]
    if len(theirs) != len(ours) and same_width and math.prod(theirs) == math.prod(ours):
        yield Way("reshaped", ours)


def way_to(theirs: np.ndarray, ours: Any, padding: Padding | None = None) -> Way | None:
    """How an array of theirs becomes one of ours, whose values decide where shapes do not."""
    found = list(ways(theirs.shape, tuple(ours.shape), padding))
    return _nearest([(way, theirs) for way in found], ours)[0] if found else None


@dataclasses.dataclass(frozen=True)
class Lineup:
    """For each array of ours the one of theirs.

    Attributes:
        places: of theirs; None where they have none.
        ways: from theirs to ours.
    """

    places: tuple[int | None, ...]
    ways: tuple[Way | None, ...]

    def values(self, theirs: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Their values as ours; None where they have none."""
        return [
            None if place is None or way is None else way.values(theirs[place])
            for place, way in zip(self.places, self.ways, strict=True)
        ]

    def groups(self, identities: Sequence[int]) -> list[list[int]]:
        """Places of ours that theirs fills with one tensor: queries, keys and values are one x."""
        found: dict[int, list[int]] = {}
        for n, place in enumerate(self.places):
            if place is not None:
                found.setdefault(identities[place], []).append(n)
        return list(found.values())

    def gradients(
        self, theirs: Sequence[np.ndarray | None], identities: Sequence[int]
    ) -> list[np.ndarray | None]:
        """Their gradients as ours: of what one tensor fills together, at its first place.

        A module of theirs may take three times what ours takes once.
        """
        total: list[np.ndarray | None] = [None] * len(self.places)
        for group in self.groups(identities):
            place, way = self.places[group[0]], self.ways[group[0]]
            assert place is not None
            assert way is not None
            same = [g for g, i in zip(theirs, identities, strict=True) if i == identities[place]]
            known = [g for g in same if g is not None]
            if known:
                total[group[0]] = way.gradients(sum(known[1:], known[0]))
        return total


def line_up(
    ours: Sequence[Any], theirs: Sequence[np.ndarray], padding: Padding | None = None
) -> Lineup:
    """Finds for each array of ours the first of theirs that can be it, or one far nearer to it."""
    places: list[int | None] = []
    chosen: list[Way | None] = []
    left = list(range(len(theirs)))
    for array in ours:
        candidates = [
            (way, place)
            for place in left
            for way in ways(theirs[place].shape, tuple(array.shape), padding)
        ]
        if not candidates:
            places.append(None)
            chosen.append(None)
            continue
        way, place = _nearest([(w, theirs[p]) for w, p in candidates], array, candidates)
        left.remove(place)
        places.append(place)
        chosen.append(way)
    return Lineup(tuple(places), tuple(chosen))


def _nearest(candidates: Sequence[tuple[Way, np.ndarray]], ours: Any, names: Any = None) -> Any:
    """The first candidate, unless another is far nearer."""
    names = candidates if names is None else names
    if len(candidates) == 1:
        return names[0]
    mine = np.asarray(ours)
    with np.errstate(invalid="ignore"):
        distances = [float(np.mean(np.abs(way.values(a) - mine))) for way, a in candidates]
    best = min(range(len(distances)), key=lambda n: (distances[n], n))
    return names[best] if NEARER * distances[best] < distances[0] else names[0]
