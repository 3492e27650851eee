"""The cross-entropy of logits, in nats."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def cross_entropy(
    logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, ""]:
    """Returns the mean of -log softmax(logits)[target] over the targets that ``mask`` keeps.

    In nats per token, in float32 or wider. With no target kept the result is 0, where torch's is
    NaN; torch has ``ignore_index`` in place of the mask.
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
) -> Float[Array, "B T"]:
    """Returns -log softmax(logits)[target] of each token, in nats, in float32 or wider.

    Args:
        logits: of every class.
        targets: ids.
        z_loss: what (log Σ exp(logits))² is multiplied by and added (arXiv 2204.02311, section 5);
            it keeps that sum near 1.
        label_smoothing: ε: the target's share of the true distribution is 1 - ε + ε/V, and that of
            every other class ε/V (arXiv 1512.00567, section 7).
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A comparison with every class fuses with the sum; picking by index would cost a scatter in
    # the gradient.
    classes = jnp.arange(logits.shape[-1]).reshape((1,) * targets.ndim + (-1,))
    picked = jnp.sum(jnp.where(classes == targets[..., None], logits, 0), axis=-1)
    if label_smoothing:
        mean = jnp.mean(logits, axis=-1)
        picked = (1 - label_smoothing) * picked + label_smoothing * mean
    normalizer = jax.nn.logsumexp(logits, axis=-1)
    losses = normalizer - picked
    return losses + z_loss * jnp.square(normalizer) if z_loss else losses
