"""Latent attention: the keys and values of all heads are made of few numbers a token."""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.attention import MultiHeadAttention
from jaxformer.layers import Dropout, Linear
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.positions import NoPositions


class LatentAttention(MultiHeadAttention):
    """Projects to keys and values by way of few numbers (DeepSeek-V2, arXiv 2405.04434, 2.1).

    With c = norm(x W_down) of C numbers, keys and values of all heads are c W_up. Of every head's
    queries and keys the last R entries are turned by their positions; those of the keys are of all
    heads, and made of x directly. A cache keeps c and these, so C + R numbers a token.

    Args:
        d_model: D.
        num_heads: N.
        head_dim: H, of queries and keys, the R turned ones included.
        latent_width: C.
        rotary_dim: R.
        value_dim: the width of a head's values, default H.
        query_latent_width: of the numbers that queries are made of likewise; None makes them of x.
        use_bias: whether the projections to these numbers have biases.
        output_bias: whether o_proj has one.
        position: a ``Rotary`` of R entries.
        kv_norm: normalises c.
        q_norm: normalises the numbers that queries are made of, where there are some.
        scale: default 1/sqrt(H).
        attention_dropout: rate on the attention weights.
        output_dropout: rate on the result.
        rngs: where the initial weights come from.
    """

    q_proj: Any
    q_down_proj: Any
    q_up_proj: Any
    kv_norm: Any

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        head_dim: int,
        latent_width: int,
        rotary_dim: int,
        value_dim: int | None = None,
        query_latent_width: int | None = None,
        use_bias: bool = False,
        output_bias: bool = False,
        position: NoPositions,
        kv_norm: LayerNorm | RMSNorm,
        q_norm: LayerNorm | RMSNorm | None = None,
        scale: float | None = None,
        attention_dropout: float = 0.0,
        output_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        self.num_heads = self.num_kv_heads = num_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.latent_width, self.rotary_dim = latent_width, rotary_dim
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.score_soft_cap = self.sinks = None
        width, inner = num_heads * head_dim, query_latent_width

        def linear(inputs: int | None, outputs: int | None, use_bias: bool = False) -> Any:
            """One of the projections to queries; None where there is none."""
            if inputs is None or outputs is None:
                return None
            return Linear(inputs, outputs, use_bias=use_bias, rngs=rngs)

        self.q_proj = linear(d_model, width if inner is None else None)
        self.q_down_proj = linear(d_model, inner, use_bias)
        self.q_up_proj = linear(inner, width)
        self.q_norm = q_norm
        kept = latent_width + rotary_dim
        self.kv_down_proj = Linear(d_model, kept, use_bias=use_bias, rngs=rngs)
        self.kv_norm = kv_norm
        made = num_heads * (head_dim - rotary_dim + value_dim)
        self.kv_up_proj = Linear(latent_width, made, use_bias=False, rngs=rngs)
        self.o_proj = Linear(num_heads * value_dim, d_model, use_bias=output_bias, rngs=rngs)
        self.position = position
        self.attention_dropout = Dropout(attention_dropout)
        self.output_dropout = Dropout(output_dropout)

    def _queries_keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T 1 C"], Float[Array, "B T 1 R"]]:
        return self._queries(x, positions), *self._kept(x, positions)

    def _queries(
        self, query: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        if self.q_down_proj is None:
            x = self.q_proj(query)
        else:
            inner = self.q_down_proj(query)
            x = self.q_up_proj(inner if self.q_norm is None else self.q_norm(inner))
        q_BTNH = x.reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        still, turned = jnp.split(q_BTNH, [self.head_dim - self.rotary_dim], axis=-1)
        return jnp.concatenate([still, self.position.rotate(turned, positions)], axis=-1)

    def _keys_and_values(
        self, key: Float[Array, "B S D"], value: Float[Array, "B S D"]
    ) -> tuple[Float[Array, "B S 1 C"], Float[Array, "B S 1 R"]]:
        return self._kept(key, jnp.arange(key.shape[1])[None])

    def _kept(
        self, key: Float[Array, "B S D"], positions: Int[Array, "B S"]
    ) -> tuple[Float[Array, "B S 1 C"], Float[Array, "B S 1 R"]]:
        """What a cache keeps: the numbers that keys and values are made of, and the turned keys."""
        latent, turned = jnp.split(self.kv_down_proj(key), [self.latent_width], axis=-1)
        turned = self.position.rotate(turned[:, :, None], positions)
        return self.kv_norm(latent)[:, :, None], turned

    def _expand(
        self, k_BSKH: Float[Array, "B S 1 C"], v_BSKH: Float[Array, "B S 1 R"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S N V"]]:
        """Keys and values of every head."""
        made = self.kv_up_proj(k_BSKH[:, :, 0])
        made = made.reshape(*made.shape[:-1], self.num_heads, -1)
        still, values = jnp.split(made, [self.head_dim - self.rotary_dim], axis=-1)
        turned = jnp.broadcast_to(v_BSKH, (*still.shape[:-1], self.rotary_dim))
        return jnp.concatenate([still, turned], axis=-1), values
