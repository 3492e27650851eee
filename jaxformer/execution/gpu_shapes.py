"""Layouts and sizes that XLA should be given on an NVIDIA GPU.

The numbers stay the same. On any other device these functions change nothing.
"""

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from jaxformer.execution.attention_backends import CompilationTarget

# Tensor cores read 16 bytes at a time, and the fastest kernels compute 128 columns at a time.
COLUMNS = 128


def is_for_cuda() -> bool:
    """Returns whether the program that is traced now is for an NVIDIA GPU."""
    return CompilationTarget.here().platform == "cuda"


def keep_row_major(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Returns ``x``, whose gradient then lies in row-major order too.

    Where one row is added to each text of a batch, the row's gradient is a sum over the batch. From
    32 texts on XLA wants the batch to be the last dimension for it, and turns the gradient of the
    whole stack of blocks over: each block then transposes it twice, a tenth of a step.
    """
    if not isinstance(x, jax.core.Tracer) or not is_for_cuda():
        return x
    kept: Array = with_layout_constraint(x, Layout(tuple(range(x.ndim))))
    return kept


def fill_rows(table: Float[Array, "V D"]) -> Float[Array, "W D"]:
    """Returns a table with zeros below its rows, so that products with it have aligned columns.

    A product with GPT-2's 50,257 rows begins each row of its result at an odd address, which the
    fastest kernels cannot write. W is V where that is a multiple of ``COLUMNS``.
    """
    missing = -len(table) % COLUMNS
    return jnp.pad(table, ((0, missing), (0, 0))) if missing and is_for_cuda() else table


def compute_once(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Returns ``x``, which is then computed once and kept, not again wherever it is used."""
    kept: Array = jax.lax.optimization_barrier(x) if is_for_cuda() else x
    return kept
