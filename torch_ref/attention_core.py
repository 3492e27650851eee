"""The core of attention: softmax(q kᵀ) v for each head, plainly or by torch's fused kernels."""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from torch_ref.masks import expand_mask


def scaled_dot_product_attention(
    q_BTNH: torch.Tensor,
    k_BSKH: torch.Tensor,
    v_BSKH: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    dropout: Callable[[torch.Tensor], torch.Tensor] = lambda weights: weights,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes softmax(q kᵀ · scale + bias) v for each head (arXiv 1706.03762, eq. 1).

    Query head n uses key/value head n // (N / K). The product q kᵀ is in the activations' dtype,
    what follows it up to the softmax in float32 or wider. A query that may attend to no key gets
    zeros, with finite gradients.

    Args:
        q_BTNH: queries.
        k_BSKH: keys.
        v_BSKH: values, in the dtype of the output.
        mask: True = may attend, broadcastable to (B, N, T, S).
        bias: added to the scaled scores, broadcastable to (B, N, T, S).
        scale: default 1/sqrt(H).
        soft_cap: where given, scores become soft_cap · tanh(scores / soft_cap) (arXiv 2408.00118).
        dropout: applied to the weights.
        sinks: one more score of each head (N,), of a key that no value belongs to: weights then add
            up to less than 1 (arXiv 2309.17453; gpt-oss, arXiv 2508.10925).

    Returns:
        The output (B, T, N, H), and the weights (B, N, T, S) that were applied to the values
        (after dropout).
    """
    batch, queries, num_heads, head_dim = q_BTNH.shape
    keys, num_kv_heads = k_BSKH.shape[1:3]
    wide = torch.promote_types(q_BTNH.dtype, torch.float32)
    q_BTKGH = q_BTNH.reshape(batch, queries, num_kv_heads, -1, head_dim)
    scores_BKGTS = torch.einsum("btkgh,bskh->bkgts", q_BTKGH, k_BSKH)
    scores = scores_BKGTS.reshape(batch, num_heads, queries, keys).to(wide)
    scores = scores * (1 / math.sqrt(head_dim) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(wide)
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    if mask is not None:
        mask = expand_mask(mask)
        scores = torch.where(mask, scores, torch.finfo(wide).min)
    if sinks is not None:
        sink = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(dim=-1)[..., :keys]
    if mask is not None:
        weights = torch.where(mask, weights, 0)
    weights = dropout(weights.to(v_BSKH.dtype))
    weights_BKGTS = weights.reshape(batch, num_kv_heads, -1, queries, keys)
    out_BTKGH = torch.einsum("bkgts,bskh->btkgh", weights_BKGTS, v_BSKH)
    return out_BTKGH.reshape(batch, queries, num_heads, -1), weights


def fused_attention(
    q_BTNH: torch.Tensor,
    k_BSKH: torch.Tensor,
    v_BSKH: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: float,
    dropout_rate: float,
) -> torch.Tensor:
    """Computes the same output (B, T, N, H) by torch's kernels, which return no weights."""
    q_BNTH, k_BKSH, v_BKSH = (x.transpose(1, 2) for x in (q_BTNH, k_BSKH, v_BSKH))
    on_cpu = q_BTNH.device.type == "cpu"
    # ``self_attention_mask`` marks the mask that is causal and nothing else.
    is_causal = bias is None and getattr(mask, "is_causal", False)
    attn_mask = None if mask is None or is_causal else expand_mask(mask)
    if bias is not None:
        # Only the CPU's kernels take a bias that is wider than the queries.
        bias = bias.to(torch.promote_types(q_BTNH.dtype, torch.float32) if on_cpu else q_BTNH.dtype)
        attn_mask = bias if attn_mask is None else torch.where(attn_mask, bias, -torch.inf)
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    if group > 1 and attn_mask is not None and not on_cpu:
        # No memory-efficient GPU kernel takes both a mask and shared key/value heads.
        k_BKSH, v_BKSH = (x.repeat_interleave(group, dim=1) for x in (k_BKSH, v_BKSH))
    out_BNTH = functional.scaled_dot_product_attention(
        q_BNTH,
        k_BKSH,
        v_BKSH,
        attn_mask=attn_mask,
        dropout_p=dropout_rate,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=q_BNTH.shape[1] != k_BKSH.shape[1],
    )
    return out_BNTH.transpose(1, 2)
