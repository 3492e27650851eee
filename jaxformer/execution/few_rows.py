"""Products of few rows with large matrices on a CPU, as a step of generation has them.

XLA brings what stands on the right of a product into an order of its own, each time anew. For a
matrix that only few rows are multiplied by, this takes longer than the product. So a custom call
reads the matrix as it lies, in the time that memory takes (``hardware.row_products``). Where there
is none, the matrix stands on the left, with its outputs along the first dimension, and the rows on
the right.
"""

import contextvars
import functools
from collections.abc import Container
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.execution.scopes import set_within
from jaxformer.hardware import row_products

# One row has a kernel of XLA's own, which reads a matrix with its outputs along the first dimension
# as fast; with more rows than the most the order is worth its time.
FEWEST_ROWS, MOST_ROWS = 2, 32
# XLA's own products are as fast with smaller matrices, in bytes.
LEAST_CALLED_BYTES = 2**15
# Matrices of one call.
MOST_TOGETHER = 8
# A matrix that has its outputs along the second dimension is copied once for a text. This takes as
# long as two to four products spare, and where they spare little, by the number of rows, longer.
FEWEST_TOKENS_TO_COPY = 8
TOKENS_TO_COPY_FOR = {1: 48, 2: 24, 3: 24}
# What the copies of a model may take beside it, and the least for these few rows: products with
# what lies in a processor's cache spare nothing.
LEAST_COPIED_BYTES, MOST_COPIED_BYTES = 2**24, 2**30
# The largest number of each row is looked for in so many parts, and where a column, with one number
# of each row, fills a register.
PARTS = 4
FEWEST_ROWS_OF_COLUMNS = 8

# Of matrices that have a row for each output.
TRANSPOSED_DTYPES = {
    "float32": row_products.BY_TRANSPOSED,
    "bfloat16": row_products.BY_TRANSPOSED_BFLOAT16,
    "int8": row_products.BY_TRANSPOSED_INT8,
}

_head_calls: contextvars.ContextVar[bool] = contextvars.ContextVar("head_calls", default=False)


def is_few(rows: int) -> bool:
    """Returns whether ``product`` is faster for so many rows."""
    return rows >= FEWEST_ROWS and takes_copies(rows)


def takes_copies(rows: int) -> bool:
    """Returns whether ``product`` by a transposed copy is faster for so many rows."""
    return 1 <= rows <= MOST_ROWS and CompilationTarget.here().platform == "cpu"


def is_worth_copies(rows: int, tokens: int, copied_bytes: int) -> bool:
    """Returns whether the products of a text are faster with transposed copies.

    Args:
        rows: of each product.
        tokens: how many the text may get, which are as many products.
        copied_bytes: what the copies take.
    """
    least = LEAST_COPIED_BYTES if rows in TOKENS_TO_COPY_FOR else 0
    return (
        takes_copies(rows)
        and tokens >= TOKENS_TO_COPY_FOR.get(rows, FEWEST_TOKENS_TO_COPY)
        and least <= copied_bytes <= MOST_COPIED_BYTES
    )


def product(x_RI: Float[Array, "R I"], kernel_OI: Float[Array, "O I"]) -> Float[Array, "R O"]:
    """Returns x Wᵀ."""
    # Without the barrier XLA would put the rows on the left again.
    return jax.lax.optimization_barrier(kernel_OI @ x_RI.T).T


def can_use_call(
    rows: int, kernel: Array | np.ndarray, dtypes: Container[str] = ("float32",)
) -> bool:
    """Returns whether the product of so many rows and a matrix, or several, can be a custom call.

    Args:
        rows: of each product.
        kernel: as it is stored, on the device that is to compute, or an array of numpy.
        dtypes: those that the call takes.
    """
    if not takes_copies(rows) or isinstance(kernel, jax.core.Tracer):
        return False
    # XLA cannot cut a custom call into parts for the devices of a mesh.
    is_on_one = not isinstance(kernel, jax.Array) or len(kernel.devices()) == 1
    is_large = kernel.nbytes >= LEAST_CALLED_BYTES and str(kernel.dtype) in dtypes
    return is_on_one and is_large and row_products.are_known()


def fits_call(x_RI: Float[Array, "R I"]) -> bool:
    """Returns whether these rows are multiplied by a custom call, where the matrix can be."""
    return x_RI.dtype == jnp.float32 and takes_copies(len(x_RI))


def head_calls(wanted: bool) -> AbstractContextManager[None]:
    """Makes the products of attention's heads custom calls, where they fit; for one CPU device."""
    return set_within(_head_calls, wanted)


def fit_head_calls(
    q_BTNH: Float[Array, "B T N H"], k_BSKH: Float[Array, "B S K H"], v_BSKH: Array
) -> bool:
    """Returns whether the products of these heads are custom calls."""
    rows = q_BTNH.shape[1] * q_BTNH.shape[2] // k_BSKH.shape[2]
    is_float32 = all(x.dtype == jnp.float32 for x in (q_BTNH, k_BSKH, v_BSKH))
    return _head_calls.get() and is_float32 and takes_copies(rows)


def call_product(x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "R O"]:
    """Returns x W, by a custom call."""
    return call_each_product(x_RI, kernel_IO)[0]


def call_each_product(
    x_RI: Float[Array, "R I"], *kernels_IO: Float[Array, "I _"]
) -> list[Float[Array, "R _"]]:
    """Returns x W for each of up to ``MOST_TOGETHER`` matrices, by one custom call."""
    shapes = [(len(x_RI), kernel.shape[1]) for kernel in kernels_IO]
    return list(call_for_floats(row_products.PRODUCT, shapes, x_RI, *kernels_IO))


def call_product_by_transposed(
    x_RI: Float[Array, "R I"], kernel_OI: Num[Array, "O I"]
) -> Float[Array, "R O"]:
    """Returns x Wᵀ, by a custom call; its columns lie one after the other.

    Args:
        x_RI: rows, in float32.
        kernel_OI: in one of ``TRANSPOSED_DTYPES``; its numbers are used as they are.
    """
    target = TRANSPOSED_DTYPES[str(kernel_OI.dtype)]
    return _call(target, (len(kernel_OI), len(x_RI)), x_RI, kernel_OI).T


def call_grouped_product(
    x_RI: Float[Array, "R I"], kernel_EIO: Float[Array, "E I O"], first: Int[Array, "E+1"]
) -> Float[Array, "R O"]:
    """Returns the product of each row with the matrix of its group; zeros for rows of no group.

    Args:
        x_RI: rows, sorted by group, and then those of none.
        kernel_EIO: a matrix for each group. Those of groups without rows are not read.
        first: where the rows of each group begin, and where those of the last one end, int32.
    """
    return _call(row_products.GROUPED, (len(x_RI), kernel_EIO.shape[2]), x_RI, kernel_EIO, first)


def call_products(
    x_PRI: Float[Array, "P R I"], kernel_PIO: Float[Array, "P I O"]
) -> Float[Array, "P R O"]:
    """Returns the products of pairs of rows and matrices, by a custom call."""
    pairs, rows, _ = x_PRI.shape
    return _call(row_products.PAIRS, (pairs, rows, kernel_PIO.shape[2]), x_PRI, kernel_PIO)


def call_products_by_transposed(
    x_PRI: Float[Array, "P R I"], kernel_POI: Float[Array, "P O I"]
) -> Float[Array, "P R O"]:
    """Returns the products of pairs of rows and transposed matrices, by a custom call."""
    pairs, rows, _ = x_PRI.shape
    shape = (pairs, kernel_POI.shape[1], rows)
    return _call(row_products.PAIRS_BY_TRANSPOSED, shape, x_PRI, kernel_POI).transpose(0, 2, 1)


def _call(target: str, shape: tuple[int, ...], *arrays: Array) -> Array:
    return call_for_floats(target, [shape], *arrays)[0]


def fill_columns(rows: int) -> bool:
    """Returns whether ``first_largest`` is faster for so many rows."""
    return rows >= FEWEST_ROWS_OF_COLUMNS and is_few(rows)


def first_largest(x_RN: Float[Array, "R N"]) -> Int[Array, "R"]:
    """Returns where the largest number of each row is, the first of equal ones; of NaN, the first.

    ``product`` leaves its columns one after the other, and so they are read: the numbers of a
    column, one of each row, are compared at once, and parts of the columns beside each other.
    """
    # Numbers that were computed twice might not be equal.
    columns_NR = jax.lax.optimization_barrier(x_RN.T)
    parts = jnp.array_split(columns_NR, min(PARTS, len(columns_NR)))
    largest_R = functools.reduce(jnp.maximum, [jnp.max(part, axis=0) for part in parts])
    last = len(columns_NR) - 1

    def place(part: Float[Array, "n R"], start: int) -> Int[Array, "R"]:
        places = start + jax.lax.broadcasted_iota(jnp.int32, part.shape, 0)
        is_largest = (part == largest_R[None]) | jnp.isnan(part)
        return jnp.min(jnp.where(is_largest, places, last), axis=0)

    starts = np.cumsum([0, *map(len, parts[:-1])])
    return functools.reduce(jnp.minimum, map(place, parts, starts.tolist()))
