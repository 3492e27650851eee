"""Which value of the reference a value of the candidate is, found by their numbers.

Values are looked up by what no change of layout changes: their count, and sums over them. What is
found is then compared number by number.
"""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from jaxformer.parity.cores import share
from jaxformer.parity.matching.layouts import (
    INFINITE,
    Compared,
    Layout,
    find_layout,
    is_finite,
)
from jaxformer.parity.recording.operators.graph import Value, first_shape, same_numbers
from jaxformer.parity.tolerance import allowed_error

# How far sums of equal values may be apart: many times what single numbers may.
SUMS_ALLOWED = 1e-8
# Arrays with more numbers are not cubed.
MOST_CUBED = 1 << 16
# Sums are taken over so many numbers at a time, which stay in the cache of a core.
CHUNK = 1 << 15
# Fewer numbers than this may be equal by chance.
FEWEST = 4


def largest(array: np.ndarray) -> float:
    """Returns the largest finite magnitude."""
    if not array.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        found = max(float(array.max()), -float(array.min()))
    if found < INFINITE:
        return found
    finite = np.abs(array[is_finite(array)])
    return float(finite.max()) if finite.size else 0.0


def rounding_allowed(reference: np.ndarray) -> float:
    """Returns the largest difference between two values that counts as rounding in float64."""
    return allowed_error(largest(reference))


def moments(array: np.ndarray) -> np.ndarray:
    """Returns what no change of layout changes: means of x, x² and x³, extremes, and a count.

    Infinities and NaN are left out and counted. Large arrays have no mean of x³.
    """
    flat = array.ravel(order="K")
    if not flat.size:
        return np.zeros(6)
    highest, lowest, total, squares = _sums(flat)
    missing = 0
    if not (highest < INFINITE and lowest > -INFINITE):
        finite = is_finite(flat)
        missing = flat.size - int(np.count_nonzero(finite))
        flat = flat[finite]
        if not flat.size:
            return np.array([missing, 0, 0, 0, 0, 0], np.float64)
        highest, lowest, total, squares = _sums(flat)
    scale = max(highest, -lowest)
    unit = scale or 1.0
    with np.errstate(all="ignore"):
        cube = float(np.dot(flat * flat, flat)) if flat.size <= MOST_CUBED else 0.0
    means = np.array([total, squares / unit, cube / unit / unit]) / flat.size
    return np.array([missing, scale, *means, highest - lowest])


def _sums(flat: np.ndarray) -> tuple[float, float, float, float]:
    """Returns the highest and the lowest number, their sum, and the sum of their squares."""

    def of_chunks(part: slice) -> list[tuple[float, float, float, float]]:
        found = []
        with np.errstate(all="ignore"):
            for first in range(part.start, part.stop, CHUNK):
                chunk = flat[first : min(first + CHUNK, part.stop)]
                # Not np.dot, whose threads would wait for each other.
                squares = np.einsum("i,i->", chunk, chunk)
                found.append((chunk.max(), chunk.min(), chunk.sum(), squares))
        return found

    chunks = itertools.chain.from_iterable(share(flat.size, flat.size, of_chunks))
    columns = np.array(list(chunks)).T
    with np.errstate(all="ignore"):
        highest, lowest = columns[0].max(), columns[1].min()
        return float(highest), float(lowest), float(columns[2].sum()), float(columns[3].sum())


@dataclasses.dataclass(frozen=True)
class Match:
    """A value of the reference that a value of the candidate equals.

    Attributes:
        value: of the reference.
        layout: from the reference's to the candidate's.
        error: the largest difference.
    """

    value: Value
    layout: Layout
    error: float


class Index:
    """Float values of the reference, to be looked up by their numbers."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[Value]] = defaultdict(list)
        # Of the values of one size, row by row: those whose moments were needed so far.
        self._rows: dict[int, np.ndarray] = {}
        self._moments: dict[int, np.ndarray] = {}

    def add(self, values: Iterable[Value]) -> None:
        """Adds values that can be found from now on."""
        for value in values:
            if _is_looked_up(value):
                self._by_size[value.size].append(value)

    def note(self, value: Value) -> None:
        """Computes the moments of a value that may be added later, before it is forgotten."""
        if _is_looked_up(value):
            self.moments_of(value)

    def moments_of(self, value: Value) -> np.ndarray:
        """Returns the moments of a value of the reference, computed once."""
        if value.index not in self._moments:
            source = same_numbers(value)
            self._moments[value.index] = (
                moments(value.data) if source is None else self.moments_of(source)
            )
        return self._moments[value.index]

    def is_finite(self, value: Value) -> bool:
        """Returns whether all numbers of a value of the reference are finite."""
        return self.moments_of(value)[0] == 0

    def largest(self, value: Value) -> float:
        """Returns the largest finite magnitude of a value of the reference."""
        return float(self.moments_of(value)[1])

    def is_one_number(self, value: Value) -> bool:
        """Returns whether all numbers of a value of the reference are finite and the same."""
        return self.is_finite(value) and self.moments_of(value)[5] == 0

    def are_near(self, one: Value, other: Value) -> bool:
        """Returns whether two values of the reference may have the same numbers, in any order."""
        rows = self.moments_of(one)[None]
        return one.size == other.size and bool(_are_near(rows, self.moments_of(other))[0])

    def twins(self, value: Value) -> list[Match]:
        """Returns the values of the reference that equal one of them, and are made otherwise.

        Neither it nor what is the same in another shape is among them.
        """
        own = self.moments_of(value)
        first = first_shape(value)
        near = [one for one in self._near(own, value.size) if first_shape(one) is not first]
        # A large weight is in memory only while it is read.
        return self._equal(near, value.data, own) if near else []

    def find(
        self,
        array: np.ndarray,
        allowed: float = 0.0,
        slack: float = 1.0,
        own: np.ndarray | None = None,
    ) -> list[Match]:
        """Returns the values that an array equals, in the order of the reference's run.

        Args:
            array: of the candidate, floats.
            allowed: the largest difference, of scale; default what rounding allows.
            slack: how many times further apart the sums may be.
            own: the array's moments, if they are known.
        """
        if not self._by_size.get(array.size):
            return []
        own = moments(array) if own is None else own
        near = self._near(own, array.size, slack)
        return self._equal(near, array, own, allowed)

    def _near(self, own: np.ndarray, size: int, slack: float = 1.0) -> list[Value]:
        """Returns the values of one size whose moments are near to these."""
        among, rows = self._by_size[size], self._moments_of_size(size)
        return [among[place] for place in np.flatnonzero(_are_near(rows, own, slack))]

    def _equal(
        self, near: Sequence[Value], array: np.ndarray, own: np.ndarray, allowed: float = 0.0
    ) -> list[Match]:
        """Returns those of some values that an array equals; see ``find``."""
        found: list[Match] = []
        known: Compared | None = None
        # Each is read once: it may have to be made again. Most of them are views of one array.
        read: dict[int, np.ndarray] = {}
        for value in near:
            data = read[value.index] = value.data_beside(read)
            limit = allowed * (own[1] or 1.0) if allowed else allowed_error(self.largest(value))
            layout = find_layout(data, array, limit, known)
            if layout is not None:
                found.append(Match(value, *layout))
                if known is None:
                    known = Compared(layout[0].apply(data), layout[1])
        return found

    def _moments_of_size(self, size: int) -> np.ndarray:
        """Returns the moments of all values of one size, a row for each."""
        among, rows = self._by_size[size], self._rows.get(size, np.zeros((0, 6)))
        if len(rows) < len(among):
            added = [self.moments_of(value) for value in among[len(rows) :]]
            rows = self._rows[size] = np.concatenate([rows, added])
        return rows


def _are_near(rows: np.ndarray, own: np.ndarray, slack: float = 1.0) -> np.ndarray:
    """Returns which rows of moments are those of an array, up to rounding."""
    limit = slack * SUMS_ALLOWED * (own[1] or 1.0)
    return (rows[:, 0] == own[0]) & (np.abs(rows - own).max(1) <= limit)


def _is_looked_up(value: Value) -> bool:
    return value.dtype.kind == "f" and value.size >= FEWEST
