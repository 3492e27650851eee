"""Rows that are added to each text of a batch, such as those of positions."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.gpu_shapes import keep_row_major
from jaxformer.execution.sharding import current_layout


def add_to_each(
    x_BTD: Float[Array, "B T D"], rows_BTD: Float[Array, "#B T D"]
) -> Float[Array, "B T D"]:
    """Returns x + rows. The gradient of rows that all texts share is a sum over the batch.

    XLA on a CPU takes 4 ms for such a sum of 3 MB, and 0.3 ms as a product with ones.
    """
    batch, is_shared = len(x_BTD), len(rows_BTD) == 1
    on_cpu = CompilationTarget.here().platform == "cpu" and current_layout() is None
    if on_cpu and is_shared and batch > 1 and x_BTD.dtype == jnp.float32:
        rows_BTD = jnp.einsum("b,td->btd", jnp.ones(batch, jnp.float32), rows_BTD[0])
    return keep_row_major(x_BTD + rows_BTD)
