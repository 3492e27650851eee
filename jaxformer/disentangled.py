"""Disentangled positions: scores of contents with trained rows of distances (arXiv 2006.03654).

``DistanceRows`` are those of the whole model, and ``DisentangledPositions`` are handed to the
attention of each layer, which projects the rows to its heads.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.layers import Dropout, Embedding, Linear, widen
from jaxformer.norms import LayerNorm, RMSNorm
from jaxformer.position_tables import log_buckets
from jaxformer.positions import NoPositions


class DistanceRows(nnx.Module):
    """Holds a trained row for each bucket of distances, 2 · span of them, which all layers share.

    Args:
        span: how many buckets there are to each side.
        d_model: D.
        norm: of the rows, over D (DeBERTa V3, arXiv 2111.09543).
        rngs: where the initial weights come from.
    """

    def __init__(
        self, span: int, d_model: int, *, norm: LayerNorm | RMSNorm | None = None, rngs: nnx.Rngs
    ):
        self.embedding = Embedding(2 * span, d_model, rngs=rngs).embedding
        self.norm = norm

    def __call__(self) -> Float[Array, "R D"]:
        """Returns the rows of all buckets, from the farthest later key to the farthest earlier."""
        rows_RD = self.embedding[...]
        return rows_RD if self.norm is None else self.norm(rows_RD)


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
        rngs: where the initial weights come from.
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
        rngs: nnx.Rngs,
    ):
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
        self.k_proj = Linear(d_model, width, rngs=rngs) if has_keys else None
        self.q_proj = Linear(d_model, width, rngs=rngs) if has_queries else None
        self.dropout = Dropout(dropout)

    def content_bias(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BSNH: Float[Array, "B S N H"],
        rows_RD: Float[Array, "R D"],
        distance_TS: Int[Array, "T S"],
        q_proj: Linear,
        k_proj: Linear,
        scale: float,
    ) -> Float[Array, "B N T S"]:
        """Returns what is added to the scaled scores, in float32 or wider.

        Args:
            q_BTNH: queries.
            k_BSNH: keys.
            rows_RD: of ``DistanceRows``.
            distance_TS: key - query position.
            q_proj: the attention's projection of queries.
            k_proj: that of keys.
            scale: what scores are multiplied by.
        """
        index_TS = self._buckets(distance_TS)
        # A mask for a batch of one row.
        rows_RD = self.dropout(rows_RD[None])[0]
        q_BTNH, k_BSNH = widen(q_BTNH), widen(k_BSNH)
        bias = jnp.zeros((1, 1, 1, 1), q_BTNH.dtype)
        if self.content_to_position:
            keys_RNH = self._heads(self.k_proj or k_proj, rows_RD)
            scores_BNTR = jnp.einsum("btnh,rnh->bntr", q_BTNH, keys_RNH)
            bias = bias + jnp.take_along_axis(scores_BNTR, index_TS[None, None], axis=-1)
        if self.position_to_content:
            queries_RNH = self._heads(self.q_proj or q_proj, rows_RD)
            scores_BNSR = jnp.einsum("bsnh,rnh->bnsr", k_BSNH, queries_RNH)
            by_key = jnp.take_along_axis(scores_BNSR, index_TS.T[None, None], axis=-1)
            bias = bias + by_key.swapaxes(-1, -2)
        return bias * scale

    def _heads(self, proj: Linear, rows_RD: Float[Array, "R D"]) -> Float[Array, "R N H"]:
        return widen(proj(rows_RD)).reshape(-1, self.num_heads, self.head_dim)

    def _buckets(self, distance_TS: Int[Array, "T S"]) -> Int[Array, "T S"]:
        """The row of each pair: that of query - key position."""
        if self.max_distance is None:
            return jnp.clip(self.span - distance_TS, 0, 2 * self.span - 1)
        table = jnp.asarray(log_buckets(self.span, self.max_distance))
        far = self.max_distance
        bucket = table[jnp.clip(-distance_TS, -far, far) + far]
        return jnp.clip(bucket + self.span, 0, 2 * self.span - 1)
