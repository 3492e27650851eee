"""Disentangled positions: scores of contents with trained rows of distances (arXiv 2006.03654).

``DistanceRows`` are those of the whole model, and ``DisentangledPositions`` are handed to the
attention of each layer, which projects the rows to its heads.
"""

import torch
from torch import nn

from torch_ref.layers import Dropout, Embedding, Linear
from torch_ref.norms import LayerNorm, RMSNorm
from torch_ref.position_tables import log_buckets
from torch_ref.positions import NoPositions


class DistanceRows(nn.Module):
    """Holds a trained row for each bucket of distances, 2 · span of them, which all layers share.

    Args:
        span: how many buckets there are to each side.
        d_model: D.
        norm: of the rows, over D (DeBERTa V3, arXiv 2111.09543).
    """

    def __init__(self, span: int, d_model: int, *, norm: LayerNorm | RMSNorm | None = None):
        super().__init__()
        self.weight = Embedding(2 * span, d_model).weight
        self.norm = norm

    def forward(self) -> torch.Tensor:
        """Returns the rows of all buckets, from the farthest later key to the farthest earlier.

        They are (2 · span, D).
        """
        return self.weight if self.norm is None else self.norm(self.weight)


class DisentangledPositions(NoPositions):
    """Adds to the scores what contents say to distances, and distances to contents (eq. 4).

    With i the bucket of query position - key position, K and Q the rows' projections: q · K[i] of
    each query and k · Q[i] of each key. Each head has keys of its own. DeBERTa divides all scores
    by sqrt(n · H), with n the kinds of scores that are added, contents' own among them: that is the
    attention's scale.

    Args:
        d_model: D, the width of the rows.
        num_heads: N.
        head_dim: H.
        span: how many buckets there are to each side.
        max_distance: from which on all distances share a bucket, where spans grow with their
            logarithm; None gives each distance a bucket.
        content_to_position: whether queries meet rows.
        position_to_content: whether keys do.
        shares_projections: whether the attention's own projections take the rows to the heads.
        dropout: rate on the rows.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        *,
        span: int,
        max_distance: int | None = None,
        content_to_position: bool = True,
        position_to_content: bool = True,
        shares_projections: bool = False,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.span = span
        self.max_distance = max_distance
        self.content_to_position = content_to_position
        self.position_to_content = position_to_content
        self.shares_projections = shares_projections
        width = num_heads * head_dim
        has_keys = content_to_position and not shares_projections
        has_queries = position_to_content and not shares_projections
        self.k_proj = Linear(d_model, width) if has_keys else None
        self.q_proj = Linear(d_model, width) if has_queries else None
        self.dropout = Dropout(dropout)

    def content_bias(
        self,
        q_BTNH: torch.Tensor,
        k_BSNH: torch.Tensor,
        rows_RD: torch.Tensor,
        distance_TS: torch.Tensor,
        q_proj: Linear,
        k_proj: Linear,
        scale: float,
    ) -> torch.Tensor:
        """Returns what is added to the scaled scores, (B, N, T, S).

        Args:
            q_BTNH: queries, (B, T, N, H).
            k_BSNH: keys, (B, S, N, H).
            rows_RD: of ``DistanceRows``, (2 · span, D).
            distance_TS: key - query position, (T, S).
            q_proj: the attention's projection of queries.
            k_proj: that of keys.
            scale: what scores are multiplied by.
        """
        index_TS = self._buckets(distance_TS)
        rows_RD = self.dropout(rows_RD[None])[0]
        bias = q_BTNH.new_zeros((1, 1, 1, 1))
        if self.content_to_position:
            keys_RNH = self._heads(self.k_proj or k_proj, rows_RD)
            scores_BNTR = torch.einsum("btnh,rnh->bntr", q_BTNH, keys_RNH)
            index = index_TS.expand(*scores_BNTR.shape[:2], -1, -1)
            bias = bias + scores_BNTR.gather(-1, index)
        if self.position_to_content:
            queries_RNH = self._heads(self.q_proj or q_proj, rows_RD)
            scores_BNSR = torch.einsum("bsnh,rnh->bnsr", k_BSNH, queries_RNH)
            index = index_TS.T.expand(*scores_BNSR.shape[:2], -1, -1)
            bias = bias + scores_BNSR.gather(-1, index).transpose(-1, -2)
        return bias * scale

    def _heads(self, proj: Linear, rows_RD: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = proj(rows_RD)
        return projected.unflatten(-1, (self.num_heads, self.head_dim))

    def _buckets(self, distance_TS: torch.Tensor) -> torch.Tensor:
        """The row of each pair: that of query - key position."""
        if self.max_distance is None:
            return (self.span - distance_TS).clamp(0, 2 * self.span - 1)
        table = torch.as_tensor(log_buckets(self.span, self.max_distance), dtype=torch.long)
        far = self.max_distance
        bucket = table.to(distance_TS.device)[(-distance_TS).clamp(-far, far) + far]
        return (bucket + self.span).clamp(0, 2 * self.span - 1)
