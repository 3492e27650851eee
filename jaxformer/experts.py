"""Mixtures of experts: feed-forwards of which a router chooses some for each token."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.execution.grouped_products import grouped_product
from jaxformer.feed_forward import ACTIVATIONS, GatedFeedForward
from jaxformer.initializers import torch_linear
from jaxformer.layers import Dropout, Linear, widen


class ExpertLinear(nnx.Module):
    """Computes y = x W_e + b_e, with ``kernel`` W (E, I, O), for the expert e of each row.

    Args:
        num_experts: E.
        in_features: I.
        out_features: O.
        use_bias: whether each expert has a ``bias`` (E, O).
        rngs: where the initial weights come from.
    """

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

    def __call__(self, x: Float[Array, "R I"], experts: Int[Array, "R"]) -> Float[Array, "R O"]:
        """Returns each row's product with its expert's matrix, in the dtype of x and kernel."""
        y = grouped_product(x, self.kernel[...], experts)
        if self.bias is not None:
            y = (widen(y) + widen(self.bias[...])[experts]).astype(y.dtype)
        return y


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
    """Chooses the C experts of largest probability: softmax(x W) (arXiv 1701.06538, section 2.1).

    The softmax is over all experts, in float32 or wider. Of equal probabilities the expert of the
    lower index goes first.

    Args:
        d_model: D.
        num_experts: E.
        experts_per_token: C.
        normalize_weights: whether the weights of the chosen add up to 1, as in Mixtral
            (arXiv 2401.04088, section 2.1).
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        *,
        experts_per_token: int = 2,
        normalize_weights: bool = True,
        rngs: nnx.Rngs,
    ):
        self.experts_per_token = experts_per_token
        self.normalize_weights = normalize_weights
        self.proj = Linear(d_model, num_experts, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "R D"]) -> Routing:
        """Returns the choice for each row, with weights in float32 or wider."""
        probabilities = jax.nn.softmax(widen(self.proj(x)), axis=-1)
        weights, experts = jax.lax.top_k(probabilities, self.experts_per_token)
        if self.normalize_weights:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return Routing(experts, weights, probabilities)


class MixtureOfExperts(nnx.Module):
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
        normalize_weights: bool = True,
        shared_d_ff: int | None = None,
        shared_gate: bool = False,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.router = Router(
            d_model,
            num_experts,
            experts_per_token=experts_per_token,
            normalize_weights=normalize_weights,
            rngs=rngs,
        )
        self.gate_proj = ExpertLinear(num_experts, d_model, d_ff, rngs=rngs)
        self.up_proj = ExpertLinear(num_experts, d_model, d_ff, rngs=rngs)
        self.down_proj = ExpertLinear(num_experts, d_ff, d_model, rngs=rngs)
        self.shared_expert = (
            None
            if shared_d_ff is None
            else GatedFeedForward(d_model, shared_d_ff, activation=activation, rngs=rngs)
        )
        has_gate = shared_gate and shared_d_ff is not None
        self.shared_expert_gate = (
            Linear(d_model, 1, use_bias=False, rngs=rngs) if has_gate else None
        )
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        rows_RD = jnp.reshape(x, (-1, x.shape[-1]))
        routing = self.router(rows_RD)
        count = routing.experts.shape[1]
        experts = jnp.reshape(routing.experts, -1)
        repeated = jnp.repeat(rows_RD, count, axis=0)
        hidden = ACTIVATIONS[self.activation](self.gate_proj(repeated, experts))
        hidden = self.hidden_dropout(hidden * self.up_proj(repeated, experts))
        outputs = jnp.reshape(self.down_proj(hidden, experts), (-1, count, x.shape[-1]))
        y = jnp.sum(widen(outputs) * routing.weights[..., None], axis=1).astype(x.dtype)
        y = jnp.reshape(y, x.shape)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                gate = jax.nn.sigmoid(widen(self.shared_expert_gate(x)))
                shared = (widen(shared) * gate).astype(x.dtype)
            y = y + shared
        return self.output_dropout(y)
