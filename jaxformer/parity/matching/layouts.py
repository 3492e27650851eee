"""Whether two arrays hold the same numbers in different layouts, and in which.

A layout is a way to get from the reference's array to the candidate's: split its axes, permute
them, and reshape. This covers transposed kernels, heads split off the width, channels last, and
batches folded into rows.
"""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator

import numpy as np

from jaxformer.parity.cores import share

# Above this number of axes the permutations are too many.
MOST_AXES = 6
SAMPLES = 64
# Large arrays are compared so many numbers at a time: they stay in the cache of a core.
CHUNK = 1 << 16
# Numbers of this size are what models write for minus infinity: -1e9 as well as the lowest float.
INFINITE = 1e8


@dataclasses.dataclass(frozen=True)
class Layout:
    """The way from the reference's layout to the candidate's.

    Attributes:
        split: the reference's shape with its axes split.
        order: the permutation of these axes.
        shape: of the candidate's array.
    """

    split: tuple[int, ...]
    order: tuple[int, ...]
    shape: tuple[int, ...]

    def apply(self, array: np.ndarray) -> np.ndarray:
        """Returns the reference's array in the candidate's layout."""
        return array.reshape(self.split).transpose(self.order).reshape(self.shape)

    def invert(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Returns the candidate's array in the reference's layout, of the reference's shape."""
        back = np.argsort(self.order)
        permuted = array.reshape([self.split[axis] for axis in self.order])
        return permuted.transpose(back).reshape(shape)

    @property
    def is_reshape(self) -> bool:
        """Whether no number changes its place in memory."""
        kept = [axis for axis in self.order if self.split[axis] != 1]
        return kept == sorted(kept)

    def turns(self, shape: tuple[int, ...]) -> bool:
        """Returns whether parts of one axis of the reference stand the other way round.

        Args:
            shape: of the reference's array.
        """
        ends = set(itertools.accumulate((n for n in shape if n != 1), operator.mul))
        # A part that is not the last of its axis ends where no axis of the reference does.
        is_end = [size in ends for size in itertools.accumulate(self.split, operator.mul)]
        return any(
            later == place + 1 and not is_end[place]
            for later, place in itertools.combinations(self.order, 2)
        )


def layouts(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Layout]:
    """Yields the layouts that lead from one shape to another, the simplest first."""
    known, further = _known_layouts(source, target)
    for place in itertools.count():
        if place == len(known):
            known.extend(itertools.islice(further, 1))
        if place == len(known):
            return
        yield known[place]


@functools.lru_cache(1 << 12)
def _known_layouts(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[Layout], Iterator[Layout]]:
    """Returns the layouts that were asked for so far, and what yields the others.

    The same shapes are compared thousands of times.
    """
    return [], _new_layouts(source, target)


def _new_layouts(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Layout]:
    source = tuple(n for n in source if n != 1)
    if math.prod(source) != math.prod(target):
        return
    yield Layout(source, tuple(range(len(source))), target)
    seen = {(source, tuple(range(len(source))))}
    wanted = tuple(n for n in target if n != 1)
    for split in _splits(source, wanted):
        if len(split) > MOST_AXES:
            continue
        for order in itertools.permutations(range(len(split))):
            # Axes that stay neighbours are one axis.
            if (split, order) in seen or not _fits([split[axis] for axis in order], wanted):
                continue
            seen.add((split, order))
            yield Layout(split, order, target)


def _splits(shape: tuple[int, ...], wanted: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields a shape as it is, and with axes split at sizes that the other shape has."""
    yield shape
    for axis, size in enumerate(shape):
        for part in dict.fromkeys(wanted):
            if 1 < part < size and size % part == 0:
                for two in dict.fromkeys([(part, size // part), (size // part, part)]):
                    yield (*shape[:axis], *two, *shape[axis + 1 :])


def _fits(axes: list[int], wanted: tuple[int, ...]) -> bool:
    """Returns whether a shape becomes another by joining neighbours, or by splitting."""
    steps = [set(itertools.accumulate(shape, lambda a, b: a * b)) for shape in (axes, wanted)]
    return steps[0] <= steps[1] or steps[1] <= steps[0]


@functools.lru_cache(256)
def sample_indices(size: int) -> np.ndarray:
    """Returns indices spread over a flat array of this size, the same for each size."""
    if size <= SAMPLES:
        return np.arange(size)
    return np.unique(np.random.default_rng(size).integers(0, size, SAMPLES))


@dataclasses.dataclass(frozen=True)
class Compared:
    """An array that another one was compared with.

    Attributes:
        array: in the layout of the other.
        error: the largest difference.
    """

    array: np.ndarray
    error: float

    def is_view(self, array: np.ndarray) -> bool:
        """Returns whether an array is the same view of the same memory."""
        own, other = self.array.__array_interface__, array.__array_interface__
        return own["data"][0] == other["data"][0] and (
            (self.array.shape, self.array.strides, self.array.dtype)
            == (array.shape, array.strides, array.dtype)
        )


def find_layout(
    reference: np.ndarray,
    candidate: np.ndarray,
    allowed: float,
    known: Compared | None = None,
) -> tuple[Layout, float] | None:
    """Returns the first layout in which two arrays agree, and the largest difference.

    Args:
        reference: any shape.
        candidate: as many numbers, any shape.
        allowed: the largest difference that counts as equal.
        known: what the candidate was compared with before: most equal values of a run are views of
            one array.
    """
    at = sample_indices(candidate.size)
    wanted = _take(candidate, at)
    for place, layout in enumerate(layouts(reference.shape, candidate.shape)):
        if place == 1:
            # The simplest one fits as a rule; where it does not, none does.
            fits = _fitting(reference, wanted, candidate.shape, allowed)
        if not (fits[place] if place else is_close(_pick(reference, layout), wanted, allowed)):
            continue
        laid = layout.apply(reference)
        if known is not None and known.is_view(laid):
            error = known.error
        else:
            error = distance(laid, candidate)
        if error <= allowed:
            return layout, error
    return None


def nearest_layout(
    reference: np.ndarray,
    candidate: np.ndarray,
    gain: float = 0.999,
    is_plain: bool = False,
    factor: float = 1.0,
) -> tuple[Layout, float] | None:
    """Returns the layout in which two arrays differ least, and their distance.

    The distance is the root mean square of the difference over that of the reference, on a sample;
    infinities of the same sign are equal. None if there are no finite numbers.

    Args:
        reference: any shape.
        candidate: as many numbers, any shape.
        gain: a less simple layout must bring the distance down by this factor.
        is_plain: whether to leave out layouts that turn parts of an axis around.
        factor: what the candidate's numbers are multiplied by before they are compared.
    """
    if not candidate.size:
        # Of an expert that no token chose.
        return None
    at = sample_indices(candidate.size)
    wanted = factor * _take(candidate, at)
    best: tuple[Layout, float] | None = None
    known, places = _all_places(reference.shape, candidate.shape)
    picked = _take(reference, places)
    both = is_finite(picked) & is_finite(wanted)
    with np.errstate(all="ignore"):
        norms = np.sqrt(np.sum(picked**2, 1, where=both) / both.sum(1))
        moves = np.sqrt(np.sum((picked - wanted) ** 2, 1, where=both) / both.sum(1))
        apart = 1 - np.mean(both | (picked == wanted), 1)
        distances = moves / np.where(norms == 0, 1.0, norms) + apart
    for (layout, is_turned), far in zip(known, distances.tolist(), strict=True):
        # Of those without a finite number the distance is none.
        if (is_plain and is_turned) or math.isnan(far):
            continue
        if best is None or far < gain * best[1]:
            best = layout, far
    return best


def _fitting(
    reference: np.ndarray, wanted: np.ndarray, shape: tuple[int, ...], allowed: float
) -> list[bool]:
    """Returns of each layout to a shape whether the sample is as wanted."""
    picked = _take(reference, _all_places(reference.shape, shape)[1])
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.abs(picked - wanted).max(1)
    if not (far < INFINITE).all():
        return [is_close(row, wanted, allowed) for row in picked]
    return list(far <= allowed)


@functools.lru_cache(64)
def _all_places(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[list[tuple[Layout, bool]], np.ndarray]:
    """Returns the layouts between two shapes, whether each turns parts of an axis, and places.

    The places are those of the sample in the reference's array, a row for each layout.
    """
    found = list(layouts(source, target))
    size = len(sample_indices(math.prod(target)))
    places = [_places(layout) for layout in found]
    return (
        [(layout, layout.turns(source)) for layout in found],
        np.array(places, np.intp).reshape(len(found), size),
    )


def _pick(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Returns the sample of an array in another layout, without copying the array."""
    return _take(array, _places(layout))


@functools.lru_cache(1 << 12)
def _places(layout: Layout) -> np.ndarray:
    """Returns where in the reference's array the sample of the candidate's is."""
    indices = sample_indices(math.prod(layout.split))
    permuted = tuple(layout.split[axis] for axis in layout.order)
    if not permuted:
        return indices
    digits = np.unravel_index(indices, permuted)
    digits_by_axis = [digits[layout.order.index(axis)] for axis in range(len(layout.split))]
    return np.ravel_multi_index(digits_by_axis, layout.split)


def _take(array: np.ndarray, flat: np.ndarray) -> np.ndarray:
    """Returns numbers at flat indices, without copying an array that is not contiguous."""
    if array.flags.c_contiguous:
        return array.reshape(-1)[flat]
    return array[np.unravel_index(flat, array.shape)]


def is_finite(array: np.ndarray) -> np.ndarray:
    """Returns which numbers are neither infinite, nor NaN, nor stand for infinity."""
    return np.abs(array) < INFINITE


def is_close(one: np.ndarray, other: np.ndarray, allowed: float) -> bool:
    """Returns whether no two numbers are further apart than allowed."""
    return distance(one, other) <= allowed


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference; infinite where only one side is finite."""
    if one.size == 0 or Compared(one, 0.0).is_view(other):
        return 0.0
    if one.size > CHUNK and one.shape == other.shape:
        if one.shape[0] == 1:
            return distance(one[0], other[0])
        return max(share(len(one), one.size, lambda rows: _largest_of(one[rows], other[rows])))
    return _distance(one, other)


def _largest_of(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest distance of some rows of two arrays."""
    rows = max(1, CHUNK * len(one) // one.size)
    starts = range(0, len(one), rows)
    return max(distance(one[i : i + rows], other[i : i + rows]) for i in starts)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        far = np.asarray(np.subtract(one, other))
        np.abs(far, out=far)
    largest = float(far.max())
    if not largest < INFINITE:
        finite = is_finite(one), is_finite(other)
        same = (one == other) | ((one != one) & (other != other))
        same |= ~(finite[0] | finite[1]) & (np.sign(one) == np.sign(other))
        far = np.where(same, 0.0, np.where(finite[0] & finite[1], far, np.inf))
        largest = float(far.max())
    return largest
