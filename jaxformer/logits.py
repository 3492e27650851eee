"""Which token comes next: the most probable one, or one drawn by temperature, top-k and top-p."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from jaxformer.checks import FLOAT32_MAX, check_is_integer, check_is_number
from jaxformer.execution import few_rows
from jaxformer.execution.batch_halves import BatchPart

# Below this, float32 has no room for a logit over the temperature, nor for a share of all tokens.
SMALLEST = 1e-30


def most_probable(logits_BV: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Returns the id of the largest logit, the first of equal ones; of NaN, the first NaN.

    As ``jnp.argmax`` does, which XLA computes number by number on a CPU.

    >>> most_probable(jnp.array([[1.0, 3.0, 3.0], [2.0, jnp.nan, 4.0]])).tolist()
    [1, 1]
    """
    if logits_BV.ndim == 2 and few_rows.fill_columns(len(logits_BV)):
        return few_rows.first_largest(logits_BV).astype(int)
    # Numbers that were computed twice might not be equal.
    logits_BV = jax.lax.optimization_barrier(logits_BV)
    size = logits_BV.shape[-1]
    ids_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, logits_BV.ndim - 1)
    largest_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
    is_largest_BV = (logits_BV == largest_B1) | jnp.isnan(logits_BV)
    return jnp.min(jnp.where(is_largest_BV, ids_BV, size - 1), axis=-1).astype(int)


def draw(
    key: Array, logits_BV: Float[Array, "*B V"], part: BatchPart | None = None
) -> Int[Array, "*B"]:
    """Returns ids drawn with the probabilities softmax(logits).

    They are those of ``jax.random.categorical`` with the same key, in half of its time on a CPU:
    the largest sum of a logit and Gumbel noise (Maddison et al., arXiv 1411.0030, section 2).

    Args:
        key: of the whole batch.
        logits_BV: in nats.
        part: which rows of a batch these are, default all; they get what the whole batch would.
    """
    rows = logits_BV.shape[:1] if part is None else (part.rows,)
    noise = jax.random.gumbel(key, (*rows, *logits_BV.shape[1:]), logits_BV.dtype)
    if part is not None:
        noise = jax.lax.dynamic_slice_in_dim(noise, part.first, len(logits_BV))
    return most_probable(noise + logits_BV)


def filter_logits(
    logits_BV: Float[Array, "*B V"],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Float[Array, "*B V"]:
    """Returns logits / temperature, with -inf for tokens that ``top_k`` or ``top_p`` excludes.

    Args:
        logits_BV: in nats, of any dtype; the result is in float32 or wider.
        temperature: what they are divided by; below 1 sharpens.
        top_k: keep those not below the k-th largest (all of them on a tie).
        top_p: of what ``top_k`` kept, keep the smallest set of most probable tokens whose
            probability reaches ``top_p``, the lower id first on a tie; 1 keeps everything
            (Holtzman et al., arXiv 1904.09751, section 3.1).

    Raises:
        ValueError: temperature is below 1e-30 or not finite in float32, top_k is no integer or
            below 1, or top_p is below 1e-30 or above 1.

    >>> filter_logits(jnp.array([[3.0, 1.0, 2.0]]), temperature=2.0, top_k=2).tolist()
    [[1.5, -inf, 1.0]]
    """
    check_sampling(temperature, top_k, top_p)
    wide = jnp.promote_types(logits_BV.dtype, jnp.float32)
    logits = logits_BV.astype(wide) / temperature
    keys = _ordered(logits)
    if top_k is not None and top_k < logits.shape[-1]:
        kth = _largest_reaching(top_k, keys, jnp.ones((), jnp.int32))
        logits = jnp.where(keys >= kth, logits, -jnp.inf)
    if top_p is not None and top_p < 1:
        probabilities = jax.nn.softmax(logits, axis=-1)
        last = _largest_reaching(top_p, keys, probabilities)
        above, tied = keys > last, keys == last
        before = jnp.sum(jnp.where(above, probabilities, 0), axis=-1, keepdims=True)
        before = before + (jnp.cumsum(tied, axis=-1) - 1) * probabilities
        logits = jnp.where(above | (tied & (before < top_p)), logits, -jnp.inf)
    return logits


def _ordered(x: Float[Array, "..."]) -> UInt[Array, "..."]:
    """Unsigned integers in the order of the numbers."""
    bits = jnp.finfo(x.dtype).bits
    sign = np.array(1 << (bits - 1), f"uint{bits}")
    # Minus zero is no smaller than zero.
    pattern = jax.lax.bitcast_convert_type(jnp.where(x == 0, jnp.zeros_like(x), x), sign.dtype)
    return jnp.where(pattern >= sign, ~pattern, pattern | sign)


def _largest_reaching(
    goal: float, keys_BV: UInt[Array, "*B V"], weights_BV: Array
) -> UInt[Array, "*B 1"]:
    """The largest key for which it and those above it together weigh ``goal``; 0 if none do.

    It is found bit by bit. On a CPU, XLA takes ten to forty times as long to sort a vocabulary of
    50,257, or to take its 40 largest.
    """
    dtype = keys_BV.dtype
    bits = 8 * dtype.itemsize

    def decide(i: Array, found: UInt[Array, "*B 1"]) -> UInt[Array, "*B 1"]:
        larger = found | jnp.left_shift(jnp.ones((), dtype), (bits - 1 - i).astype(dtype))
        weight = jnp.sum(jnp.where(keys_BV >= larger, weights_BV, 0), axis=-1, keepdims=True)
        return jnp.where(weight >= goal, larger, found)

    return jax.lax.fori_loop(0, bits, decide, jnp.zeros((*keys_BV.shape[:-1], 1), dtype))


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Checks the settings of ``filter_logits``.

    Raises:
        ValueError: one of them is out of its range; the message names it.
    """
    check_is_number("temperature", temperature)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite: got {temperature}")
    if not SMALLEST <= temperature <= FLOAT32_MAX:
        raise ValueError(
            f"temperature must be at least {SMALLEST} and finite in float32: got {temperature}"
        )
    if top_k is not None:
        check_is_integer("top_k", top_k)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1: got {top_k}")
    if top_p is not None:
        check_is_number("top_p", top_p)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]: got {top_p}")
    if top_p is not None and top_p < SMALLEST:
        raise ValueError(f"top_p must be at least {SMALLEST}: got {top_p}")
