"""Products of rows with the matrix of each row's group, without a product for every group and row.

Rows are laid out by group in blocks of equal size. A group's last block is filled up with zeros;
groups without rows cost nothing. (Gale et al., MegaBlocks, arXiv 2211.15841, section 4.)
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

# Rows of a block: products of fewer are slow, and more leave more rows of zeros.
FEWEST_ROWS, MOST_ROWS = 8, 256


class _Layout(NamedTuple):
    """Where rows lie in blocks.

    Attributes:
        slots: of each row, its place among the rows of all blocks.
        used: the groups that have rows, and then the others.
        num_used: how many groups have rows.
        first: of each group, its first block, and the number of blocks after the last.
        rows: R' rows in all blocks, those of zeros too; the same for any groups.
    """

    slots: Int[Array, "R"]
    used: Int[Array, "E"]
    num_used: Int[Array, ""]
    first: Int[Array, "E+1"]
    rows: int


def grouped_product(
    x: Float[Array, "R I"], kernel: Float[Array, "E I O"], groups: Int[Array, "R"]
) -> Float[Array, "R O"]:
    """Returns x[r] · kernel[groups[r]] for every row r.

    Args:
        x: the rows.
        kernel: a matrix for each group.
        groups: the group of each row, in [0, E).
    """
    return _product(x, kernel, groups, block_rows(x.shape[0], kernel.shape[0]))


def block_rows(rows: int, groups: int) -> int:
    """Returns the number of rows of a block: about half of what a group has on average.

    >>> block_rows(4096, 8), block_rows(2, 8)
    (256, 8)
    """
    half = max(1, rows // (2 * groups))
    return min(MOST_ROWS, max(FEWEST_ROWS, 1 << (half.bit_length() - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, kernel: Array, groups: Array, size: int) -> Array:
    layout = _layout(groups, kernel.shape[0], size)
    y = _multiply(_in_blocks(x, layout), kernel, layout, size)
    return y[layout.slots]


def _forward(x: Array, kernel: Array, groups: Array, size: int) -> tuple[Array, tuple[Array, ...]]:
    return _product(x, kernel, groups, size), (x, kernel, groups)


def _backward(size: int, kept: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, None]:
    x, kernel, groups = kept
    layout = _layout(groups, kernel.shape[0], size)
    x_blocks, gradients = _in_blocks(x, layout), _in_blocks(gradient, layout)
    to_x = _multiply(gradients, jnp.swapaxes(kernel, 1, 2), layout, size)
    return to_x[layout.slots], _sum_by_group(x_blocks, gradients, kernel, layout, size), None


_product.defvjp(_forward, _backward)


def _layout(groups: Int[Array, "R"], count: int, size: int) -> _Layout:
    rows = groups.shape[0]
    sizes = jnp.zeros(count, jnp.int32).at[groups].add(1)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(-(-sizes // size))])
    order = jnp.argsort(groups, stable=True)
    start = jnp.cumsum(sizes) - sizes
    by_group = groups[order]
    within = jnp.arange(rows, dtype=jnp.int32) - start[by_group]
    slots = jnp.zeros(rows, jnp.int32).at[order].set(first[by_group] * size + within)
    used = jnp.argsort(sizes == 0, stable=True)
    most_blocks = rows // size + min(rows, count)
    return _Layout(slots, used, jnp.sum(sizes > 0), first, most_blocks * size)


def _in_blocks(x: Float[Array, "R I"], layout: _Layout) -> Float[Array, "R' I"]:
    blocks = jnp.zeros((layout.rows, x.shape[1]), x.dtype)
    return blocks.at[layout.slots].set(x, unique_indices=True)


def _multiply(
    x: Float[Array, "R' I"], kernel: Float[Array, "E I O"], layout: _Layout, size: int
) -> Float[Array, "R' O"]:
    """Returns the product of each block with its group's matrix."""

    def group(number: Array, y: Array) -> Array:
        which = layout.used[number]
        matrix = kernel[which]

        def block(place: Array, y: Array) -> Array:
            part = lax.dynamic_slice_in_dim(x, place * size, size)
            product = (part @ matrix).astype(y.dtype)
            return lax.dynamic_update_slice_in_dim(y, product, place * size, 0)

        return lax.fori_loop(layout.first[which], layout.first[which + 1], block, y)

    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    y = jnp.zeros((x.shape[0], kernel.shape[2]), dtype)
    return lax.fori_loop(0, layout.num_used, group, y)


def _sum_by_group(
    x: Float[Array, "R' I"],
    gradients: Float[Array, "R' O"],
    kernel: Float[Array, "E I O"],
    layout: _Layout,
    size: int,
) -> Float[Array, "E I O"]:
    """Returns the gradient of each group's matrix."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)

    def group(number: Array, total: Array) -> Array:
        which = layout.used[number]

        def block(place: Array, summed: Array) -> Array:
            part = lax.dynamic_slice_in_dim(x, place * size, size)
            given = lax.dynamic_slice_in_dim(gradients, place * size, size)
            return summed + jnp.matmul(part.T, given, preferred_element_type=wide)

        summed = lax.fori_loop(
            layout.first[which], layout.first[which + 1], block, jnp.zeros(kernel.shape[1:], wide)
        )
        return total.at[which].set(summed.astype(kernel.dtype))

    return lax.fori_loop(0, layout.num_used, group, jnp.zeros_like(kernel))
