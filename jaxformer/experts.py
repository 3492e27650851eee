"""Mixtures of experts: feed-forwards of which a router chooses some for each token."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution import few_rows
from jaxformer.execution.all_reduce import mean_over
from jaxformer.execution.grouped_feed_forward import Kernels, grouped_feed_forward
from jaxformer.execution.grouped_products import (
    first_rows,
    grouped_product,
    rows_as_before,
    rows_in_order,
    sort_by_group,
)
from jaxformer.execution.separate_experts import separate_feed_forward
from jaxformer.execution.sharding import share_experts
from jaxformer.feed_forward import GatedFeedForward, multiply_gate
from jaxformer.initializers import torch_linear
from jaxformer.layers import Dropout, Linear, widen

# What an expert consists of.
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class ExpertWeights(nnx.Module):
    """Holds ``kernel`` W (E, I, O) and ``bias`` b (E, O), which its owner reads.

    Args:
        num_experts: E.
        in_features: I.
        out_features: O.
        use_bias: whether each expert has a bias.
        rngs: where the initial weights come from.

    In programs that make tokens ``uses_custom_call`` may be set, or ``separate`` hold the kernel of
    each expert as an array of its own; see ``prepare_few_rows``.
    """

    uses_custom_call = False
    separate: tuple[Array, ...] | None = None

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        rngs: nnx.Rngs,
    ):
        kernel_init, bias_init = torch_linear(in_features)
        self.kernel = nnx.Param(
            kernel_init(rngs.params(), (num_experts, in_features, out_features))
        )
        self.bias = (
            nnx.Param(bias_init(rngs.params(), (num_experts, out_features))) if use_bias else None
        )

    def add_bias(self, y: Float[Array, "R O"], experts: Int[Array, "R"]) -> Float[Array, "R O"]:
        """Returns ``y`` with the bias of each row's expert; a row of expert E gets none."""
        if self.bias is None:
            return y
        bias = widen(self.bias[...]).at[experts].get(mode="fill", fill_value=0)
        return (widen(y) + bias).astype(y.dtype)


class ExpertLinear(ExpertWeights):
    """Computes y = x W_e + b_e for the expert e of each row; see ``ExpertWeights``."""

    def __call__(self, x: Float[Array, "R I"], experts: Int[Array, "R"]) -> Float[Array, "R O"]:
        """Returns each row's product with its expert's matrix, in the dtype of x and kernel.

        Args:
            x: the rows.
            experts: of each row.
        """
        order = sort_by_group(experts[:, None])
        y = grouped_product(rows_in_order(x, order), self.kernel[...], order.groups)
        return rows_as_before(self.add_bias(y, order.groups), order)[:, 0]


class Routing(NamedTuple):
    """What a router chose.

    Attributes:
        experts: the C experts of each token, the one with the largest weight first.
        weights: what their outputs are multiplied by.
        probabilities: of all experts.
    """

    experts: Int[Array, "R C"]
    weights: Float[Array, "R C"]
    probabilities: Float[Array, "R E"]


class Router(nnx.Module):
    """Chooses the C experts of largest score for each token (arXiv 1701.06538, section 2.1).

    Scores of x W + b are made in float32 or wider, by ``kind``:

    - ``softmax``: over all experts (Mixtral, arXiv 2401.04088).
    - ``softmax_of_chosen``: x W + b chooses, and the weights are a softmax over the chosen
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
        rngs: where the initial weights come from.
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
        rngs: nnx.Rngs,
    ):
        self.experts_per_token = experts_per_token
        self.kind = kind
        self.normalize_weights = normalize_weights
        self.weight_scale = weight_scale
        self.groups = groups
        self.groups_per_token = groups_per_token
        self.proj = Linear(d_model, num_experts, use_bias=use_bias, rngs=rngs)
        self.choice_bias = nnx.Param(jnp.zeros((num_experts,))) if choice_bias else None

    def __call__(self, x: Float[Array, "R D"]) -> Routing:
        """Returns the choice for each row, with weights in float32 or wider."""
        if self.kind == "sigmoid":
            logits = _wide_product(self.proj, x)
            scores = jax.nn.sigmoid(logits)
            probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True)
        else:
            logits = widen(self.proj(x))
            scores = probabilities = jax.nn.softmax(logits, axis=-1)
        by_logits = self.kind == "softmax_of_chosen"
        choice = self._within_groups(self._for_choice(logits if by_logits else scores))
        _, experts = jax.lax.top_k(choice, self.experts_per_token)
        chosen = jnp.take_along_axis(logits if by_logits else scores, experts, axis=-1)
        if by_logits:
            weights = jax.nn.softmax(chosen, axis=-1)
        elif self.normalize_weights:
            # As DeepSeek-V3's code; beside the sum of a softmax the small number vanishes.
            weights = chosen / (jnp.sum(chosen, axis=-1, keepdims=True) + 1e-20)
        else:
            weights = chosen
        return Routing(experts, weights * self.weight_scale, probabilities)

    def _for_choice(self, scores: Float[Array, "R E"]) -> Float[Array, "R E"]:
        """Scores with the numbers that count for the choice alone."""
        scores = jax.lax.stop_gradient(scores)
        if self.choice_bias is None:
            return scores
        return scores + jax.lax.stop_gradient(widen(self.choice_bias[...]))[None, :]

    def _within_groups(self, scores: Float[Array, "R E"]) -> Float[Array, "R E"]:
        """Scores, with -inf in place of those in groups that are not chosen."""
        if self.groups_per_token == self.groups:
            return scores
        by_group = jnp.reshape(scores, (scores.shape[0], self.groups, -1))
        of_group = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        _, groups = jax.lax.top_k(of_group, self.groups_per_token)
        is_chosen = jnp.any(groups[:, :, None] == jnp.arange(self.groups)[None, None, :], axis=1)
        return jnp.reshape(jnp.where(is_chosen[:, :, None], by_group, -jnp.inf), scores.shape)


def _wide_product(proj: Linear, x: Float[Array, "R D"]) -> Float[Array, "R E"]:
    """The projection of x, computed in float32 or wider."""
    logits = widen(x) @ widen(proj.kernel[...])
    return logits if proj.bias is None else logits + widen(proj.bias[...])[None, :]


@dataclasses.dataclass(frozen=True)
class _Activation:
    """From the products of gate and up projections to the hidden activations of an expert.

    Attributes:
        name: see ``multiply_gate``, ``activation``.
        clamp: see there.
        dropout: the rate of hidden dropout.
    """

    name: str
    clamp: tuple[float, float]
    dropout: float

    def __call__(
        self,
        gate: Float[Array, "S F"],
        up: Float[Array, "S F"],
        biases: Sequence[Float[Array, "F"] | None],
        keep: Bool[Array, "S F"] | None,
    ) -> Float[Array, "S F"]:
        """Returns the hidden activations, in the dtype of the products."""
        gate, up = (
            y if bias is None else (widen(y) + bias[None, :]).astype(y.dtype)
            for y, bias in zip((gate, up), biases, strict=True)
        )
        hidden = multiply_gate(self.name, gate, up, self.clamp)
        return hidden if keep is None else Dropout(self.dropout).drop(hidden, keep)


class MixtureOfExperts(nnx.Module):
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
        rngs: where the initial weights come from.
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
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.clamp = clamp
        self.router = Router(
            d_model,
            num_experts,
            experts_per_token=experts_per_token,
            rngs=rngs,
            **(router or {}),
        )
        self.gate_proj = ExpertWeights(num_experts, d_model, d_ff, use_bias=use_bias, rngs=rngs)
        self.up_proj = ExpertWeights(num_experts, d_model, d_ff, use_bias=use_bias, rngs=rngs)
        self.down_proj = ExpertWeights(num_experts, d_ff, d_model, use_bias=use_bias, rngs=rngs)
        self.shared_expert = (
            None
            if shared_d_ff is None
            else GatedFeedForward(
                d_model,
                shared_d_ff,
                activation=activation,
                use_bias=use_bias,
                clamp=clamp,
                rngs=rngs,
            )
        )
        has_gate = shared_gate and shared_d_ff is not None
        self.shared_expert_gate = (
            Linear(d_model, 1, use_bias=False, rngs=rngs) if has_gate else None
        )
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def __call__(
        self, x: Float[Array, "B T D"], *, return_routing: bool = False
    ) -> Float[Array, "B T D"] | tuple[Float[Array, "B T D"], Routing]:
        """Returns the branch's output, in the dtype of x, and what its router chose if wanted."""
        rows_RD = jnp.reshape(x, (-1, x.shape[-1]))
        routing = self.router(rows_RD)
        projections = {name: getattr(self, name) for name in PROJECTIONS}
        # Drawn for all rows at once, as a mask depends on its place in the batch.
        keep = self.hidden_dropout.keep((routing.experts.size, self.up_proj.kernel.shape[-1]))
        mix = share_experts(self._mix)
        y = mix(projections, rows_RD, routing.experts, routing.weights, keep)
        y = jnp.reshape(y.astype(x.dtype), x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                gate = jax.nn.sigmoid(widen(self.shared_expert_gate(x)))
                shared = (widen(shared) * gate).astype(x.dtype)
            y = y + shared
        y = self.output_dropout(y)
        return (y, routing) if return_routing else y

    def _mix(
        self,
        projections: Mapping[str, ExpertWeights],
        rows: Float[Array, "R D"],
        experts: Int[Array, "R C"],
        weights: Float[Array, "R C"],
        keep: Bool[Array, "RC F"] | None,
    ) -> Float[Array, "R D"]:
        """Returns Σ_e weight_e · expert_e(x) of each row, in float32 or wider.

        A row of expert E is of none of these: its expert is on another device.
        """
        each = [projections[name] for name in PROJECTIONS]
        *first_two, down_proj = each
        order = sort_by_group(experts)
        x = rows_in_order(rows, order)
        biases = [None if proj.bias is None else widen(proj.bias[...]) for proj in first_two]
        activate = _Activation(self.activation, self.clamp, self.hidden_dropout.rate)
        separate = [proj.separate for proj in each if proj.separate is not None]
        uses_custom_call = all(proj.uses_custom_call for proj in each) and few_rows.fits_call(rows)
        if uses_custom_call and keep is None:
            first = first_rows(order.groups, len(down_proj.kernel))
            hidden = [few_rows.call_grouped_product(x, p.kernel[...], first) for p in first_two]
            gate, up = (p.add_bias(y, order.groups) for p, y in zip(first_two, hidden, strict=True))
            hidden_RF = activate(gate, up, (None, None), None)
            y = few_rows.call_grouped_product(hidden_RF, down_proj.kernel[...], first)
        elif len(separate) == len(each) and keep is None:
            kernels = [Kernels(*own) for own in zip(*separate, strict=True)]
            y = separate_feed_forward(x, kernels, biases, order.groups, len(rows), activate)
        else:
            y = grouped_feed_forward(
                x,
                Kernels(*(proj.kernel[...] for proj in each)),
                biases,
                None if keep is None else jnp.take(keep, order.order, axis=0),
                order.groups,
                activate,
            )
        y = down_proj.add_bias(y, order.groups)
        outputs = rows_as_before(y, order)
        return jnp.sum(widen(outputs) * weights[..., None], axis=1)


def balance_loss(routings: Sequence[Routing], *, axis_name: str | None = None) -> Float[Array, ""]:
    """Returns E · Σ_e f_e · P_e, which is least where all experts are used alike.

    f_e is the share of tokens that expert e computes, and P_e its mean probability (Switch
    Transformer, arXiv 2101.03961, eq. 4 to 6), both over the tokens of all layers together, as in
    Mixtral's code. With C experts a token the least value is C. f has no gradient.

    Args:
        routings: of the layers that have experts, one or more.
        axis_name: of the pmap axis over which f is averaged; the mean of the results is then the
            loss of all tokens.
    """
    experts = jnp.concatenate([jnp.reshape(each.experts, -1) for each in routings])
    probabilities = jnp.concatenate([each.probabilities for each in routings])
    rows, count = probabilities.shape
    used = jnp.zeros(count, probabilities.dtype).at[experts].add(1) / rows
    if axis_name is not None:
        used = mean_over(used, axis_name)
    return count * jnp.sum(used * jnp.mean(probabilities, axis=0))
