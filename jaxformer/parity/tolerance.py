"""Decides whether a difference is rounding or a bug; no tolerance is set by hand.

Both sides compute in float64 from the same bits. Two correct programs then differ by rounding of
the order of float64's unit roundoff u64 = 2^-53 times the amplification of the computation. A bug
differs by more than float32's rounding, u32 = 2^-24 times the same amplification: a smaller one
nobody who works in float32 could see. Between the two lie 29 bits, and the line is in their middle:

    allowed = 2^-14.5 · max(u32 · scale, r)

``scale`` is the largest magnitude of the exact result: a result that is only stored in float32 is
off by u32 · scale. ``r`` is the measured amplification: the distance of the candidate's own float32
run on the same inputs from its float64 run. It is measured only where the first term is not enough.
A bug does not change it, because both runs have the bug. For a result that is zero in exact
arithmetic (the gradient of a key's bias), r is as large as the terms that cancel.

So a wrong result passes only if its error is less than 2^-14.5 = 4e-5 of the error of float32
itself. A right result is judged a bug only if its float64 rounding is 2^14.5 = 23,000 times what
its float32 rounding predicts.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np

from jaxformer.parity.findings import Difference

ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
MIDDLE = 2.0**-14.5
# Numbers of an array that stay in a processor's cache.
CHUNK = 1 << 18


def allowed_error(scale: float, amplified: float = 0.0) -> float:
    """Returns the largest error that is rounding.

    Args:
        scale: largest magnitude of the exact result.
        amplified: how far the candidate's float32 run is from its float64 run; without effect if
            it is not finite.
    """
    allowed = MIDDLE * ROUNDOFF["float32"] * scale
    return max(allowed, MIDDLE * amplified) if math.isfinite(amplified) else allowed


def judge(
    candidate: np.ndarray,
    reference: np.ndarray,
    in_float32: Callable[[], np.ndarray] | None = None,
) -> Difference:
    """Returns the difference of two float64 arrays of one shape, with the largest allowed error.

    Args:
        candidate: computed in float64.
        reference: computed in float64 from the same inputs.
        in_float32: computes the candidate in float32; called only where that may decide.
    """
    parts = Judgement()
    parts.add(candidate, reference)
    if parts.needs_float32 and in_float32 is not None:
        parts.add_float32(in_float32(), candidate)
    return parts.difference


class Judgement:
    """Judges arrays that are too large to be held whole, part by part; see ``judge``."""

    def __init__(self) -> None:
        self._error = self._scale = self._amplified = 0.0

    def add(self, candidate: np.ndarray, reference: np.ndarray) -> None:
        """Adds a part, computed in float64 by both sides."""
        self._error = _worse(self._error, _distance(candidate, reference))
        scale = _largest(reference)
        if not np.isfinite(scale):
            scale = _largest(reference[np.isfinite(reference)])
        self._scale = max(self._scale, scale)

    @property
    def needs_float32(self) -> bool:
        """Whether the candidate's float32 run may decide, which is then to be added."""
        return not self._error <= self._allowed and bool(np.isfinite(self._error))

    def add_float32(self, low: np.ndarray, candidate: np.ndarray) -> None:
        """Adds a part of the candidate, computed in float32 and in float64."""
        self._amplified = _worse(self._amplified, _distance(low.astype(np.float64), candidate))

    @property
    def _allowed(self) -> float:
        return allowed_error(self._scale, self._amplified)

    @property
    def difference(self) -> Difference:
        """The difference of all parts."""
        return Difference(self._error, self._scale, self._allowed)


def _worse(before: float, found: float) -> float:
    """Returns the larger number; NaN if one of them is."""
    return found if not found <= before and before == before else before


def rounding(low: np.ndarray, exact: np.ndarray) -> float:
    """Returns the root mean square of (low - exact), divided by that of the exact values."""
    squares = sizes = 0.0
    for a, b in zip(_chunks(low), _chunks(exact), strict=True):
        difference = (np.asarray(a, np.float64) - b).reshape(-1)
        squares += float(difference @ difference)
        size = b.reshape(-1)
        sizes += float(size @ size)
    if squares == 0:
        return 0.0
    return math.sqrt(squares / sizes) if sizes else float("inf")


def ulps(low: np.ndarray, exact: np.ndarray, dtype: str) -> float:
    """Returns the largest error, in units in the last place of the largest exact magnitude."""
    scale = _largest(exact)
    error = _distance(low, exact)
    if not scale:
        return float("inf") if error else 0.0
    unit = 2 * ROUNDOFF[dtype] * 2.0 ** np.floor(np.log2(scale))
    return error / float(unit)


def _distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the largest difference: zero for equal infinities, NaN for any NaN."""
    with np.errstate(invalid="ignore"):
        largest = 0.0
        for a, b in zip(_chunks(one), _chunks(other), strict=True):
            difference = np.asarray(a, np.float64) - b
            found = _largest(difference)
            if found != found:
                found = _largest(np.where(a == b, 0.0, difference))
            if not found <= largest:
                largest = found
            if largest != largest:
                break
        return largest


def _chunks(array: np.ndarray) -> Iterator[np.ndarray]:
    """Yields parts of an array that fit a processor's cache, which makes the comparison faster."""
    if array.size <= CHUNK or array.ndim == 0:
        yield array
        return
    rows = max(1, CHUNK * len(array) // array.size)
    for start in range(0, len(array), rows):
        part = array[start : start + rows]
        yield from _chunks(part[0]) if rows == 1 and part.ndim > 1 else (part,)


def _largest(array: np.ndarray) -> float:
    """Returns the largest magnitude, NaN if there is one."""
    return max(float(array.max()), -float(array.min())) if array.size else 0.0
