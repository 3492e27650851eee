"""Multi-head attention: the projections into and out of the core, and the key/value cache."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention_core import scaled_dot_product_attention
from jaxformer.execution import few_rows
from jaxformer.execution.attention_products import by_row
from jaxformer.execution.fused_attention import try_fused_attention
from jaxformer.execution.sharding import share_heads
from jaxformer.layers import Dropout, Linear, in_float32, project
from jaxformer.masks import combine_masks, expand_mask
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.positions import NoPositions


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class LayerCache:
    """The keys and values that one attention has seen, in buffers of a fixed length S.

    Attributes:
        k_RSH: keys, rotated, with a row for each sequence and key/value head, R = B · K; slots
            from ``length`` on are not yet written. In a dtype of their own, for example bfloat16.
        v_RSH: values.
        length: how many slots are written, int32 scalar.
    """

    k_RSH: Float[Array, "R S H"]  # noqa: N815
    v_RSH: Float[Array, "R S H"]  # noqa: N815
    length: Int[Array, ""]

    @property
    def slots(self) -> int:
        """S, how many tokens there is room for."""
        return self.k_RSH.shape[1]

    def append(
        self, k_BTKH: Float[Array, "B T K H"], v_BTKH: Float[Array, "B T K H"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Writes T slots after those already there.

        The caller sees to it that they fit: on a device, slots past the end would be written over
        the last ones.

        Returns:
            All keys and values, in the dtypes of those given.
        """
        self.k_RSH = self._write(self.k_RSH, k_BTKH)
        self.v_RSH = self._write(self.v_RSH, v_BTKH)
        self.length = self.length + k_BTKH.shape[1]
        return self._read(self.k_RSH, k_BTKH), self._read(self.v_RSH, v_BTKH)

    def read(
        self, like_BTNH: Float[Array, "B T N H"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Returns all keys and values, for these queries and in their dtype."""
        return self._read(self.k_RSH, like_BTNH), self._read(self.v_RSH, like_BTNH)

    def _write(self, x_RSH: Array, new_BTKH: Array) -> Array:
        new_RTH = by_row(new_BTKH).astype(x_RSH.dtype)
        return jax.lax.dynamic_update_slice_in_dim(x_RSH, new_RTH, self.length, axis=1)

    def _read(self, x_RSH: Array, like_BTKH: Array) -> Array:
        batch = like_BTKH.shape[0]
        x_BKSH = x_RSH.reshape(batch, -1, *x_RSH.shape[1:])
        return x_BKSH.transpose(0, 2, 1, 3).astype(like_BTKH.dtype)


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
        key_bias: False leaves k_proj without one (Whisper, arXiv 2212.04356).
        output_bias: whether o_proj has one.
        output_projection: False leaves the heads side by side, (B, T, N·H), without o_proj.
        position: a ``NoPositions``, ``Rotary``, ``ALiBi`` or ``RelativePositions``.
        q_norm: normalises each query over H, before ``position`` rotates it; ``k_norm`` each key.
        k_norm: see ``q_norm``.
        norm_all_heads: q_norm is over N·H and k_norm over K·H, all heads at once (OLMo 2, arXiv
            2501.00656), before they are cut (OLMoE, arXiv 2409.02060).
        norm_after_rotation: the norms follow ``position`` (HunYuan).
        qkv_clip: where given, projected queries, keys and values are cut to ±qkv_clip (OLMo, MPT).
        scale: default 1/sqrt(H).
        score_soft_cap: see ``scaled_dot_product_attention``.
        sinks: whether each head has a number of its own, ``sinks`` (N,), see
            ``scaled_dot_product_attention``.
        attention_dropout: rate on the attention weights.
        output_dropout: rate on the result.
        rngs: where the initial weights come from.

    Raises:
        ValueError: num_heads is not divisible by num_kv_heads, or d_model by num_heads where
            head_dim is not given; or norm_all_heads and norm_after_rotation are both on.

    In programs that make tokens ``uses_custom_call`` may be set; see ``prepare_few_rows``.
    """

    uses_custom_call = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        use_bias: bool = True,
        key_bias: bool = True,
        output_bias: bool = True,
        output_projection: bool = True,
        position: NoPositions | None = None,
        q_norm: LayerNorm | RMSNorm | None = None,
        k_norm: LayerNorm | RMSNorm | None = None,
        norm_all_heads: bool = False,
        norm_after_rotation: bool = False,
        qkv_clip: float | None = None,
        scale: float | None = None,
        score_soft_cap: float | None = None,
        sinks: bool = False,
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
        if norm_all_heads and norm_after_rotation:
            raise ValueError("norm_all_heads and norm_after_rotation exclude each other")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = d_model // num_heads if head_dim is None else head_dim
        self.scale = 1 / math.sqrt(self.head_dim) if scale is None else scale
        self.score_soft_cap = score_soft_cap
        self.sinks = nnx.Param(jnp.zeros((num_heads,))) if sinks else None
        kv_width = num_kv_heads * self.head_dim
        width = num_heads * self.head_dim
        self.q_proj = Linear(d_model, width, use_bias=use_bias, rngs=rngs)
        self.k_proj = Linear(d_model, kv_width, use_bias=use_bias and key_bias, rngs=rngs)
        self.v_proj = Linear(d_model, kv_width, use_bias=use_bias, rngs=rngs)
        self.o_proj = (
            Linear(width, d_model, use_bias=output_bias, rngs=rngs) if output_projection else None
        )
        self.position = NoPositions() if position is None else position
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.norm_all_heads = norm_all_heads
        self.norm_after_rotation = norm_after_rotation
        self.qkv_clip = qkv_clip
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
        position_bias: Float[Array, "B N T S"] | None = None,
        position_rows: Float[Array, "R D"] | None = None,
        memory_cache: LayerCache | None = None,
        return_weights: bool = False,
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Float[Array, "B N T S"]]:
        """Attends from ``query`` to ``key``, which defaults to the query; ``value`` to the key.

        Args:
            query: what attends.
            key: what it attends to, of any length S.
            value: what the weights average.
            mask: True = may attend, broadcastable to (B, N, T, S).
            bias: added to the scaled scores, beside the position scheme's own.
            positions: of the query tokens, and of the keys in self-attention; default 0 … T - 1.
            cache: keys and values so far; this call's are appended to it, and S is its length.
            position_bias: what a position scheme outside has made of the distances, added as the
                own one's is.
            position_rows: rows of distances, for ``DisentangledPositions``.
            memory_cache: keys and values of ``key``, as ``remember`` has made them.
            return_weights: also return the weights applied to the values.
        """
        start = jnp.int32(0) if cache is None else cache.length
        slots_T = start + jnp.arange(query.shape[1])
        if positions is None:
            positions = slots_T[None]
        if memory_cache is not None:
            q_BTNH = self._queries(query, positions)
            k_BSKH, v_BSKH = memory_cache.read(q_BTNH)
        elif key is None:
            q_BTNH, k_BSKH, v_BSKH = self._queries_keys_values(query, positions)
        else:
            q_BTNH = self._queries(query, positions)
            k_BSKH, v_BSKH = self._keys_and_values(key, key if value is None else value)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        k_BSKH, v_BSKH = self._expand(k_BSKH, v_BSKH)

        distance_TS = jnp.arange(k_BSKH.shape[1])[None, :] - slots_T[:, None]
        if bias is not None:
            # A bias of -inf blocks; as part of the mask a row of nothing else gives zeros, not NaN.
            mask = combine_masks(mask, bias > -jnp.inf)
        scaled_BTNH = in_float32(lambda q: q * self.scale, q_BTNH)
        content_bias = None
        if position_rows is not None:
            content_bias = self.position.content_bias(
                q_BTNH, k_BSKH, position_rows, distance_TS, self.q_proj, self.k_proj, self.scale
            )
        for added in (self.position.bias(scaled_BTNH, distance_TS), position_bias, content_bias):
            if added is not None:
                bias = added if bias is None else bias + added
        attend = functools.partial(self._attend, return_weights=return_weights)
        weights_BNTS: Any
        out_BTNH, weights_BNTS = share_heads(attend)(
            q_BTNH,
            k_BSKH,
            v_BSKH,
            mask,
            bias,
            self.attention_dropout,
            None if self.sinks is None else self.sinks[...],
        )
        out = out_BTNH.reshape(*query.shape[:-1], -1)
        if self.o_proj is not None:
            out = self.o_proj(out)
        out = self.output_dropout(out)
        return (out, weights_BNTS) if return_weights else out

    def remember(self, key: Float[Array, "B S D"]) -> LayerCache:
        """Returns the keys and values of an encoder's output, for ``memory_cache``."""
        k_BSKH, v_BSKH = self._keys_and_values(key, key)
        return LayerCache(by_row(k_BSKH), by_row(v_BSKH), jnp.int32(key.shape[1]))

    def _attend(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BSKH: Float[Array, "B S K H"],
        v_BSKH: Float[Array, "B S K H"],
        mask: Bool[Array, "B N T S"] | None,
        bias: Float[Array, "B N T S"] | None,
        dropout: Dropout,
        sinks: Float[Array, "N"] | None = None,
        *,
        return_weights: bool,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B N T S"] | None]:
        """Returns the output before o_proj, by a fused kernel or the core, and the weights."""
        # Without sinks, which no fused kernel knows.
        if sinks is None:
            out_BTNH = try_fused_attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                mask=None if mask is None else expand_mask(mask),
                bias=bias,
                scale=self.scale,
                soft_cap=self.score_soft_cap,
                dropout=dropout,
                weights=return_weights or dropout.recording,
            )
            if out_BTNH is not None:
                return out_BTNH, None
        with few_rows.head_calls(self.uses_custom_call):
            out_BTNH, weights_BNTS = scaled_dot_product_attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                mask=mask,
                bias=bias,
                scale=self.scale,
                soft_cap=self.score_soft_cap,
                dropout=dropout,
                sinks=sinks,
            )
        return out_BTNH, weights_BNTS if return_weights else None

    def _queries_keys_values(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of the same tokens."""
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q_BTNH = self._heads(q, self.num_heads, self.q_norm, positions)
        k_BTKH = self._heads(k, self.num_kv_heads, self.k_norm, positions)
        return q_BTNH, k_BTKH, self._split(v, self.num_kv_heads)

    def _queries(
        self, query: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        return self._heads(self.q_proj(query), self.num_heads, self.q_norm, positions)

    def _expand(
        self, k_BSKH: Float[Array, "B S K _"], v_BSKH: Float[Array, "B S K _"]
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Keys and values, from what a cache keeps of them: here the same."""
        return k_BSKH, v_BSKH

    def _keys_and_values(
        self,
        key: Float[Array, "B S D"],
        value: Float[Array, "B S D"],
    ) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Keys, at 0 … S - 1, and values."""
        positions = jnp.arange(key.shape[1])[None]
        k_BSKH = self._heads(self.k_proj(key), self.num_kv_heads, self.k_norm, positions)
        return k_BSKH, self._split(self.v_proj(value), self.num_kv_heads)

    def _heads(
        self,
        x: Float[Array, "B T _"],
        num_heads: int,
        norm: LayerNorm | RMSNorm | None,
        positions: Int[Array, "B T"],
    ) -> Float[Array, "B T N H"]:
        """Projected queries or keys by head: normalised, and turned by their positions."""
        x_BTNH = self._split(x, num_heads, norm if self.norm_all_heads else None)
        norm = None if self.norm_all_heads else norm
        if norm is not None and not self.norm_after_rotation:
            x_BTNH = norm(x_BTNH)
        x_BTNH = self.position.rotate(x_BTNH, positions)
        return norm(x_BTNH) if norm is not None and self.norm_after_rotation else x_BTNH

    def _split(
        self, x: Float[Array, "B T _"], num_heads: int, norm: Any = None
    ) -> Float[Array, "B T N H"]:
        """A projection, with ``norm`` normalised, and clipped, before it is split into heads."""
        if norm is not None:
            x = norm(x)
        if self.qkv_clip is not None:
            x = in_float32(functools.partial(_clip, self.qkv_clip), x)
        return x.reshape(*x.shape[:-1], num_heads, self.head_dim)


def _clip(bound: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    # Not by jnp.clip, whose derivative at the bounds themselves is a half, and torch's 1.
    return jnp.where(jnp.abs(x) <= bound, x, jnp.sign(x) * bound)
