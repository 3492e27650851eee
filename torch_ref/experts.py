"""Mixtures of experts: feed-forwards of which a router chooses some for each token."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from .feed_forward import GatedFeedForward, multiply_gate
from .layers import Dropout, Linear


def _widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExpertWeights(nn.Module):
    """Holds ``weight`` W (E, O, I) and ``bias`` b (E, O), which its owner reads.

    Args:
        num_experts: E.
        in_features: I.
        out_features: O.
        use_bias: whether each expert has a bias.
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

    def multiply_sorted(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns x W_eᵀ + b_e for the expert e of each row; ``experts`` are ascending."""
        counts = torch.bincount(experts, minlength=self.weight.shape[0]).tolist()
        products = [
            nn.functional.linear(rows, self.weight[e], None if self.bias is None else self.bias[e])
            for e, rows in enumerate(torch.split(x, counts))
        ]
        return torch.cat(products)


class ExpertLinear(ExpertWeights):
    """Computes y = x W_eᵀ + b_e for the expert e of each row; see ``ExpertWeights``."""

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Returns each row's product with the matrix of its expert, (R, O).

        Args:
            x: (R, I) the rows.
            experts: (R,) of each row.
        """
        experts, order = torch.sort(experts, stable=True)
        return self.multiply_sorted(x[order], experts)[torch.argsort(order)]


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
    """Chooses the C experts of largest score for each token (arXiv 1701.06538, section 2.1).

    Scores of x Wᵀ + b are made in float32 or wider, by ``kind``:

    - ``softmax``: over all experts (Mixtral, arXiv 2401.04088).
    - ``softmax_of_chosen``: x Wᵀ + b chooses, and the weights are a softmax over the chosen
      (gpt-oss, arXiv 2508.10925).
    - ``sigmoid``: of each expert by itself (DeepSeek-V3, arXiv 2412.19437, eq. 12 to 16).

    Where experts are in groups, those of the groups whose two largest scores have the largest sum
    are left to choose from. Of equal scores the expert, or group, of the lower index goes first.

    Args:
        d_model: D.
        num_experts: E.
        experts_per_token: C.
        kind: of the scores.
        normalize_weights: whether the weights of the chosen add up to 1, as in Mixtral.
        weight_scale: what weights are multiplied by at last.
        use_bias: whether the projection has a bias.
        choice_bias: whether scores get a number of each expert, ``choice_bias`` (E,), for the
            choice alone. It has no gradient.
        groups: how many groups the experts are in.
        groups_per_token: how many groups the C experts are chosen from.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        experts_per_token: int = 2,
        kind: str = "softmax",
        normalize_weights: bool = True,
        weight_scale: float = 1.0,
        use_bias: bool = False,
        choice_bias: bool = False,
        groups: int = 1,
        groups_per_token: int = 1,
    ):
        super().__init__()
        self.experts_per_token = experts_per_token
        self.kind = kind
        self.normalize_weights = normalize_weights
        self.weight_scale = weight_scale
        self.groups = groups
        self.groups_per_token = groups_per_token
        self.proj = Linear(d_model, num_experts, use_bias=use_bias)
        self.choice_bias = nn.Parameter(torch.zeros(num_experts)) if choice_bias else None

    def forward(self, x: torch.Tensor) -> Routing:
        """Returns the choice for each row (R, D), with weights in float32 or wider."""
        if self.kind == "sigmoid":
            logits = _wide_product(self.proj, x)
            scores = torch.sigmoid(logits)
            probabilities = scores / scores.sum(-1, keepdim=True)
        else:
            logits = _widen(self.proj(x))
            scores = probabilities = torch.softmax(logits, dim=-1)
        by_logits = self.kind == "softmax_of_chosen"
        choice = self._within_groups(self._for_choice(logits if by_logits else scores))
        experts = _largest(choice, self.experts_per_token)[1]
        chosen = (logits if by_logits else scores).gather(-1, experts)
        if by_logits:
            weights = torch.softmax(chosen, dim=-1)
        elif self.normalize_weights:
            # As DeepSeek-V3's code; beside the sum of a softmax the small number vanishes.
            weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
        else:
            weights = chosen
        return Routing(experts, weights * self.weight_scale, probabilities)

    def _for_choice(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores with the numbers that count for the choice alone."""
        scores = scores.detach()
        return scores if self.choice_bias is None else scores + self.choice_bias.detach()

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores, with -inf in place of those in groups that are not chosen."""
        if self.groups_per_token == self.groups:
            return scores
        by_group = scores.reshape(scores.shape[0], self.groups, -1)
        of_group = _largest(by_group, 2)[0].sum(-1)
        groups = _largest(of_group, self.groups_per_token)[1]
        is_chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter(-1, groups, True)
        return by_group.masked_fill(~is_chosen[..., None], -torch.inf).reshape(scores.shape)


def _largest(x: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest numbers of the last axis and their places, the lower of equal ones first."""
    # topk leaves open which of two equal ones is first; a stable sort does not.
    values, places = torch.sort(x, dim=-1, descending=True, stable=True)
    return values[..., :count], places[..., :count]


def _wide_product(proj: Linear, x: torch.Tensor) -> torch.Tensor:
    """The projection of x, computed in float32 or wider."""
    bias = None if proj.bias is None else _widen(proj.bias)
    return nn.functional.linear(_widen(x), _widen(proj.weight), bias)


class MixtureOfExperts(nn.Module):
    """Computes Σ_e weight_e · expert_e(x) over the experts that a router chooses for each token.

    Each expert is a gated feed-forward (arXiv 2002.05202, eq. 6). No token is dropped.

    Args:
        d_model: D.
        d_ff: F of each expert.
        num_experts: E.
        experts_per_token: C.
        activation: see ``multiply_gate``.
        use_bias: whether the projections of experts have biases.
        clamp: see ``multiply_gate``.
        router: the settings of its ``Router``.
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
        use_bias: bool = False,
        clamp: tuple[float, float] = (1.702, 7.0),
        router: Mapping[str, Any] | None = None,
        shared_d_ff: int | None = None,
        shared_gate: bool = False,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
    ):
        super().__init__()
        self.activation = activation
        self.clamp = clamp
        self.router = Router(
            d_model, num_experts, experts_per_token=experts_per_token, **(router or {})
        )
        self.gate_proj = ExpertWeights(num_experts, d_model, d_ff, use_bias=use_bias)
        self.up_proj = ExpertWeights(num_experts, d_model, d_ff, use_bias=use_bias)
        self.down_proj = ExpertWeights(num_experts, d_ff, d_model, use_bias=use_bias)
        self.shared_expert = (
            None
            if shared_d_ff is None
            else GatedFeedForward(
                d_model, shared_d_ff, activation=activation, use_bias=use_bias, clamp=clamp
            )
        )
        has_gate = shared_gate and shared_d_ff is not None
        self.shared_expert_gate = Linear(d_model, 1, use_bias=False) if has_gate else None
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def forward(
        self, x: torch.Tensor, *, return_routing: bool = False
    ) -> torch.Tensor | tuple[torch.Tensor, Routing]:
        """Returns the branch's output (B, T, D), and what its router chose if wanted."""
        rows = x.reshape(-1, x.shape[-1])
        routing = self.router(rows)
        count = routing.experts.shape[1]
        experts, order = torch.sort(routing.experts.reshape(-1), stable=True)
        places = torch.argsort(order)
        sorted_rows = rows[order // count]
        gate, up = (
            proj.multiply_sorted(sorted_rows, experts) for proj in (self.gate_proj, self.up_proj)
        )
        hidden = multiply_gate(self.activation, gate, up, self.clamp)
        if self.training and self.hidden_dropout.rate:
            # A mask depends on a token's place in the batch.
            hidden = self.hidden_dropout(hidden[places])[order]
        y = self.down_proj.multiply_sorted(hidden, experts)
        outputs = y[places].reshape(-1, count, x.shape[-1])
        y = (_widen(outputs) * routing.weights[..., None]).sum(1).to(x.dtype).reshape(x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                gate = torch.sigmoid(_widen(self.shared_expert_gate(x)))
                shared = (_widen(shared) * gate).to(x.dtype)
            y = y + shared
        y = self.output_dropout(y)
        return (y, routing) if return_routing else y


def balance_loss(routings: Sequence[Routing]) -> torch.Tensor:
    """Returns E · Σ_e f_e · P_e, which is least where all experts are used alike.

    f_e is the share of tokens that expert e computes, and P_e its mean probability (Switch
    Transformer, arXiv 2101.03961, eq. 4 to 6), both over the tokens of all layers together, as in
    Mixtral's code. With C experts a token the least value is C. f has no gradient.

    Args:
        routings: of the layers that have experts, one or more.
    """
    experts = torch.cat([each.experts.reshape(-1) for each in routings])
    probabilities = torch.cat([each.probabilities for each in routings])
    rows, count = probabilities.shape
    used = torch.bincount(experts, minlength=count).to(probabilities.dtype) / rows
    return count * torch.sum(used * probabilities.mean(0))
