"""Keys of seeds, of which every bit counts."""

import operator

import jax
from jaxtyping import Array


def seed_key(seed: int) -> Array:
    """Returns the key of a seed; any two seeds have different ones.

    Below 2^32 it is ``jax.random.key(seed)``, which drops the bits above unless JAX computes in 64
    bits: they are folded in.

    Raises:
        ValueError: the seed is no integer in [0, 2^63).

    >>> seed_key(3) == jax.random.key(3), seed_key(3 + 2**32) == jax.random.key(3)
    (Array(True, dtype=bool), Array(False, dtype=bool))
    """
    try:
        seed = operator.index(seed)
    except TypeError:
        raise ValueError(f"seed must be an integer: got {seed!r:.80}") from None
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be in [0, 2^63): got {seed}")
    high, low = divmod(seed, 2**32)
    key = jax.random.key(low)
    return jax.random.fold_in(key, high) if high else key
