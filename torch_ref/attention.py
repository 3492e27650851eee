"""Multi-head attention: the projections into and out of the core, and the key/value cache."""

import dataclasses
import math

import torch
from torch import nn

from torch_ref.attention_core import fused_attention, scaled_dot_product_attention
from torch_ref.layers import Dropout, Linear
from torch_ref.masks import combine_masks
from torch_ref.norms import LayerNorm, RMSNorm
from torch_ref.positions import NoPositions


@dataclasses.dataclass
class LayerCache:
    """The keys and values that one attention has seen, in buffers of a fixed length S.

    Attributes:
        k_BSKH: keys, rotated; slots from ``length`` on are not yet written. In a dtype of their
            own, for example bfloat16.
        v_BSKH: values.
        length: how many slots are written.
    """

    k_BSKH: torch.Tensor  # noqa: N815
    v_BSKH: torch.Tensor  # noqa: N815
    length: int

    def append(
        self, k_BTKH: torch.Tensor, v_BTKH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes T slots after those already there, in place.

        Returns:
            All keys and values, (B, S, K, H), in the dtypes of those given.

        Raises:
            ValueError: the buffers are too short.
        """
        end = self.length + k_BTKH.shape[1]
        if end > self.k_BSKH.shape[1]:
            raise ValueError(f"{end} tokens do not fit a cache of {self.k_BSKH.shape[1]}")
        self.k_BSKH[:, self.length : end] = k_BTKH
        self.v_BSKH[:, self.length : end] = v_BTKH
        self.length = end
        return self.k_BSKH.to(k_BTKH.dtype), self.v_BSKH.to(v_BTKH.dtype)


class MultiHeadAttention(nn.Module):
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

    Raises:
        ValueError: num_heads is not divisible by num_kv_heads, or d_model by num_heads where
            head_dim is not given; or norm_all_heads and norm_after_rotation are both on.
    """

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
    ):
        super().__init__()
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
        self.sinks = nn.Parameter(torch.zeros(num_heads)) if sinks else None
        kv_width = num_kv_heads * self.head_dim
        width = num_heads * self.head_dim
        self.q_proj = Linear(d_model, width, use_bias=use_bias)
        self.k_proj = Linear(d_model, kv_width, use_bias=use_bias and key_bias)
        self.v_proj = Linear(d_model, kv_width, use_bias=use_bias)
        self.o_proj = Linear(width, d_model, use_bias=output_bias) if output_projection else None
        self.position = NoPositions() if position is None else position
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.norm_all_heads = norm_all_heads
        self.norm_after_rotation = norm_after_rotation
        self.qkv_clip = qkv_clip
        self.attention_dropout = Dropout(attention_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
        value: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        *,
        bias: torch.Tensor | None = None,
        positions: torch.Tensor | None = None,
        cache: LayerCache | None = None,
        position_bias: torch.Tensor | None = None,
        position_rows: torch.Tensor | None = None,
        memory_cache: LayerCache | None = None,
        return_weights: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attends from ``query`` to ``key``, which defaults to the query; ``value`` to the key.

        Torch's fused attention computes it where it gives the same: no weights are returned,
        scores have no soft cap and no sinks, and dropout on the weights is torch's own.

        Args:
            query: what attends, (B, T, D).
            key: what it attends to, (B, S, D) of any length S.
            value: what the weights average, (B, S, D).
            mask: True = may attend, broadcastable to (B, N, T, S).
            bias: added to the scaled scores, beside the position scheme's own.
            positions: of the query tokens, and of the keys in self-attention, (B, T); default
                0 … T - 1.
            cache: keys and values so far; this call's are appended to it, and S is its length.
            position_bias: what a position scheme outside has made of the distances, added as the
                own one's is.
            position_rows: rows of distances (R, D), for ``DisentangledPositions``.
            memory_cache: keys and values of ``key``, as ``remember`` has made them.
            return_weights: also return the weights applied to the values, (B, N, T, S).
        """
        start = 0 if cache is None else cache.length
        if positions is None and _overrides(self.position, "rotate"):
            positions = _slots(start, query)
        q_BTNH = self._queries(query, positions)
        if memory_cache is not None:
            k_BSKH, v_BSKH = memory_cache.k_BSKH.to(q_BTNH), memory_cache.v_BSKH.to(q_BTNH)
        elif key is None:
            k_BSKH, v_BSKH = self._keys_and_values(query, query, positions)
        else:
            k_BSKH, v_BSKH = self._keys_and_values(key, key if value is None else value)
        if cache is not None:
            k_BSKH, v_BSKH = cache.append(k_BSKH, v_BSKH)
        k_BSKH, v_BSKH = self._expand(k_BSKH, v_BSKH)

        if bias is not None:
            # A bias of -inf blocks; as part of the mask a row of nothing else gives zeros, not NaN.
            mask = combine_masks(mask, bias > -torch.inf)
        if _overrides(self.position, "bias"):
            distance_TS = _slots(0, k_BSKH) - _slots(start, query).T
            own_bias = self.position.bias(q_BTNH * self.scale, distance_TS)
            if own_bias is not None:
                bias = own_bias if bias is None else bias + own_bias
        if position_bias is not None:
            bias = position_bias if bias is None else bias + position_bias
        if position_rows is not None:
            distance_TS = _slots(0, k_BSKH) - _slots(start, query).T
            content_bias = self.position.content_bias(
                q_BTNH, k_BSKH, position_rows, distance_TS, self.q_proj, self.k_proj, self.scale
            )
            if content_bias is not None:
                bias = content_bias if bias is None else bias + content_bias

        weights_BNTS = None
        dropout_rate = _fused_dropout_rate(self.attention_dropout)
        is_plain = self.score_soft_cap is not None or self.sinks is not None
        if return_weights or is_plain or dropout_rate is None:
            out_BTNH, weights_BNTS = scaled_dot_product_attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                mask=mask,
                bias=bias,
                scale=self.scale,
                soft_cap=self.score_soft_cap,
                dropout=self.attention_dropout,
                sinks=self.sinks,
            )
        else:
            out_BTNH = fused_attention(
                q_BTNH,
                k_BSKH,
                v_BSKH,
                mask=mask,
                bias=bias,
                scale=self.scale,
                dropout_rate=dropout_rate,
            )
        out = out_BTNH.reshape(*query.shape[:-1], -1)
        if self.o_proj is not None:
            out = self.o_proj(out)
        out = self.output_dropout(out)
        if weights_BNTS is None or not return_weights:
            return out
        return out, weights_BNTS

    def remember(self, key: torch.Tensor) -> LayerCache:
        """Returns the keys and values of an encoder's output (B, S, D), for ``memory_cache``."""
        k_BSKH, v_BSKH = self._keys_and_values(key, key)
        return LayerCache(k_BSKH, v_BSKH, key.shape[1])

    def _queries(self, query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        return self._heads(self.q_proj(query), self.num_heads, self.q_norm, positions)

    def _expand(
        self, k_BSKH: torch.Tensor, v_BSKH: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, from what a cache keeps of them: here the same."""
        return k_BSKH, v_BSKH

    def _keys_and_values(
        self, key: torch.Tensor, value: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, at ``positions`` or at 0 … S - 1, and values, (B, S, K, H)."""
        if positions is None and _overrides(self.position, "rotate"):
            positions = _slots(0, key)
        k_BSKH = self._heads(self.k_proj(key), self.num_kv_heads, self.k_norm, positions)
        return k_BSKH, self._split(self.v_proj(value), self.num_kv_heads)

    def _heads(
        self,
        x: torch.Tensor,
        num_heads: int,
        norm: LayerNorm | RMSNorm | None,
        positions: torch.Tensor | None,
    ) -> torch.Tensor:
        """Projected queries or keys by head: normalised, and turned by their positions."""
        x_BTNH = self._split(x, num_heads, norm if self.norm_all_heads else None)
        norm = None if self.norm_all_heads else norm
        if norm is not None and not self.norm_after_rotation:
            x_BTNH = norm(x_BTNH)
        if positions is not None:
            x_BTNH = self.position.rotate(x_BTNH, positions)
        return norm(x_BTNH) if norm is not None and self.norm_after_rotation else x_BTNH

    def _split(
        self, x: torch.Tensor, num_heads: int, norm: nn.Module | None = None
    ) -> torch.Tensor:
        """A projection, with ``norm`` normalised, and clipped, before it is split into heads."""
        if norm is not None:
            x = norm(x)
        if self.qkv_clip is not None:
            x = x.clamp(-self.qkv_clip, self.qkv_clip)
        return x.reshape(*x.shape[:-1], num_heads, self.head_dim)


def _slots(start: int, x: torch.Tensor) -> torch.Tensor:
    """Returns the slots of the rows of x (B, T, …): start … start + T - 1, as (1, T)."""
    return torch.arange(start, start + x.shape[1], device=x.device)[None]


def _overrides(position: NoPositions, method: str) -> bool:
    return getattr(type(position), method) is not getattr(NoPositions, method)


def _fused_dropout_rate(dropout: Dropout) -> float | None:
    """The rate that torch's kernels can apply; None where a mask or generator was set."""
    if not dropout.training or dropout.rate == 0:
        return 0.0
    is_set = dropout.keep_mask is not None or dropout.generator is not None
    return None if is_set else dropout.rate
