"""What is recorded of attention, and the scores that torch's fused attention does not show."""

import dataclasses
from typing import Any

import numpy as np

from jaxformer.parity.recording import torch_values

# Of longer sequences a map shows the beginning.
MAP_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class RecordedWeights:
    """The part of attention weights (B, N, T, S) that a map needs; all would take much memory.

    Attributes:
        shape: (B, N, T, S).
        beginning: (N, T, S) of the first example, at most 64 queries and 64 keys.
    """

    shape: tuple[int, ...]
    beginning: np.ndarray

    @classmethod
    def of(cls, weights: Any) -> "RecordedWeights":
        """Records the shape and the beginning of weights (B, N, T, S), which may be traced."""
        beginning = weights[0, :, :MAP_LENGTH, :MAP_LENGTH]
        return cls(tuple(weights.shape), beginning.copy())


def attention_scores(
    query: Any,
    key: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Returns what torch's ``scaled_dot_product_attention`` takes the softmax of.

    Args:
        query: (..., N, T, H).
        key: (..., K, S, H), where K is N or, with ``enable_gqa``, divides it.
        attn_mask: boolean (True = may attend) or added to the scores.
        is_causal: whether to use a causal mask instead.
        scale: factor of the scores; default 1 / sqrt(H).
        enable_gqa: whether groups of queries share a key head.

    Returns:
        Scores (..., N, T, S).
    """
    torch = torch_values.require_torch()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask
