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


def fingerprints_of_parts(array: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yields fingerprints of the whole, of slices across each axis, lines along each, and numbers.

    Args:
        array: of floats, with one axis or more.

    Yields:
        the axes along which parts are told apart, and a fingerprint for each index of these axes,
        as an array of uint64.
    """
    axes = tuple(range(array.ndim))
    cuts = [(), *((axis,) for axis in axes if array.ndim > 1)]
    if array.ndim > 2:
        cuts += [tuple(other for other in axes if other != axis) for axis in axes]
    if array.size <= MOST_NUMBERS:
        cuts.append(axes)
    found = [np.zeros([array.shape[axis] for axis in cut], np.uint64) for cut in cuts]
    for part, rows in _mixed(array):
        for cut, summed in zip(cuts, found, strict=True):
            added = part.sum(tuple(axis for axis in axes if axis not in cut), dtype=np.uint64)
            if 0 in cut:
                summed[rows] = added
            else:
                summed += added
    yield from zip(cuts, found, strict=True)


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
