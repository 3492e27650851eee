"""Attention: one core that never changes, and the module that projects into and out of it."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.layers import Dropout, Linear, widely
from jaxformer.masks import combine_masks, expand_mask
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.positions import NoPositions


def scaled_dot_product_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K H"],
    *,
    mask: Bool[Array, "B N T S"] | None = None,
    bias: Float[Array, "B N T S"] | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: Callable[[Array], Array] = lambda weights: weights,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"]]:
    """softmax(q kᵀ · scale + bias) v, head by head (Vaswani et al., arXiv 1706.03762, eq. 1).

    Query head n uses key/value head n // (N / K). Scores and softmax are in float32 or wider. A
    query that may attend to no key gets zeros, with finite gradients.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values, in the dtype of the output.
        mask: True = may attend, broadcastable to (B, N, T, S).
        bias: added to the scaled scores.
        scale: default 1/sqrt(H).
        soft_cap: where given, scores become soft_cap · tanh(scores / soft_cap) (arXiv 2408.00118).
        dropout: applied to the weights.

    Returns:
        The output, and the weights that were applied to the values (after dropout).
    """
    batch, queries, num_heads, head_dim = q_BTNH.shape
    keys, num_kv_heads = k_BSKH.shape[1:3]
    wide = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    q_BTKGH = q_BTNH.reshape(batch, queries, num_kv_heads, -1, head_dim)
    scores_BKGTS = jnp.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH, preferred_element_type=wide)
    scores = scores_BKGTS.reshape(batch, num_heads, queries, keys)
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.astype(wide)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    if mask is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        mask = expand_mask(mask)
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(wide).min), axis=-1)
        weights = jnp.where(mask, weights, jnp.zeros((), wide))
    weights = dropout(weights)
    # The product with the values is wide too: the gradient that comes back through it is a small
    # difference of large terms where the softmax saturates.
    weights_BKGTS = weights.reshape(batch, num_kv_heads, -1, queries, keys)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH.astype(wide))
    out_BTNH = out_BTKGH.reshape(batch, queries, num_heads, -1)
    return out_BTNH.astype(v_BSKH.dtype), weights.astype(v_BSKH.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LayerCache:
    """The keys and values that one attention has seen, in buffers of a fixed length S.

    Attributes:
        k_BSKH: keys, rotated; rows from ``length`` on are not yet written.
        v_BSKH: values.
        length: how many rows are written, int32 scalar.
    """

    k_BSKH: Float[Array, "B S K H"]  # noqa: N815
    v_BSKH: Float[Array, "B S K H"]  # noqa: N815
    length: Int[Array, ""]

    def append(self, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]) -> None:
        """Writes T rows after those already there.

        The caller sees to it that they fit: on a device, rows past the end would be written over
        the last ones.
        """
        zero = jnp.zeros_like(self.length)
        start = (zero, self.length, zero, zero)
        self.k_BSKH = jax.lax.dynamic_update_slice(self.k_BSKH, k_BTKH, start)
        self.v_BSKH = jax.lax.dynamic_update_slice(self.v_BSKH, v_BTKH, start)
        self.length = self.length + k_BTKH.shape[1]


class MultiHeadAttention(nnx.Module):
    """Projects to heads, attends, projects back (arXiv 1706.03762, section 3.2.2).

    With ``num_kv_heads`` below ``num_heads`` it is grouped-query attention (arXiv 2305.13245), with
    one key/value head multi-query attention (arXiv 1911.02150). No bias, scale or rescaling beyond
    those named here is applied.

    Args:
        d_model: D, the width of inputs and output.
        num_heads: N.
        num_kv_heads: K, default N.
        head_dim: H, default D / N.
        use_bias: whether q_proj, k_proj and v_proj have biases.
        output_bias: whether o_proj has one.
        output_projection: False leaves the heads side by side, (B, T, N·H), without o_proj.
        position: a ``NoPositions``, ``Rotary``, ``ALiBi`` or ``RelativePositions``.
        q_norm: normalises each query over H before it is rotated; ``k_norm`` each key.
        k_norm: see ``q_norm``.
        scale: default 1/sqrt(H).
        score_soft_cap: see ``scaled_dot_product_attention``.
        attention_dropout: rate on the attention weights.
        output_dropout: rate on the result.
        rngs: where the initial weights come from.

    Raises:
        ValueError: num_heads is not divisible by num_kv_heads, or d_model by num_heads where
            head_dim is not given.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = True,
        output_bias: bool = True,
        output_projection: bool = True,
        position: NoPositions | None = None,
        q_norm: LayerNorm | RMSNorm | None = None,
        k_norm: LayerNorm | RMSNorm | None = None,
        scale: float | None = None,
        score_soft_cap: float | None = None,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads % num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads: got "
                f"num_heads={num_heads}, num_kv_heads={num_kv_heads}"
            )
        if head_dim is None and d_model % num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads: got "
                f"d_model={d_model}, num_heads={num_heads}"
            )
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.score_soft_cap = score_soft_cap
        kv_width = num_kv_heads * self.head_dim
        width = num_heads * self.head_dim
        self.q_proj = Linear(d_model, width, use_bias=use_bias, rngs=rngs)
        self.k_proj = Linear(d_model, kv_width, use_bias=use_bias, rngs=rngs)
        self.v_proj = Linear(d_model, kv_width, use_bias=use_bias, rngs=rngs)
        self.o_proj = (
            Linear(width, d_model, use_bias=output_bias, rngs=rngs) if output_projection else None
        )
        self.position = NoPositions() if position is None else position
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.attention_dropout = Dropout(attention_dropout)
        self.output_dropout = Dropout(output_dropout)

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"] | None = None,
        value: Float[Array, "B S D"] | None = None,
        mask: Bool[Array, "B N T S"] | None = None,
        *,
        bias: Float[Array, "B N T S"] | None = None,
        positions: Int[Array, "B T"] | None = None,
        cache: LayerCache | None = None,
        return_weights: bool = False,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Attends from ``query`` to ``key``, which defaults to the query; ``value`` to the key.

        Args:
            query: what asks.
            key: what is asked, of any length S.
            value: what is answered.
            mask: True = may attend, broadcastable to (B, N, T, S).
            bias: added to the scaled scores, beside the position scheme's own.
            positions: of the query tokens, and of the keys in self-attention; default 0 … T - 1.
            cache: keys and values so far; this call's are appended to it, and S is its length.
            return_weights: also return the weights applied to the values.
        """
        self_attention = key is None
        key = query if key is None else key
        value = key if value is None else value
        q_BTNH = self._heads(self.q_proj(query), self.num_heads)
        k_BSKH = self._heads(self.k_proj(key), self.num_kv_heads)
        v_BSKH = self._heads(self.v_proj(value), self.num_kv_heads)
        if self.q_norm is not None:
            q_BTNH = self.q_norm(q_BTNH)
        if self.k_norm is not None:
            k_BSKH = self.k_norm(k_BSKH)

        start = jnp.int32(0) if cache is None else cache.length
        slots_T = start + jnp.arange(q_BTNH.shape[1])
        if positions is None:
            positions = slots_T[None]
        key_positions = positions if self_attention else jnp.arange(k_BSKH.shape[1])[None]
        q_BTNH = self.position.rotate(q_BTNH, positions)
        k_BSKH = self.position.rotate(k_BSKH, key_positions)
        if cache is not None:
            cache.append(k_BSKH, v_BSKH)
            k_BSKH, v_BSKH = cache.k_BSKH, cache.v_BSKH

        distance_TS = jnp.arange(k_BSKH.shape[1])[None, :] - slots_T[:, None]
        if bias is not None:
            # A bias of -inf blocks; as part of the mask a row of nothing else gives zeros, not NaN.
            mask = combine_masks(mask, bias > -jnp.inf)
        scaled_BTNH = widely(lambda q: q * self.scale, q_BTNH)
        position_bias = self.position.bias(scaled_BTNH, distance_TS)
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        out_BTNH, weights_BNTS = scaled_dot_product_attention(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask=mask,
            bias=bias,
            scale=self.scale,
            soft_cap=self.score_soft_cap,
            dropout=self.attention_dropout,
        )
        out = out_BTNH.reshape(*query.shape[:-1], -1)
        if self.o_proj is not None:
            out = self.o_proj(out)
        out = self.output_dropout(out)
        return (out, weights_BNTS) if return_weights else out

    def _heads(self, x: Float[Array, "B T _"], num_heads: int) -> Float[Array, "B T N H"]:
        return x.reshape(*x.shape[:-1], num_heads, self.head_dim)
