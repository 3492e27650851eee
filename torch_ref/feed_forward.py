"""The feed-forward of a block, plain or gated, and its activations."""

import torch
from torch import nn
from torch.nn import functional

from torch_ref.layers import Dropout, Linear


def relu(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0), with derivative 0 at 0."""
    return functional.relu(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · Φ(x) exactly (arXiv 1606.08415); torch's kernel widens bfloat16 by itself."""
    return functional.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """Approximates x · Φ(x) by tanh (arXiv 1606.08415, section 2): GPT-2's ``gelu_new``."""
    return functional.gelu(x, approximate="tanh")


def gelu_bloom(x: torch.Tensor) -> torch.Tensor:
    """Computes ``gelu_tanh`` with sqrt(2/π) cut to eight digits, as BLOOM (arXiv 2211.05100).

    x · (1 + tanh(u)) / 2 with u = 0.79788456 · (x + 0.044715 · x³).
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    u = 0.79788456 * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(u))).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · sigmoid(x)."""
    return functional.silu(x)


ACTIVATIONS = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_bloom": gelu_bloom,
    "silu": silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}


class FeedForward(nn.Module):
    """Computes down(activation(up(x))) (arXiv 1706.03762, eq. 2).

    Args:
        d_model: D.
        d_ff: F, default 4·D.
        activation: relu, gelu (exact), gelu_tanh, gelu_bloom or silu.
        use_bias: whether both projections have biases.
        hidden_dropout: rate on the hidden activation.
        output_dropout: rate on the result.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        activation: str = "gelu",
        use_bias: bool = True,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__()
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.activation = activation
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        hidden = self.hidden_dropout(ACTIVATIONS[self.activation](self.up_proj(x)))
        return self.output_dropout(self.down_proj(hidden))


class GatedFeedForward(nn.Module):
    """Computes down(activation(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202, eq. 6).

    SwiGLU with ``activation="silu"``, GeGLU with ``"gelu"`` or ``"gelu_tanh"``.

    Args:
        d_model: D.
        d_ff: F, default int(8·D / 3), which keeps the parameters of a plain one of 4·D. It is
            used as given: no rounding to a multiple, no factor of 2/3.
        activation: silu, gelu (exact), gelu_tanh or relu.
        use_bias: whether the three projections have biases.
        hidden_dropout: rate on the product.
        output_dropout: rate on the result.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__()
        d_ff = int(8 * d_model / 3) if d_ff is None else d_ff
        self.activation = activation
        self.gate_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        hidden = ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x)
        return self.output_dropout(self.down_proj(self.hidden_dropout(hidden)))
