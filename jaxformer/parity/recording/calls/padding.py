"""Finds tokens whose values nobody uses: padding, and queries that may attend to no key.

A token is padding if no query may attend to it: its values reach no other token, and its own output
is thrown away. Code bases treat it differently, and none is wrong: OPT derives position ids from
the mask and gives all padding the row before the first. The attention of a query that may attend to
no key is zero in one code base, a mean in another.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxformer.parity.recording.calls.torch_recorder import TorchCall

# By shape (B, T) of tokens: a boolean array of it, True for padding.
Padding = Mapping[tuple[int, ...], np.ndarray]


def find_padding(calls: Iterable[TorchCall]) -> Padding:
    """Returns which tokens no attention of a pass may look at.

    The shape (1, T) gets the tokens that are padding in every row. An attention in which tokens may
    not look at themselves does not show whether the last token is padding.

    Args:
        calls: of the pass; those of attentions say what each query was allowed.
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


def idle_queries(call: TorchCall) -> np.ndarray | None:
    """Returns which queries (B, T) of a call may attend to no key; None if all may."""
    found: Any = None
    for state in call.allowed:
        idle = (state < 0).all(axis=(1, 3))
        if idle.any() and (found is None or found.shape == idle.shape):
            found = idle if found is None else found | idle
    return found


def drop_unused_tokens(
    array: np.ndarray, padding: Padding, idle: np.ndarray | None = None
) -> np.ndarray:
    """Returns the used rows (n, ...) of an array (B, T, ...); one of other shape unchanged."""
    rows = padding.get(array.shape[:2])
    if idle is not None and idle.shape == array.shape[:2]:
        rows = idle if rows is None else rows | idle
    return array if rows is None else array[~rows]


def unused_tokens(calls: Iterable[TorchCall], padding: Padding) -> list[np.ndarray]:
    """Returns which tokens of a pass nobody uses, for each shape (B, T) of tokens."""
    idle = [rows for call in calls if (rows := idle_queries(call)) is not None]
    return [*padding.values(), *idle]


def without_unused(array: np.ndarray, unused: Iterable[np.ndarray]) -> np.ndarray:
    """Returns an array (B, T, ...) or (T, B, ...) after it got zeros at unused tokens."""
    for rows in unused:
        for each in (rows, rows.T):
            if array.shape[:2] == each.shape:
                array[each] = 0.0
                break
    return array
