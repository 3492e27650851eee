"""What the attentions of the reference allow, read off their scores; and tokens nobody uses.

Masks are written in many ways, but each of them makes scores far below any other.

A token is padding if no query may attend to it: its values reach no other token, and its own output
is thrown away. Code bases treat it differently, and none is wrong: OPT derives position ids from
the mask and gives all padding the row before the first. The attention of a query that may attend to
no key is zero in one code base, a mean in another.
"""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording.operators.torch_recorder import Softmax

# Scores below BLOCKED are masked out, above ALLOWED they are not: masks add or fill in -1e9, the
# dtype's minimum, or minus infinity, and some old ones -1e4, which a real score might also be.
BLOCKED, ALLOWED = -1e8, -5e3
# (B, N, T, S): 1 where a query may attend to a key, -1 where it may not, 0 where the score does not
# tell.
MaskState = np.ndarray
# By shape (B, T) of tokens: a boolean array of it, True for padding.
Padding = Mapping[tuple[int, ...], np.ndarray]


class ReferenceAttention:
    """The attentions of the reference.

    Args:
        softmaxes: of its forward pass.
    """

    def __init__(self, softmaxes: Sequence[Softmax]):
        self._found = [one for one in softmaxes if one.weights.ndim == 4]
        self._states: dict[int, MaskState] = {}

    def within(self, begin: int, end: int) -> list[Softmax]:
        """Returns those that make weights (B, N, T, S), between two places on the tape."""
        return [one for one in self._found if begin < one.place <= end]

    def state(self, one: Softmax) -> MaskState:
        """Returns what one of these attentions allows."""
        if one.place not in self._states:
            scores = one.scores.data
            self._states[one.place] = (scores > ALLOWED).astype(np.int8) - (scores < BLOCKED)
        return self._states[one.place]

    @functools.cached_property
    def padding(self) -> Padding:
        """Which tokens no attention may look at.

        The shape (1, T) gets the tokens that are padding in every row. An attention in which tokens
        may not look at themselves does not show whether the last token is padding.
        """
        if not any((_of_first_head(one) < BLOCKED).all(2).any() for one in self._found):
            return {}
        return _padding_of(map(self.state, self._found))

    def used(self, array: np.ndarray) -> np.ndarray:
        """Returns the numbers of an array that belong to tokens that are used, in a line."""
        return next(used_rows(array, self.padding.values()), array).reshape(-1)

    def idle(self, begin: int, end: int) -> np.ndarray | None:
        """Returns which queries (B, T) of attentions may attend to no key; None if all may.

        Args:
            begin: see ``within``.
            end: see ``within``.
        """
        found: Any = None
        for one in self.within(begin, end):
            if not (_of_first_head(one) < BLOCKED).all(-1).any():
                continue
            idle = (self.state(one) < 0).all(axis=(1, 3))
            if idle.any() and (found is None or found.shape == idle.shape):
                found = idle if found is None else found | idle
        return found


def _of_first_head(one: Softmax) -> np.ndarray:
    return one.scores.data[:, :1]


def _padding_of(states: Iterable[MaskState]) -> Padding:
    found: dict[tuple[int, ...], np.ndarray] = {}
    for state in sorted(states, key=lambda state: state.shape[2] != state.shape[3]):
        allowed = np.asarray((state >= 0).any(axis=1))
        seen = np.asarray(allowed.any(axis=1))
        if state.shape[2] == state.shape[3]:
            itself = np.diagonal(allowed, axis1=1, axis2=2)
            found.setdefault(seen.shape, np.ones(seen.shape, bool))
            seen = seen | ~itself[seen].all()
        if seen.shape in found:
            found[seen.shape] &= ~seen
    partly = {shape: rows for shape, rows in found.items() if rows.any() and not rows.all()}
    for shape, rows in [*partly.items()]:
        partly.setdefault((1, shape[1]), rows.min(axis=0, keepdims=True))
    return partly


def used_rows(array: np.ndarray, unused: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields the rows of an array (B, T, ...) or (T, B, ...) that belong to tokens that are used.

    Args:
        array: any; one of another shape is not yielded.
        unused: which tokens (B, T) are not used, of each shape.
    """
    rows = None
    for each in unused:
        for one in (each, each.T):
            if array.shape[:2] == one.shape:
                rows = one if rows is None else rows | one
                break
    if rows is not None:
        yield array[~rows]
