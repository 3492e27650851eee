"""Products with weights that are stored narrower than they are computed with.

On a CPU, XLA widens a whole matrix into memory before it multiplies, and in a loop over tokens it
does so once for all: nothing is then read faster, and the wide matrix is kept beside the narrow
one. Here a block of rows is widened at a time, which stays in the processor's cache, and stands on
the left of a product with few rows, as in ``few_rows``. On other devices XLA widens what it reads
inside the product.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxformer.execution.few_rows import MOST_ROWS

# Numbers of a block, and the fewest rows: measured on a CPU with 512 KiB of cache a core. XLA
# splits the widening of bfloat16 among its threads, for which a small block is not worth the time.
BLOCK_NUMBERS, BFLOAT16_NUMBERS = 2**16, 2**18
FEWEST_ROWS = 16


def narrow_product(x: Float[Array, "R I"], weight: Num[Array, "O I"]) -> Float[Array, "R O"]:
    """Returns x Wᵀ in float32 or wider.

    Args:
        x: rows.
        weight: int8 or bfloat16; its numbers are used as they are, in the dtype of x.
    """
    return lax.platform_dependent(x, weight, cpu=product_by_blocks, default=_product)


def product_by_blocks(
    x: Float[Array, "R I"], weight: Num[Array, "O I"], *, block_numbers: int | None = None
) -> Float[Array, "R O"]:
    """Returns ``narrow_product``, with so many numbers of the weight widened at a time."""
    outputs, inputs = weight.shape
    is_left = x.shape[0] <= MOST_ROWS
    is_bfloat16 = weight.dtype == jnp.bfloat16
    if block_numbers is None:
        block_numbers = BFLOAT16_NUMBERS if is_bfloat16 and is_left else BLOCK_NUMBERS
    size = max(FEWEST_ROWS, 1 << max(block_numbers // inputs, 1).bit_length() - 1)
    if outputs <= size:
        return _product(x, weight)

    def step(block: Array, y: Array) -> Array:
        # The last block reaches back into the one before: the same numbers are written again.
        start = jnp.minimum(block * size, outputs - size)
        if is_bfloat16:
            # XLA on CPUs would slice a wide copy of a whole bfloat16 array, and without the barrier
            # keep a copy of the integers from before the loop.
            held, start = lax.optimization_barrier((weight, start))
            integers = lax.bitcast_convert_type(held, jnp.uint16)
            part = lax.dynamic_slice_in_dim(integers, start, size)
            part = lax.bitcast_convert_type(part.astype(jnp.uint32) << 16, jnp.float32)
        else:
            part = lax.dynamic_slice_in_dim(weight, start, size)
        if is_left:
            product = jnp.matmul(part.astype(x.dtype), x.T, preferred_element_type=y.dtype)
            # Without the barrier XLA would put the rows on the left again.
            product = lax.optimization_barrier(product)
            return lax.dynamic_update_slice_in_dim(y, product, start, axis=0)
        return lax.dynamic_update_slice_in_dim(y, _product(x, part), start, axis=1)

    shape = (outputs, x.shape[0]) if is_left else (x.shape[0], outputs)
    y = lax.fori_loop(0, -(-outputs // size), step, jnp.zeros(shape, _wide(x.dtype)))
    return y.T if is_left else y


def _product(x: Float[Array, "R I"], weight: Num[Array, "O I"]) -> Float[Array, "R O"]:
    return jnp.einsum("ri,oi->ro", x, weight.astype(x.dtype), preferred_element_type=_wide(x.dtype))


def _wide(dtype: jnp.dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)
