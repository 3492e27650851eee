"""Custom calls whose results are arrays of float32."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def call_for_floats(
    target: str,
    shapes: Sequence[tuple[int, ...]],
    *arguments: Array | np.ndarray,
    replaces: Mapping[int, int] | None = None,
) -> tuple[Array, ...]:
    """Returns what a custom call makes of its arguments, float32 arrays of these shapes.

    Args:
        target: the name that XLA knows the call by.
        shapes: of its results.
        arguments: whatever it takes.
        replaces: by the number of an argument, that of the result which is written in its place.
            Where the argument is needed later, XLA copies it before.
    """
    results = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    aliases = None if replaces is None else dict(replaces)
    call = jax.ffi.ffi_call(target, results, vmap_method="sequential", input_output_aliases=aliases)
    return tuple(call(*arguments))
