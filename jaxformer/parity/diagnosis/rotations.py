"""Names the rotation of pairs that each side of a segment computes: rotary positions.

A pair (u, v) is a complex number. Where a pair that was rotated is divided by what it was, in one
of the two layouts of pairs, the quotient depends on the token and the pair alone, and its angle is
position times frequency. So base, first position and layout are read off, and none is guessed.
"""

import numpy as np

from jaxformer.parity.diagnosis.evidence import Diagnosis, activations_of, fits, name_both
from jaxformer.parity.matching.values import largest
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# Tables of angles may be in float32, and angles grow with the position.
SAME = 1e-4
# How many frequencies are shown.
MOST_SHOWED = 4


def other_rotation(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Names the layout, base and first position of rotary positions."""
    for x in _inputs(divergence, walk):

        def identify(wanted: np.ndarray, x: np.ndarray = x) -> str:
            return _name(x, wanted.reshape(x.shape))

        named = name_both(divergence, identify, "rotates")
        if named is not None:
            return named
    return None


def no_rotation(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Says that the candidate rotates no pairs where the reference does."""
    right = divergence.layout.apply(divergence.reference_value.data)
    for x in _inputs(divergence, walk):
        found = _name(x, right.reshape(x.shape))
        if found and found != "nothing" and not _name(x, divergence.array.reshape(x.shape)):
            return Diagnosis(
                f"the candidate does not rotate pairs by one angle each; the reference rotates "
                f"{found}"
            )
    return None


def _inputs(divergence: Divergence, walk: Walk) -> list[np.ndarray]:
    """Returns what may have been rotated, in the axes of the segment's end."""
    found = activations_of(divergence, walk)
    # Heads may stand before tokens at the end, and after them where they enter.
    both = (*found, *(x.swapaxes(1, 2) for x in found if x.ndim == 4))
    # A segment may end where pairs of neighbours have an axis of their own.
    return [
        x
        for x in both
        if x.ndim > 2
        and x.shape[-1] % 2 == 0
        and divergence.array.shape in (x.shape, (*x.shape[:-1], x.shape[-1] // 2, 2))
    ]


def _name(x: np.ndarray, wanted: np.ndarray) -> str:
    """Returns how an array is rotated to another one, "" if it is not."""
    if fits(x, wanted):
        return "nothing"
    # Of the texts of a batch the first one: each may have positions of its own.
    rows = (slice(None),) if x.ndim < 4 else (slice(0, 1),)
    for pairs in ("halves", "neighbours"):
        before, after = (_as_complex(array[rows], pairs) for array in (x, wanted))
        with np.errstate(all="ignore"):
            turned = after / before
        for axis in range(x.ndim - 1):
            if x.shape[axis] < 2:
                continue
            others = tuple(i for i in range(x.ndim - 1) if i != axis)
            # The pairs that are furthest from zero are divided the most exactly.
            weights = np.abs(before) ** 2
            mean = (turned * weights).sum(others, keepdims=True) / weights.sum(
                others, keepdims=True
            )
            if np.abs(before * mean - after).max() <= SAME * largest(wanted):
                found = _angles(mean.reshape(x.shape[axis], -1))
                if found:
                    return f"{pairs} {found}"
    return ""


def _as_complex(array: np.ndarray, pairs: str) -> np.ndarray:
    if pairs == "neighbours":
        return array[..., ::2] + 1j * array[..., 1::2]
    one, two = np.split(array, 2, -1)
    return one + 1j * two


def _angles(turned: np.ndarray) -> str:
    """Returns what the angles are made of: a base and a first position, or frequencies.

    Args:
        turned: of each token and pair the complex number that it is multiplied by.
    """
    factor = float(np.abs(turned).mean())
    if factor == 0 or np.abs(np.abs(turned) / factor - 1).max() > SAME:
        return ""
    steps = np.angle(turned[1:] / turned[:-1])
    frequencies = steps[0]
    # What turns nothing is a plain factor.
    if np.abs(frequencies).max() <= SAME:
        return ""
    if np.abs(np.exp(1j * (steps - frequencies)) - 1).max() > SAME * len(turned):
        return ""
    scale = "" if abs(factor - 1) <= SAME else f", multiplied by {factor:.6g}"
    first = np.angle(turned[0])
    if np.abs(first - np.pi / 2).max() <= SAME:
        return f"{_speed(-frequencies)}, sine and cosine swapped{scale}"
    # The slowest angle has not gone round.
    start = round(float(first[-1] / frequencies[-1])) if frequencies[-1] else 0
    if np.abs(np.exp(1j * (first - start * frequencies)) - 1).max() > SAME * (abs(start) + 1):
        return ""
    return f"{_speed(frequencies)}, the first position {start}{scale}"


def _speed(frequencies: np.ndarray) -> str:
    """Returns a base that frequencies are powers of, or the frequencies."""
    back = " backwards" if (frequencies < 0).all() else ""
    if back:
        frequencies = -frequencies
    count = len(frequencies)
    if count > 1 and (frequencies > 0).all():
        base = float(frequencies[0] / frequencies[-1]) ** (count / (count - 1))
        powers = frequencies[0] * base ** -(np.arange(count) / count)
        if base > 1 and np.abs(frequencies / powers - 1).max() <= SAME:
            slower = 1 / frequencies[0]
            slowed = "" if abs(slower - 1) <= SAME else f", {slower:.4g} times as slowly"
            return f"with base {_round(base)}{slowed}{back}"
    return f"with the frequencies {_listed(frequencies)}{back}"


def _round(base: float) -> str:
    """Returns a base; a round number where it is near to one, for tables are in float32."""
    for digits in (1, 2, 3, 4, 5):
        text = f"{base:.{digits}g}"
        if abs(float(text) / base - 1) <= 2 * SAME:
            return f"{float(text):g}"
    return f"{base:.6g}"


def _listed(numbers: np.ndarray) -> str:
    shown = ", ".join(f"{n:.4g}" for n in numbers[:MOST_SHOWED])
    return f"{shown}, …" if len(numbers) > MOST_SHOWED else shown
