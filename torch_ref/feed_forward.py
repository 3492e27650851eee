"""The feed-forward of a block, plain or gated, and its activations."""

import math

import torch
from torch import nn
from torch.nn import functional

from torch_ref.layers import Dropout, Linear


def relu(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0), with derivative 0 at 0."""
    return functional.relu(x)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """Computes max(x, 0)² (Primer, arXiv 2109.08668)."""
    return functional.relu(x).square()


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


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · sigmoid(1.702 · x) (arXiv 1606.08415, section 2)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.sigmoid(1.702 * wide)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """Computes x · sigmoid(x)."""
    return functional.silu(x)


def tanh(x: torch.Tensor) -> torch.Tensor:
    """Computes the hyperbolic tangent."""
    return torch.tanh(x)


class XIELU(nn.Module):
    """Computes an activation whose two curvatures are trained (xIELU, arXiv 2411.13010).

    a_p · x² + beta · x above 0, and a_n · (exp(min(x, eps)) - 1 - x) + beta · x elsewhere, with
    a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n), so that a_p > 0 and a_n > beta.
    ``alpha_p`` and ``alpha_n`` have shape (1,) and start where a_p and a_n are ``initial``.

    Args:
        initial: of a_p and a_n.
        beta: the slope at 0.
        eps: a small negative number that x is cut off at inside the exponential.
    """

    def __init__(self, *, initial: float = 0.8, beta: float = 0.5, eps: float = -1e-6):
        super().__init__()
        self.initial = initial
        self.beta = beta
        self.eps = eps
        self.alpha_p = nn.Parameter(torch.full((1,), math.log(math.expm1(initial))))
        self.alpha_n = nn.Parameter(torch.full((1,), math.log(math.expm1(initial - beta))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the activation of x, of any shape, in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        above = functional.softplus(self.alpha_p.to(wide.dtype))
        below = self.beta + functional.softplus(self.alpha_n.to(wide.dtype))
        y = torch.where(
            wide > 0,
            above * wide * wide,
            below * (torch.expm1(wide.clamp(max=self.eps)) - wide),
        )
        return (y + self.beta * wide).to(x.dtype)


ACTIVATIONS = {
    "relu": relu,
    "relu_squared": relu_squared,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_bloom": gelu_bloom,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "tanh": tanh,
}
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "clamped_swiglu": "clamped_silu",
}


def multiply_gate(
    activation: str,
    gate: torch.Tensor,
    up: torch.Tensor,
    clamp: tuple[float, float] = (1.702, 7.0),
) -> torch.Tensor:
    """Computes activation(gate) · up, the middle of a gated feed-forward.

    ``clamped_silu`` with ``clamp`` (α, c) is g · sigmoid(α · g) · (u + 1), where g is the gate, at
    most c, and u is ``up`` within ±c (gpt-oss, arXiv 2508.10925, section 2.2).

    Args:
        activation: one of ``ACTIVATIONS``, or clamped_silu.
        gate: of any shape.
        up: of the same shape.
        clamp: of clamped_silu.
    """
    if activation != "clamped_silu":
        return ACTIVATIONS[activation](gate) * up
    slope, limit = clamp
    wide = torch.promote_types(gate.dtype, torch.float32)
    bounded, up = gate.to(wide).clamp(max=limit), up.to(wide).clamp(-limit, limit)
    return (bounded * torch.sigmoid(slope * bounded) * (up + 1)).to(gate.dtype)


class FeedForward(nn.Module):
    """Computes down(activation(up(x))) (arXiv 1706.03762, eq. 2).

    Args:
        d_model: D.
        d_ff: F, default 4·D.
        activation: one of ``ACTIVATIONS``, or xielu, which has parameters of its own: ``xielu``.
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
        self.xielu = XIELU() if activation == "xielu" else None
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        activate = self.xielu or ACTIVATIONS[self.activation]
        hidden = self.hidden_dropout(activate(self.up_proj(x)))
        return self.output_dropout(self.down_proj(hidden))


class GatedFeedForward(nn.Module):
    """Computes down(activation(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202, eq. 6).

    SwiGLU with ``activation="silu"``, GeGLU with ``"gelu"`` or ``"gelu_tanh"``.

    Args:
        d_model: D.
        d_ff: F, default int(8·D / 3), which keeps the parameters of a plain one of 4·D. It is
            used as given: no rounding to a multiple, no factor of 2/3.
        activation: one of ``ACTIVATIONS``, or clamped_silu.
        use_bias: whether the three projections have biases.
        clamp: see ``multiply_gate``.
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
        clamp: tuple[float, float] = (1.702, 7.0),
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__()
        d_ff = int(8 * d_model / 3) if d_ff is None else d_ff
        self.activation = activation
        self.clamp = clamp
        self.gate_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        hidden = multiply_gate(self.activation, self.gate_proj(x), self.up_proj(x), self.clamp)
        return self.output_dropout(self.down_proj(self.hidden_dropout(hidden)))
