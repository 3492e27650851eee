"""An image or a text as one vector, which a trained query gathers (SigLIP, arXiv 2303.15343)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.attention import MultiHeadAttention
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.layers import Embedding
from jaxformer.norms import LayerNorm, RMSNorm


class AttentionPooling(nnx.Module):
    """Computes a + feed_forward(norm(a)), where a is what a trained query attends to.

    It is the pooling of big_vision's ViT (arXiv 2106.04560, section 3.3).

    Args:
        d_model: D.
        attention: from the query to the tokens.
        norm: before the feed-forward.
        feed_forward: of the vector.
        rngs: where the query's initial numbers come from.
    """

    def __init__(
        self,
        d_model: int,
        attention: MultiHeadAttention,
        norm: LayerNorm | RMSNorm,
        feed_forward: FeedForward | GatedFeedForward,
        *,
        rngs: nnx.Rngs,
    ):
        self.query = Embedding(1, d_model, rngs=rngs)
        self.attention = attention
        self.norm = norm
        self.feed_forward = feed_forward

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B D"]:
        """Returns a vector for each row, in the dtype of x."""
        query_B1D = self.query(jnp.zeros((len(x), 1), jnp.int32)).astype(x.dtype)
        # Without return_weights there is one result.
        gathered: Any = self.attention(query_B1D, x)
        pooled: Array = gathered + self.feed_forward(self.norm(gathered))
        return pooled[:, 0]
