"""When a difference is rounding, and when it is a bug; no tolerance is set by hand.

Both sides compute in float64 from the same bits. Two correct programs then differ by rounding of
the order of float64's unit roundoff u64 = 2^-53 times whatever the computation amplifies it by. A
bug differs by what it changes, which nobody who works in float32 could see if it were below
float32's rounding, u32 = 2^-24 times the same amplification. Between the two lie 29 bits, and the
line is drawn in their middle:

    allowed = 2^-14.5 · max(u32 · scale, r)

``scale`` is the largest magnitude of the exact result: a result that is merely stored in float32 is
off by u32 · scale. ``r`` is the amplification measured: how far our own computation, run in float32
on the same inputs, lies from itself in float64. It is measured only where the first term does not
suffice, and a bug does not enter it, as both runs have the bug. Of what is zero in exact arithmetic
(the gradient of a key's bias) it is the size of what cancels. So a wrong result passes only if it
is wrong by less than 2^-14.5 = 4e-5 of what float32 itself is wrong by, and a right one is refused
only if its float64 rounding is 2^14.5 = 23,000 times what its float32 rounding lets expect.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxformer.parity.report.model import Difference

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MIDDLE = 2.0**-14.5
PIECE = 1 << 18


def judge(
    candidate: np.ndarray,
    reference: np.ndarray,
    in_float32: Callable[[], np.ndarray] | None = None,
) -> Difference:
    """Compares two float64 arrays of one shape.

    Args:
        candidate: computed in float64.
        reference: computed in float64 from the same inputs.
        in_float32: ours computed in float32, called only where that may decide.
    """
    error = _distance(candidate, reference)
    scale = _largest(reference)
    if not np.isfinite(scale):
        scale = _largest(reference[np.isfinite(reference)])
    allowed = MIDDLE * ROUNDOFF["float32"] * scale
    if not error <= allowed and in_float32 is not None and np.isfinite(error):
        amplified = _distance(in_float32().astype(np.float64), candidate)
        if np.isfinite(amplified):
            allowed = max(allowed, MIDDLE * amplified)
    return Difference(error, scale, allowed)


def rounding(low: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of (low - exact), over that of the exact values."""
    off = _root_of_squares(np.asarray(low, np.float64) - exact)
    if off == 0:
        return 0.0
    size = _root_of_squares(exact)
    return off / size if size else float("inf")


def ulps(low: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """The largest error in units in the last place of the largest exact magnitude."""
    scale = _largest(exact)
    off = _distance(np.asarray(low, np.float64), exact)
    if not scale:
        return float("inf") if off else 0.0
    unit = 2 * ROUNDOFF[dtype] * 2.0 ** np.floor(np.log2(scale))
    return off / float(unit)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference; the same infinity on both sides is none, NaN is never right."""
    with np.errstate(invalid="ignore"):
        largest = 0.0
        for a, b in zip(_pieces(one), _pieces(other), strict=True):
            difference = a - b
            found = _largest(difference)
            if found != found:
                found = _largest(np.where(a == b, 0.0, difference))
            if not found <= largest:
                largest = found
            if largest != largest:
                break
        return largest


def _pieces(array: np.ndarray) -> Iterator[np.ndarray]:
    """An array in parts that a processor holds near: a difference of the whole would not be."""
    if array.size <= PIECE or array.ndim == 0:
        yield array
        return
    rows = max(1, PIECE * len(array) // array.size)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield from _pieces(part[0]) if rows == 1 and part.ndim > 1 else (part,)


def _largest(array: np.ndarray) -> float:
    """The largest magnitude; NaN where there is one, as no bound holds for it."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0


def _root_of_squares(array: np.ndarray) -> float:
    flat = array.reshape(-1)
    return math.sqrt(float(flat @ flat) / flat.size) if flat.size else 0.0
