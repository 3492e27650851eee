"""The core of attention: softmax(q kᵀ) v for each head, a block of queries at a time."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.execution.query_blocks import cut, query_blocks
from jaxformer.layers import Dropout
from jaxformer.masks import expand_mask


def scaled_dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    mask: Bool[Array, "B N T S"] | None = None,
    bias: Float[Array, "B N T S"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: Dropout | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """Computes softmax(q kᵀ · scale + bias) v for each head (arXiv 1706.03762, eq. 1).

    Query head n uses key/value head n // (N / K). Scores and softmax are in float32 or wider. A
    query that may attend to no key gets zeros, with finite gradients.

    Queries are taken a block at a time, and where the mask is known when the function is traced (a
    numpy array, as ``causal_mask`` makes it) a block computes nothing for keys that none of its
    queries may attend to.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values, in the dtype of the output.
        mask: True = may attend, broadcastable to (B, N, T, S).
        bias: added to the scaled scores, broadcastable to (B, N, T, S).
        scale: default 1/sqrt(H).
        soft_cap: where given, scores become soft_cap · tanh(scores / soft_cap) (arXiv 2408.00118).
        dropout: applied to the weights.
        sinks: one more score of each head, of a key that no value belongs to: weights then add up
            to less than 1 (arXiv 2309.17453; gpt-oss, arXiv 2508.10925).

    Returns:
        The output, and the weights that were applied to the values (after dropout).
    """
    batch, queries, num_heads, head_dim = q_BTNH.shape
    keys = k_BSKH.shape[1]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    mask = None if mask is None else expand_mask(mask)
    shape = (batch, num_heads, queries, keys)
    keep = None if dropout is None else dropout.keep(shape)
    q_BNTH = q_BTNH.transpose(0, 2, 1, 3)
    k_RSH, v_RSH = by_row(k_BSKH), by_row(v_BSKH)
    outs, all_weights = [], []
    for block in query_blocks(mask, queries, keys):
        rows, columns = slice(*block.queries), slice(*block.keys)
        drop = None
        if dropout is not None and keep is not None:
            drop = functools.partial(dropout.drop, keep=cut(keep, rows, columns))
        out, weights = _attend(
            q_BNTH[:, :, rows],
            k_RSH[:, columns],
            v_RSH[:, columns],
            mask=block.mask,
            bias=None if bias is None else cut(bias, rows, columns),
            scale=scale,
            soft_cap=soft_cap,
            drop=drop,
            sinks=sinks,
        )
        outs.append(out)
        before, after = block.keys[0], keys - block.keys[1]
        all_weights.append(jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (before, after))))
    out_BTNH = _joined(outs).transpose(0, 2, 1, 3)
    return out_BTNH.astype(v_BSKH.dtype), _joined(all_weights).astype(v_BSKH.dtype)


def _attend(
    q_BNTH: Float[Array, "B N T H"],
    k_RSH: Float[Array, "R S H"],
    v_RSH: Float[Array, "R S H"],
    *,
    mask: Bool[Array, "B N T S"] | None,
    bias: Float[Array, "B N T S"] | None,
    scale: float,
    soft_cap: float | None,
    drop: Callable[[Array], Array] | None,
    sinks: Float[Array, "N"] | None,
) -> tuple[Float[Array, "B N T H"], Float[Array, "B N T S"]]:
    """One block of queries, whose keys and values have a row per sequence and head, R = B · K."""
    batch, num_heads, queries, head_dim = q_BNTH.shape
    rows, keys = k_RSH.shape[:2]
    wide = jnp.promote_types(q_BNTH.dtype, jnp.float32)
    # Both products have one batch dimension, R, the order in which a cache is kept: with two, XLA
    # on CPU copies the whole cache in every step of generation.
    q_RMH = q_BNTH.reshape(rows, -1, head_dim)
    scores_RMS = jnp.einsum("rmh,rsh->rms", q_RMH, k_RSH, preferred_element_type=wide)
    scores = scores_RMS.reshape(batch, num_heads, queries, keys) * scale
    if bias is not None:
        scores = scores + bias.astype(wide)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if mask is not None:
        scores = jnp.where(mask, scores, jnp.finfo(wide).min)
    weights = jax.nn.softmax(scores, axis=-1)
    if sinks is not None:
        # With z = log Σ exp(scores) the sum of weights is exp(z) / (exp(z) + exp(sink)).
        total = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
        weights = weights * jax.nn.sigmoid(total - sinks.astype(wide)[None, :, None, None])
    if mask is not None and not (isinstance(mask, np.ndarray) and mask.any(axis=-1).all()):
        # A query that may attend to nothing has weights all the same: of equal scores.
        weights = jnp.where(mask, weights, jnp.zeros((), wide))
    if drop is not None:
        weights = drop(weights)
    # The product with the values is wide too: the gradient that comes back through it is a small
    # difference of large terms where the softmax saturates.
    weights_RMS = weights.reshape(rows, -1, keys)
    out_RMH = jnp.einsum("rms,rsh->rmh", weights_RMS, v_RSH.astype(wide))
    return out_RMH.reshape(batch, num_heads, queries, -1), weights


def _joined(blocks: list[Float[Array, "B N t _"]]) -> Float[Array, "B N T _"]:
    return blocks[0] if len(blocks) == 1 else jnp.concatenate(blocks, axis=2)


def by_row(x_BSKH: Float[Array, "B S K H"]) -> Float[Array, "R S H"]:
    """Returns keys or values with a row for each sequence and key/value head, R = B · K."""
    return x_BSKH.transpose(0, 2, 1, 3).reshape(-1, x_BSKH.shape[1], x_BSKH.shape[3])
