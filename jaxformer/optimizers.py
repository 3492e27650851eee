"""AdamW with the clipping, decay groups and schedule that PyTorch's training loops use."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jaxformer.config import OptimizerConfig
from jaxformer.parameters import Parameters


def learning_rate(config: OptimizerConfig, step: Int[Array, ""] | int) -> Float[Array, ""]:
    """Returns the rate of a step: linear warm-up, then ``schedule``.

    At step s (from 0) of ``warmup_steps`` W the rate is learning_rate · (s + 1) / (W + 1); from W
    on it falls to ``min_learning_rate`` at ``decay_steps``: along half a cosine (arXiv 1608.03983,
    eq. 5), along a line, or along a line over the last ``decay_share`` of these steps (wsd, arXiv
    2405.18392, section 3). With ``decay_steps`` None, or constant, it stays.
    """
    # An int32 step times a Python float is float32 even where float64 is on.
    step = jnp.asarray(step, jnp.result_type(float))
    warm = config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.decay_steps is None or config.schedule == "constant":
        after = jnp.full_like(warm, config.learning_rate)
    else:
        span = max(config.decay_steps - config.warmup_steps, 1)
        share = jnp.clip((step - config.warmup_steps) / span, 0, 1)
        if config.schedule == "cosine":
            height = 0.5 * (1 + jnp.cos(jnp.pi * share))
        elif config.schedule == "linear":
            height = 1 - share
        else:
            height = jnp.minimum((1 - share) / config.decay_share, 1)
        after = config.min_learning_rate + height * (
            config.learning_rate - config.min_learning_rate
        )
    return jnp.where(step < config.warmup_steps, warm, after)


def decay_mask(parameters: Parameters) -> dict[str, bool]:
    """Returns which parameters decay: those of two or more dimensions, but for norms."""
    return {
        # A norm's scale has two dimensions where it has a row a head.
        name: value.ndim >= 2 and name.rpartition(".")[2] not in ("scale", "bias")
        for name, value in parameters.items()
    }


def global_norm(gradients: Parameters) -> Float[Array, ""]:
    """Returns sqrt(Σ g²) over every element of every gradient."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradients)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients by min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_``.

    optax's own of this name leaves out the 1e-6, which a float64 trajectory shows.
    """

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        scale = jnp.minimum(1, max_norm / (global_norm(gradients) + 1e-6))
        return jax.tree.map(lambda g: g * scale, gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns clipping, then AdamW that decays matrices only (arXiv 1711.05101, algorithm 2)."""
    adamw = optax.adamw(
        lambda count: learning_rate(config, count),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(clip_by_global_norm(config.clip_norm), adamw)
