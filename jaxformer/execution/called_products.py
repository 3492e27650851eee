"""Products of a run on a CPU as custom calls: jaxformer's own, or those of torch's library.

XLA brings one side of a product into an order of its own, each time anew, and the products that are
the gradients of weights reach less of the processor's speed. ``hardware.matrix_products`` makes
others known to XLA, and ``training.products`` measures which are the fastest. torch itself is not
imported.

All are of float32, and are differentiated backward alone, as a training step is.
"""

import contextvars
import functools
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout
from jaxformer.hardware.matrix_products import (
    BY_TRANSPOSED,
    GROUPED,
    GROUPED_BY_TRANSPOSED,
    GROUPED_MATRICES,
    PRODUCT,
    SCORES,
    TRANSPOSED_BY,
    WEIGHTED,
    WEIGHTED_BACK,
    Library,
    target,
)

# Products of fewer rows read each number of a matrix for little, and XLA's are as fast.
FEWEST_ROWS = 32

_wanted: contextvars.ContextVar[Library | None] = contextvars.ContextVar(
    "called_products", default=None
)


def products_of(library: Library | None) -> AbstractContextManager[None]:
    """Makes models be traced with the products of a library, or with XLA's for None.

    XLA must know the library's by then. A function that ``jax.jit`` has compiled keeps the products
    that it was traced with.
    """
    return set_within(_wanted, library)


def wanted_library(*arrays: Array | jax.ShapeDtypeStruct) -> Library | None:
    """Returns whose custom calls are to compute the products of these arrays, None if XLA is.

    XLA cannot cut a custom call into parts for the devices of a mesh.
    """
    is_possible = all(x.dtype == jnp.float32 for x in arrays) and current_layout() is None
    return _wanted.get() if is_possible else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    library: Library, x_RI: Float[Array, "R I"], kernel_IO: Float[Array, "I O"]
) -> Float[Array, "R O"]:
    """Returns x W."""
    return _product(library, x_RI, kernel_IO)


def _product(library: Library, x_RI: Array, kernel_IO: Array) -> Array:
    return _call(library, PRODUCT, x_RI, kernel_IO, (len(x_RI), kernel_IO.shape[1]))


def _product_back(library: Library, kept: tuple[Array, Array], dy_RO: Array) -> tuple[Array, Array]:
    x_RI, kernel_IO = kept
    dx_RI = _product_by_transposed(library, dy_RO, kernel_IO)
    return dx_RI, product_of_transposed(library, x_RI, dy_RO)


def product_of_transposed(
    library: Library, x_RI: Float[Array, "R I"], y_RO: Float[Array, "R O"]
) -> Float[Array, "I O"]:
    """Returns xᵀ y, as the gradient of a kernel is. It is not differentiated."""
    return _call(library, TRANSPOSED_BY, x_RI, y_RO, (x_RI.shape[1], y_RO.shape[1]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product_by_transposed(
    library: Library, x_RI: Float[Array, "R I"], table_OI: Float[Array, "O I"]
) -> Float[Array, "R O"]:
    """Returns x Tᵀ, such as the logits of a head that shares the table of an embedding."""
    return _product_by_transposed(library, x_RI, table_OI)


def _product_by_transposed(library: Library, x_RI: Array, table_OI: Array) -> Array:
    return _call(library, BY_TRANSPOSED, x_RI, table_OI, (len(x_RI), len(table_OI)))


def _product_by_transposed_back(
    library: Library, kept: tuple[Array, Array], dy_RO: Array
) -> tuple[Array, Array]:
    x_RI, table_OI = kept
    dx_RI = _call(library, PRODUCT, dy_RO, table_OI, x_RI.shape)
    return dx_RI, _call(library, TRANSPOSED_BY, dy_RO, x_RI, table_OI.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def scores(
    library: Library, q_BTNH: Float[Array, "B T N H"], k_BSKH: Float[Array, "B S K H"], keys: int
) -> Float[Array, "B N T s"]:
    """Returns q · k of each query and key, where query head n has key head n // (N / K).

    Args:
        library: whose custom calls.
        q_BTNH: queries.
        k_BSKH: keys.
        keys: how many of them are used, from the first one on.
    """
    return _scores(library, q_BTNH, k_BSKH, keys)


def _scores(library: Library, q_BTNH: Array, k_BSKH: Array, keys: int) -> Array:
    batch, queries, heads, _ = q_BTNH.shape
    return _call(library, SCORES, q_BTNH, k_BSKH, (batch, heads, queries, keys))


def _scores_back(
    library: Library, _: int, kept: tuple[Array, Array], ds_BNTS: Array
) -> tuple[Array, Array]:
    q_BTNH, k_BSKH = kept
    dq_BTNH = _call(library, WEIGHTED, ds_BNTS, k_BSKH, q_BTNH.shape)
    return dq_BTNH, _call(library, WEIGHTED_BACK, ds_BNTS, q_BTNH, k_BSKH.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted(
    library: Library, p_BNTS: Float[Array, "B N T s"], v_BSKH: Float[Array, "B S K H"]
) -> Float[Array, "B T N H"]:
    """Returns Σ p · v over the keys of a query, where query head n has value head n // (N / K).

    Args:
        library: whose custom calls.
        p_BNTS: weights of the first s keys.
        v_BSKH: the values of all keys.
    """
    return _weighted(library, p_BNTS, v_BSKH)


def _weighted(library: Library, p_BNTS: Array, v_BSKH: Array) -> Array:
    batch, heads, queries, _ = p_BNTS.shape
    return _call(library, WEIGHTED, p_BNTS, v_BSKH, (batch, queries, heads, v_BSKH.shape[3]))


def _weighted_back(
    library: Library, kept: tuple[Array, Array], dy_BTNH: Array
) -> tuple[Array, Array]:
    p_BNTS, v_BSKH = kept
    dp_BNTS = _call(library, SCORES, dy_BTNH, v_BSKH, p_BNTS.shape)
    return dp_BNTS, _call(library, WEIGHTED_BACK, p_BNTS, dy_BTNH, v_BSKH.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped(
    library: Library,
    x_RI: Float[Array, "R I"],
    kernel_EIO: Float[Array, "E I O"],
    first: Int[Array, "E+1"],
) -> Float[Array, "R O"]:
    """Returns the product of each row with the matrix of its group; zeros for rows of no group.

    Args:
        library: whose custom calls.
        x_RI: rows, sorted by group, and then those of none.
        kernel_EIO: a matrix for each group.
        first: where the rows of each group begin, and where those of the last one end, int32.
    """
    return _grouped(library, x_RI, kernel_EIO, first)


def _grouped(library: Library, x_RI: Array, kernel_EIO: Array, first: Array) -> Array:
    return _call(library, GROUPED, x_RI, kernel_EIO, (len(x_RI), kernel_EIO.shape[2]), first)


def _grouped_back(
    library: Library, kept: tuple[Array, Array, Array], dy_RO: Array
) -> tuple[Array, Array, None]:
    x_RI, kernel_EIO, first = kept
    dx_RI = _call(library, GROUPED_BY_TRANSPOSED, dy_RO, kernel_EIO, x_RI.shape, first)
    return dx_RI, _call(library, GROUPED_MATRICES, x_RI, dy_RO, kernel_EIO.shape, first), None


def _call(
    library: Library, form: str, a: Array, b: Array, shape: tuple[int, ...], *others: Array
) -> Array:
    result = jax.ShapeDtypeStruct(shape, jnp.float32)
    call = jax.ffi.ffi_call(target(library, form), result, vmap_method="sequential")
    computed: Array = call(a, b, *others)
    return computed


# Forward passes call ``_product`` and the like, whose custom calls ``rematerialization`` can see.
product.defvjp(lambda lib, x, kernel: (_product(lib, x, kernel), (x, kernel)), _product_back)
product_by_transposed.defvjp(
    lambda lib, x, table: (_product_by_transposed(lib, x, table), (x, table)),
    _product_by_transposed_back,
)
scores.defvjp(lambda lib, q, k, keys: (_scores(lib, q, k, keys), (q, k)), _scores_back)
weighted.defvjp(lambda lib, p, v: (_weighted(lib, p, v), (p, v)), _weighted_back)
grouped.defvjp(
    lambda lib, x, kernel, first: (_grouped(lib, x, kernel, first), (x, kernel, first)),
    _grouped_back,
)
