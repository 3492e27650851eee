"""Exact fingerprints of arrays that no change of layout changes: what a parameter is found by.

Each number, as float32, is mixed into 64 bits, and the bits are added up: two arrays with the same
numbers in any order have the same sum. Sums along and across axes are fingerprints of rows and
slices, so that parts of a fused or stacked parameter are found too. 64 bits make an accidental
agreement as likely as 1 in 10^19.
"""

import math
from collections.abc import Iterator

import numpy as np

# Arrays of at most this many numbers may be taken apart number by number: a bias.
MOST_NUMBERS = 1 << 16
# Numbers that are mixed at a time, to bound the memory.
CHUNK = 1 << 20


def fingerprint(array: np.ndarray) -> int:
    """Returns the fingerprint of an array of floats."""
    return int(sum(int(part.sum(dtype=np.uint64)) for part, _ in _mixed(array)) % (1 << 64))


def fingerprints_by_axis(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields fingerprints of the slices across each axis, of lines along each, and of numbers.

    Args:
        array: of floats, with one axis or more; (N,) arrays yield the whole, then numbers.

    Yields:
        arrays of uint64, flat.
    """
    if array.ndim == 1:
        yield np.array([fingerprint(array)], np.uint64)
    else:
        axes = range(array.ndim)
        sets = [tuple(other for other in axes if other != axis) for axis in axes]
        if array.ndim > 2:
            sets += [(axis,) for axis in axes]
        for summed in _sums(array, sets):
            yield summed.reshape(-1)
    if array.size <= MOST_NUMBERS:
        yield np.concatenate([part.reshape(-1) for part, _ in _mixed(array)])


def _sums(array: np.ndarray, sets: list[tuple[int, ...]]) -> list[np.ndarray]:
    """Returns the sums of mixed numbers over each set of axes."""
    found = [
        np.zeros([n for axis, n in enumerate(array.shape) if axis not in axes], np.uint64)
        for axes in sets
    ]
    for part, rows in _mixed(array):
        for axes, summed in zip(sets, found, strict=True):
            if 0 in axes:
                summed += part.sum(axes, dtype=np.uint64)
            else:
                summed[rows] = part.sum(axes, dtype=np.uint64)
    return found


def _mixed(array: np.ndarray) -> Iterator[tuple[np.ndarray, slice]]:
    """Yields the mixed bits of some rows at a time, and which rows."""
    array = np.atleast_1d(array)
    rows = max(1, CHUNK // max(1, math.prod(array.shape[1:])))
    for first in range(0, array.shape[0], rows):
        at = slice(first, first + rows)
        # Adding zero makes -0 and 0 the same number.
        narrow = array[at].astype(np.float32) + np.float32(0)
        yield _mix(narrow.view(np.uint32)), at


def _mix(bits: np.ndarray) -> np.ndarray:
    """Returns bits spread over 64 bits (splitmix64; Steele et al., 2014, fig. 16)."""
    mixed = bits.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    return mixed
