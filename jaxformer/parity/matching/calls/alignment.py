"""Aligns reference arrays with candidate arrays that have another layout or another order."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np

from jaxformer.parity.recording.calls.padding import Padding

Shape = tuple[int, ...]
# Another option must be this many times nearer than the first one to be chosen instead.
NEARER = 10.0


@dataclasses.dataclass(frozen=True)
class LayoutTransform:
    """Turns a reference array into the layout of the candidate.

    Attributes:
        kind: "same": unchanged; "time first": time and batch swapped; "heads first": time and heads
            swapped; "reshaped": axes before the last joined or split; "first": one row of a batch
            whose rows are all alike.
        shape: of the candidate array.
        rows: for "first" with padding, for each token a row in which it is no padding.
    """

    kind: Literal["same", "time first", "heads first", "reshaped", "first"]
    shape: Shape
    rows: tuple[int, ...] = ()

    def values(self, array: np.ndarray) -> np.ndarray:
        """Returns reference values in the candidate's layout."""
        if self.kind == "time first":
            return np.ascontiguousarray(array.swapaxes(0, 1))
        if self.kind == "heads first":
            return np.ascontiguousarray(array.swapaxes(1, 2))
        if self.kind == "first":
            return array[list(self.rows), range(len(self.rows))][None] if self.rows else array[:1]
        return array.reshape(self.shape)

    def gradients(self, array: np.ndarray) -> np.ndarray:
        """Returns reference gradients in the candidate's layout: of a batch, their sum."""
        return array.sum(axis=0, keepdims=True) if self.kind == "first" else self.values(array)


def layout_transforms(
    reference: Shape, candidate: Shape, padding: Padding | None = None
) -> Iterator[LayoutTransform]:
    """Yields all transforms from one shape to another, the most likely first."""
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
    has_same_width = reference and candidate and reference[-1] == candidate[-1]
    if (
        len(reference) != len(candidate)
        and has_same_width
        and math.prod(reference) == math.prod(candidate)
    ):
        yield LayoutTransform("reshaped", candidate)


def find_transform(
    reference: np.ndarray, candidate: np.ndarray, padding: Padding | None = None
) -> LayoutTransform | None:
    """Returns the transform from a reference array to a candidate array, None if none fits.

    Where several shapes fit, the values decide.
    """
    options = [
        (transform, reference)
        for transform in layout_transforms(reference.shape, tuple(candidate.shape), padding)
    ]
    return options[_nearest(options, candidate)][0] if options else None


@dataclasses.dataclass(frozen=True)
class TensorAlignment:
    """Says for each candidate array which reference array it is, and in which layout.

    Attributes:
        places: the index of the reference array, None where there is none.
        layout_transforms: from the reference array to the candidate's, None where there is none.
    """

    places: tuple[int | None, ...]
    layout_transforms: tuple[LayoutTransform | None, ...]

    def values(self, reference: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Returns reference values for each candidate array; None where there are none."""
        return [
            None if place is None or transform is None else transform.values(reference[place])
            for place, transform in zip(self.places, self.layout_transforms, strict=True)
        ]

    def groups(self, identities: Sequence[int]) -> list[list[int]]:
        """Returns indices of candidate arrays, grouped by the reference tensor that they are.

        In self-attention queries, keys and values are one tensor.

        Args:
            identities: a number for each reference array, equal for those that are one tensor.
        """
        found: dict[int, list[int]] = {}
        for n, place in enumerate(self.places):
            if place is not None:
                found.setdefault(identities[place], []).append(n)
        return list(found.values())

    def gradients(
        self, reference: Sequence[np.ndarray | None], identities: Sequence[int]
    ) -> list[np.ndarray | None]:
        """Returns reference gradients for the first candidate array of each group, else None.

        A module of the reference may take one tensor three times where the candidate takes it once,
        so the gradients of a tensor are added up.
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
    candidate: Sequence[np.ndarray], reference: Sequence[np.ndarray], padding: Padding | None = None
) -> TensorAlignment:
    """Finds for each candidate array the first reference array that fits, or a far nearer one."""
    places: list[int | None] = []
    chosen: list[LayoutTransform | None] = []
    left = list(range(len(reference)))
    for array in candidate:
        fitting = [
            (transform, place)
            for place in left
            for transform in layout_transforms(reference[place].shape, tuple(array.shape), padding)
        ]
        if not fitting:
            places.append(None)
            chosen.append(None)
            continue
        options = [(transform, reference[place]) for transform, place in fitting]
        transform, place = fitting[_nearest(options, array)]
        left.remove(place)
        places.append(place)
        chosen.append(transform)
    return TensorAlignment(tuple(places), tuple(chosen))


def _nearest(options: Sequence[tuple[LayoutTransform, np.ndarray]], candidate: np.ndarray) -> int:
    """Returns the index of the first option, unless another one is far nearer in its values."""
    if len(options) == 1:
        return 0
    values = np.asarray(candidate)
    with np.errstate(invalid="ignore"):
        distances = [
            float(np.mean(np.abs(transform.values(array) - values))) for transform, array in options
        ]
    best = min(range(len(distances)), key=lambda n: (distances[n], n))
    return best if NEARER * distances[best] < distances[0] else 0
