"""Lengths of what a generating program reads, rounded so that few programs are compiled."""

import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

if TYPE_CHECKING:
    from jaxformer.config import TransformerConfig, TransformerLMConfig

# Lengths are rounded up to a power of two or halfway to it, so that few programs are compiled. A
# prompt takes at least the first number of tokens; a cache the second, or as many as fit the bytes,
# below which reading it costs little. A cache that is full is copied into the next larger one:
# attention reads all of it in every step, and never much more than there is.
SHORTEST_PREFILL = 16
SHORTEST_CACHE = 64
SMALLEST_CACHE_BYTES = 2**22


def round_up(length: int, shortest: int, longest: int) -> int:
    """Returns the next power of two or three halves of one, from ``shortest`` to ``longest``."""
    power = 1 << (length - 1).bit_length()
    halfway = power * 3 // 4
    return min(max(halfway if length <= halfway else power, shortest), longest)


def shortest_cache(config: "TransformerLMConfig", batch: int, dtype: jnp.dtype) -> int:
    """Returns the power of two of slots from which on a cache grows."""
    numbers = sum(map(math.prod, cache_shapes(config, batch, 1)))
    slot = config.num_layers * numbers * dtype.itemsize
    return max(SHORTEST_CACHE, 1 << max(SMALLEST_CACHE_BYTES // slot, 1).bit_length() - 1)


def cache_shapes(
    config: "TransformerConfig", batch: int, length: int
) -> list[tuple[int, int, int]]:
    """Returns the shapes of a layer's keys and values: rows and their heads, slots, head width."""
    heads, *widths = config.cache_widths
    return [(batch * heads, length, width) for width in widths]


def lengthen(tree: Any, count: int) -> Any:
    """Returns the arrays with ``count`` more slots, the second dimension of all that have one."""

    def longer(x: Array) -> Array:
        return x if x.ndim < 2 else jnp.pad(x, [(0, 0), (0, count), *[(0, 0)] * (x.ndim - 2)])

    return jax.tree.map(longer, tree)
