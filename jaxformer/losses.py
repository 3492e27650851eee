"""The cross-entropy of logits, in nats."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution import called_losses
from jaxformer.execution.gpu_shapes import log_sum_exp


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of -log softmax(logits)[target] over the targets that ``mask`` keeps.

    In nats per token, in float32 or wider. With no target kept the result is 0, where torch's is
    NaN; torch has ``ignore_index`` in place of the mask. Targets are ids in [0, V), also where the
    mask drops them; others are not noticed.
    """
    losses = token_losses(logits, targets)
    if mask is None:
        return jnp.mean(losses)
    kept = mask.astype(losses.dtype)
    return jnp.sum(losses * kept) / jnp.maximum(jnp.sum(kept), 1)


def token_losses(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
) -> Float[Array, "B T"]:
    """Returns -log softmax(logits)[target] of each token, in nats, in float32 or wider.

    Args:
        logits: of every class.
        targets: ids.
        z_loss: what (log Σ exp(logits))² is multiplied by and added (arXiv 2204.02311, section 5);
            it keeps that sum near 1.
        label_smoothing: ε: the target's share of the true distribution is 1 - ε + ε/V, and that of
            every other class ε/V (arXiv 1512.00567, section 7).
        num_classes: how many of the columns are logits, where others follow; default all.

    Raises:
        ValueError: there is not one target for each row of logits.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets must have the shape of the logits without classes, {logits.shape[:-1]}: got "
            f"{targets.shape}"
        )
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    columns = logits.shape[-1]
    count = columns if num_classes is None else num_classes
    is_class = (jnp.arange(columns) < count).reshape((1,) * targets.ndim + (-1,))
    if count < columns:
        logits = jnp.where(is_class, logits, -jnp.inf)
    if called_losses.fits(logits):
        normalizer, picked = called_losses.normalizers_and_picked(logits, targets)
    else:
        normalizer, picked = log_sum_exp(logits), _pick(logits, targets)
    if label_smoothing:
        mean = jnp.sum(jnp.where(is_class, logits, 0), axis=-1) / count
        picked = (1 - label_smoothing) * picked + label_smoothing * mean
    losses = normalizer - picked
    return losses + z_loss * jnp.square(normalizer) if z_loss else losses


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _pick(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns the logit of each target."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1, mode="clip")[..., 0]


@_pick.defjvp
def _pick_jvp(
    targets: Int[Array, "B T"], primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """A comparison with every class, which fuses with the rest of the gradient.

    JAX's own rule adds to an array of zeros by index, in a pass of its own.
    """
    (logits,), (tangent,) = primals, tangents
    classes = jnp.arange(logits.shape[-1]).reshape((1,) * targets.ndim + (-1,))
    along = jnp.sum(jnp.where(classes == targets[..., None], tangent, 0), axis=-1)
    return _pick(logits, targets), along
