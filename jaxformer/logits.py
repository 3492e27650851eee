"""What a token is drawn from."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def filter_logits(
    logits_BV: Float[Array, "*B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Array, "*B V"]:
    """The logits that sampling draws from: over temperature, and -inf for what is not to be drawn.

    Args:
        logits_BV: in nats, of any dtype; the result is in float32 or wider.
        temperature: what they are divided by; below 1 sharpens.
        top_k: keep those not below the k-th largest (all of them on a tie).
        top_p: of what ``top_k`` kept, keep the smallest set of most probable tokens whose
            probability reaches ``top_p``, the lower id first on a tie; 1 keeps everything
            (Holtzman et al., arXiv 1904.09751, section 3.1).

    Raises:
        ValueError: temperature is not positive and finite, top_k is below 1, or top_p is outside
            (0, 1].

    >>> filter_logits(jnp.array([[3.0, 1.0, 2.0]]), temperature=2.0, top_k=2).tolist()
    [[1.5, -inf, 1.0]]
    """
    check_sampling(temperature, top_k, top_p)
    wide = jnp.promote_types(logits_BV.dtype, jnp.float32)
    logits = logits_BV.astype(wide) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = jax.lax.top_k(logits, top_k)[0][..., -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None and top_p < 1:
        order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
        ranked = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(ranked, axis=-1)[..., :-1]
        first = jnp.ones_like(before[..., :1], bool)
        kept = jnp.concatenate((first, before < top_p), axis=-1)[..., : logits.shape[-1]]
        kept = jnp.take_along_axis(kept, jnp.argsort(order, axis=-1), axis=-1)
        logits = jnp.where(kept, logits, -jnp.inf)
    return logits


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Checks the settings of ``filter_logits``.

    Raises:
        ValueError: one of them is out of its range; the message names it.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite: got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1: got {top_k}")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]: got {top_p}")
