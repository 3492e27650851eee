"""Custom calls whose results are arrays of float32."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def call_for_floats(
    target: str, shapes: Sequence[tuple[int, ...]], *arguments: Array | np.ndarray
) -> tuple[Array, ...]:
    """Returns what a custom call makes of its arguments, float32 arrays of these shapes.

    Args:
        target: the name that XLA knows the call by.
        shapes: of its results.
        arguments: whatever it takes.
    """
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return tuple(jax.ffi.ffi_call(target, results, vmap_method="sequential")(*arguments))
