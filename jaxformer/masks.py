"""Attention masks: boolean, True = may attend, broadcastable to (B, N, T, S).

A mask of nothing but numbers that are known (lengths, not positions) is a numpy array: then the
attention can see, while it is traced, which keys it need not look at.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

# How many there are, counted from 0, or the positions themselves (T,).
Positions = int | Int[Array, "T"] | Int[np.ndarray, "T"]


def causal_mask(queries: Positions, keys: Positions | None = None) -> Bool[Array, "1 1 T S"]:
    """Returns the mask by which a position may attend to itself and to those before it.

    Args:
        queries: T, or the positions of the queries.
        keys: S, or the positions of the keys; default those of the queries.

    >>> causal_mask(3)[0, 0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    queries_T1, keys_1S = _places(queries, keys)
    return (keys_1S <= queries_T1)[None, None]


def window_mask(queries: Positions, keys: Positions | None, window: int) -> Bool[Array, "1 1 T S"]:
    """Returns the mask by which a position may attend to those less than ``window`` away.

    Together with ``causal_mask`` it is the sliding window of Mistral (arXiv 2310.06825,
    section 2). Arguments as there.
    """
    queries_T1, keys_1S = _places(queries, keys)
    # Not by way of distances: of 8,192 positions they would be half a gibibyte of integers.
    seen = (keys_1S < queries_T1 + window) & (keys_1S > queries_T1 - window)
    return seen[None, None]


def _places(
    queries: Positions, keys: Positions | None
) -> tuple[Int[Array, "T 1"], Int[Array, "1 S"]]:
    keys_S = _positions(queries if keys is None else keys)
    return _positions(queries)[:, None], keys_S[None, :]


def _positions(given: Positions) -> Any:
    return np.arange(given) if isinstance(given, int) else given


def padding_mask(tokens: Int[Array, "B S"], pad_token: int = 0) -> Bool[Array, "B 1 1 S"]:
    """Returns the mask that allows the tokens that are not ``pad_token``."""
    return (tokens != pad_token)[:, None, None, :]


def padding_mask_from_lengths(lengths: Int[Array, "B"], max_length: int) -> Bool[Array, "B 1 1 S"]:
    """Returns the mask that allows the first ``lengths[b]`` tokens of row b."""
    return (jnp.arange(max_length)[None, :] < lengths[:, None])[:, None, None, :]


def document_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B 1 T T"]:
    """Returns the mask by which a token may attend to those of the same document.

    Args:
        segments: which document of its row each token is of.
    """
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def document_positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns the position of each token in its document; a row has documents one by one.

    >>> document_positions(jnp.array([[1, 1, 1, 2, 2, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    places = jnp.arange(segments.shape[1])[None]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)))
    return places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def combine_masks(*masks: Bool[Array, "..."] | None) -> Bool[Array, "B N T S"] | None:
    """Returns the mask that allows what every mask allows; None allows everything."""
    present = [expand_mask(mask) for mask in masks if mask is not None]
    return functools.reduce(lambda one, other: one & other, present) if present else None


def expand_mask(mask: Bool[Array, "..."]) -> Bool[Array, "B N T S"]:
    """Returns a mask with four dimensions, from (T, S), (B, T, S) or (B, N, T, S).

    Raises:
        ValueError: it has fewer than two dimensions or more than four, or is not boolean.
    """
    if mask.dtype != jnp.bool_:
        raise ValueError(f"masks are boolean, True = may attend: got {mask.dtype}")
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim == 3:
        return mask[:, None]
    if mask.ndim == 4:
        return mask
    raise ValueError(f"a mask has 2, 3 or 4 dimensions: got shape {mask.shape}")


def additive_to_boolean(bias: Float[Array, "..."]) -> Bool[Array, "..."]:
    """Returns the boolean mask of an additive one, in which 0 allows and -inf blocks.

    A bias of at most -1e4 counts as blocked: some codes write -1e4 or -1e9 for -inf.
    """
    return bias > -1e4


def boolean_to_additive(
    mask: Bool[Array, "..."], dtype: jnp.dtype = jnp.float32
) -> Float[Array, "..."]:
    """Returns the additive mask of a boolean one: 0 where it allows, else -inf."""
    return jnp.where(mask, jnp.zeros((), dtype), jnp.full((), -jnp.inf, dtype))
