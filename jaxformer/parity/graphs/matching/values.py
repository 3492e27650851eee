"""Which value of the reference a value of the candidate is, found by their numbers.

Values are looked up by what no change of layout changes: their count, and sums over them. What is
found is then compared number by number.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from jaxformer.parity.graphs.matching.layouts import INFINITE, Layout, find_layout, is_finite
from jaxformer.parity.graphs.recording.tape import Value
from jaxformer.parity.tolerance import MIDDLE, ROUNDOFF

# How far sums of equal values may be apart: many times what single numbers may.
SUMS_ALLOWED = 1e-8
# Arrays with more numbers are not cubed.
MOST_CUBED = 1 << 16
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
    return MIDDLE * ROUNDOFF["float32"] * largest(reference)


def moments(array: np.ndarray) -> np.ndarray:
    """Returns what no change of layout changes: means of x, x² and x³, extremes, and a count.

    Infinities and NaN are left out and counted. Large arrays have no mean of x³.
    """
    flat = array.ravel(order="K")
    if not flat.size:
        return np.zeros(6)
    highest, lowest = float(flat.max()), float(flat.min())
    missing = 0
    if not (highest < INFINITE and lowest > -INFINITE):
        finite = is_finite(flat)
        missing = flat.size - int(np.count_nonzero(finite))
        flat = flat[finite]
        if not flat.size:
            return np.array([missing, 0, 0, 0, 0, 0], np.float64)
        highest, lowest = float(flat.max()), float(flat.min())
    scale = max(highest, -lowest)
    unit = scale or 1.0
    with np.errstate(all="ignore"):
        square = float(np.dot(flat, flat)) / unit
        cube = float(np.dot(flat * flat, flat)) / unit**2 if flat.size <= MOST_CUBED else 0.0
    means = np.array([float(flat.sum()), square, cube]) / flat.size
    return np.array([missing, scale, *means, highest - lowest])


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
        self._moments: dict[int, np.ndarray] = {}

    def add(self, values: Iterable[Value]) -> None:
        """Adds values that can be found from now on."""
        for value in values:
            if value.data.dtype.kind == "f" and value.data.size >= FEWEST:
                self._by_size[value.data.size].append(value)

    def moments_of(self, value: Value) -> np.ndarray:
        """Returns the moments of a value of the reference, computed once."""
        if value.index not in self._moments:
            self._moments[value.index] = moments(value.data)
        return self._moments[value.index]

    def find(self, array: np.ndarray, allowed: float = 0.0, slack: float = 1.0) -> list[Match]:
        """Returns the values that an array equals, in the order of the reference's run.

        Args:
            array: of the candidate, floats.
            allowed: the largest difference, of scale; default what rounding allows.
            slack: how many times further apart the sums may be.
        """
        among = self._by_size.get(array.size, ())
        if not among:
            return []
        own = moments(array)
        size = own[1] or 1.0
        tolerance = slack * SUMS_ALLOWED * size
        found = []
        for value in among:
            other = self.moments_of(value)
            if own[0] != other[0] or np.abs(own - other).max() > tolerance:
                continue
            limit = allowed * size if allowed else MIDDLE * ROUNDOFF["float32"] * float(other[1])
            layout = find_layout(value.data, array, limit)
            if layout is not None:
                found.append(Match(value, *layout))
        return found
