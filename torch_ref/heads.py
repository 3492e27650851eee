"""What stands beside a language model's output projection in BERT (arXiv 1810.04805)."""

import torch
from torch import nn

from torch_ref.feed_forward import ACTIVATIONS
from torch_ref.layers import Linear
from torch_ref.norms import LayerNorm, RMSNorm


class HeadTransform(nn.Module):
    """norm(activation(proj(x))), in front of the output projection of BERT's masked-LM head.

    Args:
        d_model: D.
        norm: over D.
        activation: see ``FeedForward``.
    """

    def __init__(self, d_model: int, norm: LayerNorm | RMSNorm, *, activation: str = "gelu"):
        super().__init__()
        self.activation = activation
        self.proj = Linear(d_model, d_model)
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (B, T, D) to the same shape and dtype."""
        return self.norm(ACTIVATIONS[self.activation](self.proj(x)))


class OutputBias(nn.Module):
    """x + bias, after an output projection whose matrix is the token embedding; it starts at 0."""

    def __init__(self, features: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` (…, V) to the same shape and dtype."""
        return x + self.bias
