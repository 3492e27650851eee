"""The core of attention: softmax(q kᵀ) v for each head, a block of queries at a time."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxformer.execution.attention_products import attention_products, join_queries
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
    products = attention_products(q_BTNH, k_BSKH, v_BSKH)
    outs, all_weights = [], []
    for block in query_blocks(mask, queries, keys):
        rows, columns = slice(*block.queries), slice(*block.keys)
        drop = None
        if dropout is not None and keep is not None:
            drop = functools.partial(dropout.drop, keep=cut(keep, rows, columns))
        weights = _weights(
            products.scores(rows, columns) * scale,
            mask=block.mask,
            bias=None if bias is None else cut(bias, rows, columns),
            soft_cap=soft_cap,
            drop=drop,
            sinks=sinks,
        )
        outs.append(products.outputs(weights, columns))
        before, after = block.keys[0], keys - block.keys[1]
        all_weights.append(jnp.pad(weights, ((0, 0), (0, 0), (0, 0), (before, after))))
    weights_BNTS = join_queries(all_weights)
    return products.join(outs).astype(v_BSKH.dtype), weights_BNTS.astype(v_BSKH.dtype)


def _weights(
    scores: Float[Array, "B N T S"],
    *,
    mask: Bool[Array, "B N T S"] | None,
    bias: Float[Array, "B N T S"] | None,
    soft_cap: float | None,
    drop: Callable[[Array], Array] | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "B N T S"]:
    """Returns the weights of one block of queries, given the scaled scores."""
    wide = scores.dtype
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
    return weights if drop is None else drop(weights)
