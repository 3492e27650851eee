"""Tokens whose numbers nobody uses, of which each code base has its own way.

Padding is what no query may attend to: nothing of it reaches another token, and what comes out of
it is thrown away. OPT, for one, counts its positions by the mask and gives all of the padding the
row before the first. A query that may attend to nothing at all gives zeros here, means there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace.torch_recorder import Call

# Of each shape (B, T) of tokens, which of them are padding.
Padding = Mapping[tuple[int, ...], np.ndarray]


def padding_of(calls: Iterable[Call]) -> Padding:
    """Which tokens no attention of a pass may look at; of a batch of one, those of every row.

    Attention that leaves out a token itself, as it does all others, says nothing about it.

    Args:
        calls: of attentions, with what each query was allowed.
    """
    states = [state for call in calls for each in call.all for state in each.allowed]
    found: dict[tuple[int, ...], np.ndarray] = {}
    for state in sorted(states, key=lambda state: state.shape[2] != state.shape[3]):
        allowed: Any = (state >= 0).any(axis=1)
        seen: Any = allowed.any(axis=1)
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


def idle_queries(call: Call) -> np.ndarray | None:
    """Which queries (B, T) may attend to no key in an attention of the call, if any."""
    found: Any = None
    for state in call.allowed:
        idle = (state < 0).all(axis=(1, 3))
        if idle.any() and (found is None or found.shape == idle.shape):
            found = idle if found is None else found | idle
    return found


def of_tokens(array: np.ndarray, padding: Padding, idle: np.ndarray | None = None) -> np.ndarray:
    """An array (B, T, ...) without its rows of padding and of idle queries; any other as it is."""
    rows = padding.get(array.shape[:2])
    if idle is not None and idle.shape == array.shape[:2]:
        rows = idle if rows is None else rows | idle
    return array if rows is None else array[~rows]


def pulled_back(
    cotangents: Sequence[np.ndarray], calls: Iterable[Call], padding: Padding
) -> list[np.ndarray]:
    """Gradients of outputs (B, T, ...) or (T, B, ...), zero where nobody uses the output."""
    idle = [rows for call in calls if (rows := idle_queries(call)) is not None]
    result = []
    for cotangent in cotangents:
        for rows in (*padding.values(), *idle):
            for unused in (rows, rows.T):
                if cotangent.shape[:2] == unused.shape:
                    shape = (*unused.shape, *[1] * (cotangent.ndim - 2))
                    cotangent = np.where(unused.reshape(shape), 0.0, cotangent)
                    break
        result.append(cotangent)
    return result
