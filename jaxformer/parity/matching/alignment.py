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
class LayoutTransform:
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


def layout_transforms(
    reference: Shape, candidate: Shape, padding: Padding | None = None
) -> Iterator[LayoutTransform]:
    """All ways from one shape to another, the likeliest first."""
    if reference == candidate:
        yield LayoutTransform("same", candidate)
    if len(reference) == len(candidate) >= 2:
        if (reference[1], reference[0], *reference[2:]) == candidate:
            yield LayoutTransform("time first", candidate)
        if (
            len(candidate) == 4
            and (reference[0], reference[2], reference[1], reference[3]) == candidate
        ):
            yield LayoutTransform("heads first", candidate)
        if reference[0] != 1 == candidate[0] and reference[1:] == candidate[1:]:
            unused = (padding or {}).get(reference[:2])
            rows = () if unused is None else tuple(unused.argmin(axis=0).tolist())
            yield LayoutTransform("first", candidate, rows)
    same_width = reference and candidate and reference[-1] == candidate[-1]
    if (
        len(reference) != len(candidate)
        and same_width
        and math.prod(reference) == math.prod(candidate)
    ):
        yield LayoutTransform("reshaped", candidate)


def transform_to(
    reference: np.ndarray, candidate: Any, padding: Padding | None = None
) -> LayoutTransform | None:
    """How an array of theirs becomes one of ours, whose values decide where shapes do not."""
    found = list(layout_transforms(reference.shape, tuple(candidate.shape), padding))
    return (
        _nearest([(transform, reference) for transform in found], candidate)[0] if found else None
    )


@dataclasses.dataclass(frozen=True)
class TensorAlignment:
    """For each array of ours the one of theirs.

    Attributes:
        places: of theirs; None where they have none.
        ways: from theirs to ours.
    """

    places: tuple[int | None, ...]
    layout_transforms: tuple[LayoutTransform | None, ...]

    def values(self, reference: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Their values as ours; None where they have none."""
        return [
            None if place is None or transform is None else transform.values(reference[place])
            for place, transform in zip(self.places, self.layout_transforms, strict=True)
        ]

    def groups(self, identities: Sequence[int]) -> list[list[int]]:
        """Places of ours that theirs fills with one tensor: queries, keys and values are one x."""
        found: dict[int, list[int]] = {}
        for n, place in enumerate(self.places):
            if place is not None:
                found.setdefault(identities[place], []).append(n)
        return list(found.values())

    def gradients(
        self, reference: Sequence[np.ndarray | None], identities: Sequence[int]
    ) -> list[np.ndarray | None]:
        """Their gradients as ours: of what one tensor fills together, at its first place.

        A module of theirs may take three times what ours takes once.
        """
        total: list[np.ndarray | None] = [None] * len(self.places)
        for group in self.groups(identities):
            place, transform = self.places[group[0]], self.layout_transforms[group[0]]
            assert place is not None
            assert transform is not None
            same = [g for g, i in zip(reference, identities, strict=True) if i == identities[place]]
            known = [g for g in same if g is not None]
            if known:
                total[group[0]] = transform.gradients(sum(known[1:], known[0]))
        return total


def align_tensors(
    candidate: Sequence[Any], reference: Sequence[np.ndarray], padding: Padding | None = None
) -> TensorAlignment:
    """Finds for each array of ours the first of theirs that can be it, or one far nearer to it."""
    places: list[int | None] = []
    chosen: list[LayoutTransform | None] = []
    left = list(range(len(reference)))
    for array in candidate:
        candidates = [
            (transform, place)
            for place in left
            for transform in layout_transforms(reference[place].shape, tuple(array.shape), padding)
        ]
        if not candidates:
            places.append(None)
            chosen.append(None)
            continue
        transform, place = _nearest([(w, reference[p]) for w, p in candidates], array, candidates)
        left.remove(place)
        places.append(place)
        chosen.append(transform)
    return TensorAlignment(tuple(places), tuple(chosen))


def _nearest(
    candidates: Sequence[tuple[LayoutTransform, np.ndarray]], candidate: Any, names: Any = None
) -> Any:
    """The first candidate, unless another is far nearer."""
    names = candidates if names is None else names
    if len(candidates) == 1:
        return names[0]
    mine = np.asarray(candidate)
    with np.errstate(invalid="ignore"):
        distances = [
            float(np.mean(np.abs(transform.values(a) - mine))) for transform, a in candidates
        ]
    best = min(range(len(distances)), key=lambda n: (distances[n], n))
    return names[best] if NEARER * distances[best] < distances[0] else names[0]
