"""Which arrays that enter or leave a module are the same on both sides, by their numbers."""

from collections.abc import Sequence

import numpy as np

from jaxformer.parity.matching.layouts import nearest_layout


def aligned(own: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Returns places of arrays that are the same; of several of one size the nearest ones.

    Args:
        own: floats of the candidate.
        right: floats of the reference.
    """
    left = {place: array.astype(np.float64) for place, array in enumerate(right)}
    pairs = []
    for place, array in enumerate(own):
        found = [
            (near[1], n)
            for n, other in left.items()
            if other.size == array.size
            if (near := nearest_layout(other, array.astype(np.float64))) is not None
        ]
        if found:
            pairs.append((place, min(found)[1]))
            del left[pairs[-1][1]]
    return pairs


def laid_as(right: np.ndarray, own: np.ndarray, gradient: np.ndarray | None = None) -> np.ndarray:
    """Returns an array of the reference in the layout of the candidate's, in float64.

    Args:
        right: of the reference.
        own: of the candidate.
        gradient: of ``right``, to lay instead of it.
    """
    right, own = right.astype(np.float64), own.astype(np.float64)
    near = nearest_layout(right, own) if right.shape != own.shape else None
    wanted = right if gradient is None else gradient.astype(np.float64)
    return wanted if near is None else near[0].apply(wanted)
