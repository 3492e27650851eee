"""Layouts and sizes that XLA should be given on an NVIDIA GPU.

The numbers stay the same. On any other device these functions change nothing.
"""

import contextvars
import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, Int

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout

# Tensor cores read 16 bytes at a time, and the fastest kernels compute 128 columns at a time.
COLUMNS = 128
# The most rows of a table that are taken by a product with ones and zeros.
MOST_ONE_HOT = 512

_fills_columns: contextvars.ContextVar[bool] = contextvars.ContextVar("fills", default=False)


def is_for_cuda() -> bool:
    """Returns whether the program that is traced now is for an NVIDIA GPU."""
    return CompilationTarget.here().platform == "cuda"


def _is_for_one_gpu() -> bool:
    """Whether every array lies on one GPU, so that to cut and join them moves nothing."""
    return is_for_cuda() and current_layout() is None


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


def compute_once(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Returns ``x``, which is then computed once and kept, not again wherever it is used."""
    kept: Array = jax.lax.optimization_barrier(x) if is_for_cuda() else x
    return kept


def filled_columns() -> AbstractContextManager[None]:
    """Makes ``fill_rows`` fill up: whoever enters must leave the columns more out of account."""
    return set_within(_fills_columns, is_for_cuda())


def fill_rows(table: Float[Array, "V *dims"]) -> Float[Array, "W *dims"]:
    """Returns a table, within ``filled_columns`` with zeros below its rows up to a multiple of 128.

    A product with GPT-2's 50,257 rows would begin each row of its result at an odd address, which
    the fastest kernels cannot write, and which every pass over the result reads slowly.
    """
    missing = -len(table) % COLUMNS
    if not missing or not _fills_columns.get():
        return table
    return jnp.pad(table, [(0, missing)] + [(0, 0)] * (table.ndim - 1))


def take_rows(table: Float[Array, "V D"], ids: Int[Array, "*dims"]) -> Float[Array, "*dims D"]:
    """Returns the rows of ``ids``, in float32 or wider.

    From a small table on a GPU they are taken by a product, for the sake of the way back, which
    adds up what belongs to the same row: additions in memory wait for each other, which with 65
    characters took a tenth of a step.
    """
    wide = jnp.promote_types(table.dtype, jnp.float32)
    if len(table) > MOST_ONE_HOT or not is_for_cuda():
        return table.astype(wide)[ids]
    chosen = jax.nn.one_hot(ids, len(table), dtype=table.dtype)
    return jnp.matmul(chosen, table, precision="highest", preferred_element_type=wide)


def row_product(x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]) -> Float[Array, "R O"]:
    """Returns x W, which may be of a single row, as in the generation of one text.

    XLA would make a sum over products of that, and write down each product first, in bfloat16 if
    that is the dtype of the inputs: slower, and rounded once more.
    """
    if len(x_RI) > 1 or not is_for_cuda():
        return x_RI @ kernel_IO
    return (jnp.pad(x_RI, ((0, 1), (0, 0))) @ kernel_IO)[:1]


def add_bias(y_RO: Float[Array, "R O"], bias_O: Float[Array, "O"]) -> Float[Array, "R O"]:
    """Returns y + b, of a sum in float32 or wider.

    For a GPU both are added in the dtype of y, which is the same after rounding, since that is the
    form that XLA computes within the product that y comes from.
    """
    if is_for_cuda():
        return _add_in_product(y_RO, bias_O)
    wide = jnp.promote_types(y_RO.dtype, jnp.float32)
    return (y_RO.astype(wide) + bias_O.astype(wide)[None, :]).astype(y_RO.dtype)


@jax.custom_jvp
def _add_in_product(y_RO: Float[Array, "R O"], bias_O: Float[Array, "O"]) -> Float[Array, "R O"]:
    return y_RO + bias_O.astype(y_RO.dtype)[None, :]


@_add_in_product.defjvp
def _add_in_product_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    """The gradient of the bias is a sum over all rows, which is made in float32 or wider."""
    dtype = primals[0].dtype
    of_y, of_bias = (t.astype(jnp.promote_types(dtype, jnp.float32)) for t in tangents)
    return _add_in_product(*primals), (of_y + of_bias[None, :]).astype(dtype)


def log_sum_exp(logits: Float[Array, "... V"]) -> Float[Array, "..."]:
    """Returns log Σ exp(logits) over the last dimension."""
    if not _is_for_one_gpu() or logits.shape[-1] % COLUMNS:
        return jax.nn.logsumexp(logits, axis=-1)
    top = jax.lax.stop_gradient(_reduce_rows(jnp.max, logits))
    return top + jnp.log(_reduce_rows(jnp.sum, jnp.exp(logits - top[..., None])))


def _reduce_rows(
    reduce: Callable[[Array, int], Array], x: Float[Array, "... V"]
) -> Float[Array, "..."]:
    """Reduces parts that begin at aligned addresses, and then the results.

    XLA by itself would cut a row of 50,304 into 128 parts of 393, whose addresses are odd.
    """
    parts = x.reshape(*x.shape[:-1], -1, COLUMNS)
    return reduce(compute_once(reduce(parts, -1)), -1)


def total(arrays: Sequence[Float[Array, "..."]]) -> Float[Array, ""]:
    """Returns the sum of every element of some arrays.

    A sum takes a GPU two kernels, and one of a few numbers as long as one of thousands. So the sums
    of rows are put one behind the other, with vectors as they are, and summed up all at once.
    """
    if not _is_for_one_gpu():
        return functools.reduce(operator.add, map(jnp.sum, arrays))
    rows = [jnp.sum(jnp.atleast_1d(x), axis=range(1, x.ndim)) for x in arrays]
    # Else XLA sums the parts by themselves and adds the results.
    return jnp.sum(compute_once(jnp.concatenate(rows)))
