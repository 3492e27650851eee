"""An image or a text as one vector, which a trained query gathers (SigLIP, arXiv 2303.15343)."""

import torch
from torch import nn

from torch_ref.attention import MultiHeadAttention
from torch_ref.feed_forward import FeedForward, GatedFeedForward
from torch_ref.layers import Embedding
from torch_ref.norms import LayerNorm, RMSNorm


class AttentionPooling(nn.Module):
    """Computes a + feed_forward(norm(a)), where a is what a trained query attends to.

    It is the pooling of big_vision's ViT (arXiv 2106.04560, section 3.3).

    Args:
        d_model: D.
        attention: from the query to the tokens.
        norm: before the feed-forward.
        feed_forward: of the vector.
    """

    def __init__(
        self,
        d_model: int,
        attention: MultiHeadAttention,
        norm: LayerNorm | RMSNorm,
        feed_forward: FeedForward | GatedFeedForward,
    ):
        super().__init__()
        self.query = Embedding(1, d_model)
        self.attention = attention
        self.norm = norm
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a vector (B, D) for each row of x (B, T, D), in its dtype."""
        query = self.query(torch.zeros((len(x), 1), dtype=torch.int64, device=x.device))
        gathered = self.attention(query, x)
        pooled: torch.Tensor = gathered + self.feed_forward(self.norm(gathered))
        return pooled[:, 0]
