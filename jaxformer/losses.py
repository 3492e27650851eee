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


def token_losses(logits: Float[Array, "B T V"], targets: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns -log softmax(logits)[target] of each token, in nats, in float32 or wider."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    # A comparison with every class fuses with the sum; picking by index would cost a scatter in
    # the gradient.
    classes = jnp.arange(logits.shape[-1]).reshape((1,) * targets.ndim + (-1,))
    picked = jnp.sum(jnp.where(classes == targets[..., None], logits, 0), axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - picked
