"""Optimizers with the clipping, decay groups and schedule that PyTorch's training loops use.

Their formulas are optax's. Each has a setting's name in ``config_optimizers.OPTIMIZERS``.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.config import OptimizerConfig
from jaxformer.execution import called_updates
from jaxformer.execution.gpu_shapes import total
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
    """Returns which parameters decay: those of two or more dimensions, but norms and biases."""
    return {
        # A norm's scale has two dimensions where it has a row a head, and a bias where it has a row
        # an expert. What Muon updates has none where AdamW updates the rest.
        name: getattr(value, "ndim", 0) >= 2 and name.rpartition(".")[2] not in ("scale", "bias")
        for name, value in parameters.items()
    }


def hidden_matrices(parameters: Parameters) -> dict[str, bool]:
    """Returns which parameters Muon updates: the kernels of the linear layers inside blocks.

    Embeddings, heads, norms and biases are not among them (Jordan et al., "Muon: An optimizer for
    hidden layers in neural networks", kellerjordan.github.io/posts/muon, 2024).
    """
    return {
        name: name.endswith(".kernel") and "blocks" in name.split(".") and value.ndim == 2
        for name, value in parameters.items()
    }


def global_norm(gradients: Parameters) -> Float[Array, ""]:
    """Returns sqrt(Σ g²) over every element of every gradient."""
    if called_updates.fits(gradients):
        return jnp.sqrt(called_updates.sum_squares(gradients))
    return jnp.sqrt(total([jnp.square(g) for g in jax.tree.leaves(gradients)]))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Scales gradients by min(1, max_norm / (norm + 1e-6)), as ``torch.nn.utils.clip_grad_norm_``.

    optax's own of this name leaves out the 1e-6, which a float64 trajectory shows.
    """

    def update(
        gradients: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        scale = _clipping_scale(max_norm, global_norm(gradients))
        return jax.tree.map(lambda g: g * scale, gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _clipping_scale(max_norm: float, norm: Float[Array, ""]) -> Float[Array, ""]:
    return jnp.minimum(1, max_norm / (norm + 1e-6))


class _MuonState(NamedTuple):
    """The state of ``_scale_by_muon``: how many updates were made, and the momentum."""

    count: Int[Array, ""]  # type: ignore[assignment]
    mu: optax.Updates


def orthogonalize(x: Float[Array, "I O"], eps: float) -> Float[Array, "I O"]:
    """Returns about U Vᵀ of x = U S Vᵀ: five Newton-Schulz steps, whose factors are Jordan's.

    The singular values of the result lie between 0.7 and 1.2, but for those that were tiny. The
    steps are computed in the dtype of x, where ``torch.optim.Muon`` rounds to bfloat16.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / (jnp.linalg.norm(x) + eps)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x.T if is_tall else x


def _scale_by_muon(momentum: float, eps: float) -> optax.GradientTransformation:
    """Makes orthogonal matrices of gradients with Nesterov momentum (Jordan et al., 2024).

    As ``optax.contrib.muon(consistent_rms=0.2)``: both parts of the momentum are corrected for
    their beginning at zero, which ``torch.optim.Muon`` does not do, and the result is scaled by
    0.2 · sqrt(max(I, O)), so that learning rate and decay of AdamW serve (arXiv 2502.16982, eq. 4).
    """

    def update(
        gradients: optax.Updates, state: _MuonState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, _MuonState]:
        count = optax.safe_increment(state.count)
        mu = jax.tree.map(lambda g, m: (1 - momentum) * g + momentum * m, gradients, state.mu)
        steps = jnp.asarray(count, jnp.result_type(float))
        of_mu = momentum / (1 - momentum ** (steps + 1))
        of_gradient = (1 - momentum) / (1 - momentum**steps)

        def direction(g: Array, m: Array) -> Array:
            ahead = (of_mu * m + of_gradient * g).astype(g.dtype)
            return 0.2 * max(g.shape) ** 0.5 * orthogonalize(ahead, eps)

        return jax.tree.map(direction, gradients, mu), _MuonState(count, mu)

    return optax.GradientTransformation(
        lambda params: _MuonState(jnp.int32(0), jax.tree.map(jnp.zeros_like, params)), update
    )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Returns clipping, the optimizer that the settings name, and the average of the weights.

    Matrices alone decay.

    - adamw: arXiv 1711.05101, algorithm 2.
    - muon: ``_scale_by_muon`` for ``hidden_matrices``, AdamW for all else, at one learning rate.
    - lion: arXiv 2302.06675, algorithm 2.
    - adafactor: arXiv 1804.04235, algorithms 4 and 5, without momentum and with the schedule's
      rate relative to each parameter's size; only matrices whose two dimensions are 128 or more
      are factored, as in optax. Decay is multiplied by the learning rate, which optax's is not.
    - sgd: with momentum, and with decay that is added to the gradient: ``torch.optim.SGD``.

    Raises:
        ValueError: the settings are none of an optimizer.
    """
    if not isinstance(config, OptimizerConfig):
        raise ValueError(f"config must be an OptimizerConfig: got {type(config).__name__}")
    parts = [_UPDATES[config.optimizer](config)]
    if config.clip_norm is not None:
        parts.insert(0, clip_by_global_norm(config.clip_norm))
    if config.ema is not None:
        parts.append(_average_weights(config.ema))
    return parts[0] if len(parts) == 1 else optax.chain(*parts)


class _AverageState(NamedTuple):
    """The state of ``_average_weights``."""

    ema: optax.Params


def _average_weights(decay: float) -> optax.GradientTransformation:
    """Keeps decay · average + (1 - decay) · weights after each update; begins with the first."""

    def update(
        updates: optax.Updates, state: _AverageState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, _AverageState]:
        weights = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, w: decay * a + (1 - decay) * w, state.ema, weights)
        return updates, _AverageState(average)

    # Copies: a state whose arrays stand in two places cannot be donated.
    return optax.GradientTransformation(
        lambda params: _AverageState(jax.tree.map(lambda p: jnp.array(p, copy=True), params)),
        update,
    )


def _rate(config: OptimizerConfig) -> optax.Schedule:
    return lambda count: learning_rate(config, count)


def _adamw(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.adamw(
        _rate(config),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    muon = optax.chain(
        _scale_by_muon(config.momentum_rate, config.eps),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(_rate(config)),
    )

    def choose(parameters: Parameters) -> dict[str, str]:
        hidden = hidden_matrices(parameters)
        return {name: "hidden" if hidden[name] else "rest" for name in parameters}

    return optax.partition({"hidden": muon, "rest": _adamw(config)}, choose)


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.lion(
        _rate(config),
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    def decay_rate(step: Int[Array, ""], exponent: float) -> Float[Array, ""]:
        # optax's own is float32 even where float64 is on.
        return 1 - jnp.asarray(step + 1, jnp.result_type(float)) ** -exponent

    return optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=decay_rate),
        optax.clip_by_block_rms(1.0),
        optax.scale_by_param_block_rms(),
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.scale_by_learning_rate(_rate(config)),
    )


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.chain(
        optax.add_decayed_weights(config.weight_decay, decay_mask),
        optax.trace(config.momentum_rate),
        optax.scale_by_learning_rate(_rate(config)),
    )


_UPDATES = {"adamw": _adamw, "muon": _muon, "lion": _lion, "adafactor": _adafactor, "sgd": _sgd}


def update_parameters(
    config: OptimizerConfig,
    parameters: Parameters,
    gradients: Parameters,
    state: optax.OptState,
    *,
    norm: Float[Array, ""],
    is_wanted: Bool[Array, ""] | None = None,
) -> tuple[Parameters, optax.OptState]:
    """Returns parameters and the optimizer's state after one update.

    Args:
        config: the optimizer's settings.
        parameters: those that are trained, by path.
        gradients: of the same paths.
        state: of ``make_optimizer``.
        norm: ``global_norm`` of the gradients.
        is_wanted: where it is False, all stays as it was; None is True.
    """
    if config.optimizer == "adamw" and config.ema is None and called_updates.fits(parameters):
        return _update_by_call(config, parameters, gradients, state, norm, is_wanted)
    updates, changed_state = make_optimizer(config).update(gradients, state, parameters)
    changed: Any = optax.apply_updates(parameters, updates), changed_state
    if is_wanted is not None:
        # A choice element by element fuses with the update; ``lax.cond`` copies the state.
        changed = jax.tree.map(
            functools.partial(jnp.where, is_wanted), changed, (parameters, state)
        )
    return changed


def _update_by_call(
    config: OptimizerConfig,
    parameters: Parameters,
    gradients: Parameters,
    state: optax.OptState,
    norm: Array,
    is_wanted: Array | None,
) -> tuple[Parameters, optax.OptState]:
    """Does what ``_adamw`` does of clipped gradients, by one custom call."""
    moments = called_updates.Moments(*(optax.tree_utils.tree_get(state, n) for n in ("mu", "nu")))
    # There is one of the moments and one of the schedule, which are the same.
    count = optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]
    is_wanted = jnp.bool_(True) if is_wanted is None else is_wanted
    scale = jnp.float32(1) if config.clip_norm is None else _clipping_scale(config.clip_norm, norm)
    decays = {name: config.weight_decay * does for name, does in decay_mask(parameters).items()}
    changed, moments = called_updates.adamw(
        parameters,
        gradients,
        moments,
        decays=decays,
        changing=(scale, learning_rate(config, count), count + 1),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        is_wanted=is_wanted,
    )
    count = jnp.where(is_wanted, optax.safe_increment(count), count)
    state = optax.tree_utils.tree_set(state, mu=moments.mu, nu=moments.nu, count=count)
    return changed, state
