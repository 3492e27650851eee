"""Mixtures of experts: feed-forwards of which a router chooses some for each token."""

import math
from typing import NamedTuple

import torch
from torch import nn

from .feed_forward import ACTIVATIONS, GatedFeedForward
from .layers import Dropout, Linear


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExpertLinear(nn.Module):
    """Computes y = x W_eᵀ + b_e, with ``weight`` W (E, O, I), for the expert e of each row.

    Args:
        num_experts: E.
        in_features: I.
        out_features: O.
        use_bias: whether each expert has a ``bias`` (E, O).
    """

    def __init__(
        self, num_experts: int, in_features: int, out_features: int, *, use_bias: bool = False
    ):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        self.bias = nn.Parameter(torch.empty(num_experts, out_features)) if use_bias else None
        bound = 1 / math.sqrt(in_features)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns each row's (R, I) product with the matrix of its expert (R,), as (R, O)."""
        y = x.new_zeros(x.shape[0], self.weight.shape[1])
        for expert in range(self.weight.shape[0]):
            rows = torch.nonzero(experts == expert)[:, 0]
            bias = None if self.bias is None else self.bias[expert]
            product = nn.functional.linear(x[rows], self.weight[expert], bias)
            y = y.index_copy(0, rows, product)
        return y


class Routing(NamedTuple):
    """What a router chose.

    Attributes:
        experts: (R, C) the C experts of each token, the one with the largest weight first.
        weights: (R, C) what their outputs are multiplied by.
        probabilities: (R, E) of all experts.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    probabilities: torch.Tensor


class Router(nn.Module):
    """Chooses the C experts of largest probability: softmax(x Wᵀ) (arXiv 1701.06538, section 2.1).

    The softmax is over all experts, in float32 or wider. Of equal probabilities the expert of the
    lower index goes first.

    Args:
        d_model: D.
        num_experts: E.
        experts_per_token: C.
        normalize_weights: whether the weights of the chosen add up to 1, as in Mixtral
            (arXiv 2401.04088, section 2.1).
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        experts_per_token: int = 2,
        normalize_weights: bool = True,
    ):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.normalize_weights = normalize_weights
        self.proj = Linear(d_model, num_experts, use_bias=False)

    def forward(self, x: torch.Tensor) -> Routing:
        """Returns the choice for each row (R, D), with weights in float32 or wider."""
        probabilities = torch.softmax(_widen(self.proj(x)), dim=-1)
        # topk leaves open which of two equal ones is first; a stable sort does not.
        weights, experts = torch.sort(probabilities, dim=-1, descending=True, stable=True)
        weights, experts = (found[:, : self.experts_per_token] for found in (weights, experts))
        if self.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(experts, weights, probabilities)


class MixtureOfExperts(nn.Module):
    """Computes Σ_e weight_e · expert_e(x) over the experts that a router chooses for each token.

    Each expert is a gated feed-forward (arXiv 2002.05202, eq. 6). No token is dropped.

    Args:
        d_model: D.
        d_ff: F of each expert.
        num_experts: E.
        experts_per_token: C.
        activation: one of ``ACTIVATIONS``.
        normalize_weights: whether the weights of the chosen experts add up to 1.
        shared_d_ff: the width of one more expert that sees every token (arXiv 2401.06066,
            section 3.2), or None.
        shared_gate: whether its output is multiplied by the sigmoid of a product with x.
        hidden_dropout: rate on the product of gate and up projection.
        output_dropout: rate on the result.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        num_experts: int,
        experts_per_token: int = 2,
        activation: str = "silu",
        normalize_weights: bool = True,
        shared_d_ff: int | None = None,
        shared_gate: bool = False,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__()
        self.activation = activation
        self.router = Router(
            d_model,
            num_experts,
            experts_per_token=experts_per_token,
            normalize_weights=normalize_weights,
        )
        self.gate_proj = ExpertLinear(num_experts, d_model, d_ff)
        self.up_proj = ExpertLinear(num_experts, d_model, d_ff)
        self.down_proj = ExpertLinear(num_experts, d_ff, d_model)
        self.shared_expert = (
            None
            if shared_d_ff is None
            else GatedFeedForward(d_model, shared_d_ff, activation=activation)
        )
        has_gate = shared_gate and shared_d_ff is not None
        self.shared_expert_gate = Linear(d_model, 1, use_bias=False) if has_gate else None
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows)
        count = routing.experts.shape[1]
        experts = routing.experts.reshape(-1)
        repeated = rows.repeat_interleave(count, 0)
        hidden = ACTIVATIONS[self.activation](self.gate_proj(repeated, experts))
        hidden = self.hidden_dropout(hidden * self.up_proj(repeated, experts))
        outputs = self.down_proj(hidden, experts).reshape(-1, count, x.shape[-1])
        y = (_widen(outputs) * routing.weights[..., None]).sum(1).to(x.dtype).reshape(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                gate = torch.sigmoid(_widen(self.shared_expert_gate(x)))
                shared = (_widen(shared) * gate).to(x.dtype)
            y = y + shared
        return self.output_dropout(y)
