"""Products of rows with the matrix of each row's group, without a product for every group and row.

Rows come sorted by group, and each group's rows are multiplied a block at a time; groups without
rows cost nothing. The last block of a group may reach into the rows of the next, whose own blocks
come later and write over what it made of them. (Gale et al., MegaBlocks, arXiv 2211.15841,
section 4, has blocks of one group each.)
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

# Rows of a block: products of fewer than the fewest are slow, where a group has as many.
FEWEST_ROWS, MOST_ROWS = 8, 256
# What is left of a group's rows is cut into blocks of so many times fewer rows.
PARTS = 4


class Order(NamedTuple):
    """Pairs of a row and one of its C groups, sorted by group; P is R · C.

    Attributes:
        order: which pair comes at each place.
        places: the place of each pair.
        groups: the group at each place, ascending.
    """

    order: Int[Array, "P"]
    places: Int[Array, "R C"]
    groups: Int[Array, "P"]


def sort_by_group(groups: Int[Array, "R C"]) -> Order:
    """Returns the order of pairs by group; those of one group stay in the order of their rows."""
    each = jnp.reshape(groups, -1)
    order = jnp.argsort(each, stable=True)
    numbers = jnp.arange(each.shape[0], dtype=jnp.int32)
    places = jnp.zeros_like(numbers).at[order].set(numbers, unique_indices=True)
    return Order(order, jnp.reshape(places, groups.shape), each[order])


@jax.custom_vjp
def rows_in_order(x: Float[Array, "R I"], order: Order) -> Float[Array, "P I"]:
    """Returns the row of each pair, sorted. Gradients are gathered, as a scatter is slow."""
    return _take(x, order.order // order.places.shape[1])


rows_in_order.defvjp(
    lambda x, order: (rows_in_order(x, order), order),
    lambda order, gradient: (jnp.sum(_take(gradient, order.places), axis=1), None),
)


@jax.custom_vjp
def rows_as_before(y: Float[Array, "P O"], order: Order) -> Float[Array, "R C O"]:
    """Returns the sorted rows of pairs at the places of their pairs."""
    return _take(y, order.places)


rows_as_before.defvjp(
    lambda y, order: (rows_as_before(y, order), order),
    lambda order, g: (_take(jnp.reshape(g, (-1, g.shape[-1])), order.order), None),
)


def _take(x: Array, places: Array) -> Array:
    # Values that are known while a function is traced may be arrays of numpy.
    return jnp.asarray(x).at[places].get(mode="promise_in_bounds")


class _Groups(NamedTuple):
    """Where the rows of groups lie.

    Attributes:
        used: the groups that have rows, and then the others.
        num_used: how many groups have rows.
        first: of each group, its first place, and the number of rows after the last.
        sizes: rows of the two kinds of blocks, the larger first.
    """

    used: Int[Array, "E"]
    num_used: Int[Array, ""]
    first: Int[Array, "E+1"]
    sizes: tuple[int, int]

    def padded(self, x: Float[Array, "R I"]) -> Float[Array, "R' I"]:
        """Returns the rows and zeros, for the last small block to reach into."""
        return jnp.pad(x, ((0, self.sizes[1]), (0, 0)))

    def unwritten(self, shape: tuple[int, ...], dtype: DTypeLike, near: Array) -> Array:
        """Returns zeros for a loop to write over.

        They are no constant, which XLA would make once, copy for every loop of a step, and keep
        from the step's beginning: they wait for a number of ``near``, which no other loop has.
        """
        never = (self.num_used < 0) & jnp.isnan(near[(0,) * near.ndim])
        return jnp.broadcast_to(never.astype(dtype), shape)


def grouped_product(
    x: Float[Array, "R I"], kernel: Float[Array, "E I O"], groups: Int[Array, "R"]
) -> Float[Array, "R O"]:
    """Returns x[r] · kernel[groups[r]] for every row r.

    Args:
        x: the rows.
        kernel: a matrix for each group.
        groups: the group of each row, ascending in [0, E). A row of group E is of none: what it
            gets means nothing, and a gradient of it must be zero.
    """
    return _product(x, kernel, groups, block_rows(x.shape[0], kernel.shape[0]))


def block_rows(rows: int, groups: int) -> tuple[int, int]:
    """Returns the rows of a block, about half of what a group has on average, and of a small one.

    >>> block_rows(4096, 8), block_rows(2, 8)
    ((256, 64), (1, 1))
    """
    half = max(1, rows // (2 * groups))
    large = min(MOST_ROWS, 1 << (half.bit_length() - 1))
    return large, max(min(FEWEST_ROWS, large), large // PARTS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, kernel: Array, groups: Array, sizes: tuple[int, int]) -> Array:
    return _multiply(x, kernel, _find_groups(groups, kernel.shape[0], sizes))


def _forward(
    x: Array, kernel: Array, groups: Array, sizes: tuple[int, int]
) -> tuple[Array, tuple[Array, ...]]:
    return _product(x, kernel, groups, sizes), (x, kernel, groups)


def _backward(
    sizes: tuple[int, int], kept: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, None]:
    x, kernel, groups = kept
    rows = _find_groups(groups, kernel.shape[0], sizes)
    to_x = _multiply(gradient, kernel, rows, transposed=True)
    return to_x, _sum_by_group(x, gradient, kernel, rows), None


_product.defvjp(_forward, _backward)


def _find_groups(groups: Int[Array, "R"], count: int, sizes: tuple[int, int]) -> _Groups:
    counts = jnp.zeros(count, jnp.int32).at[groups].add(1)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    used = jnp.argsort(counts == 0, stable=True)
    return _Groups(used, jnp.sum(counts > 0), first, sizes)


def _over_blocks(
    first: Int[Array, ""],
    last: Int[Array, ""],
    sizes: Sequence[int],
    visit: Callable[[Int[Array, ""], int, Array], Array],
    state: Array,
) -> Array:
    """Visits the blocks of the rows from ``first`` to before ``last``: large ones, then small ones.

    Args:
        first: a place.
        last: the place after the last row.
        sizes: rows of a block, the larger first.
        visit: is called with a block's first place, its rows and the state; returns the next state.
        state: the first state.
    """
    large, small = sizes
    whole = (last - first) // large
    rest = first + whole * large
    state = lax.fori_loop(0, whole, lambda i, s: visit(first + i * large, large, s), state)
    left = -(-(last - rest) // small)
    return lax.fori_loop(0, left, lambda i, s: visit(rest + i * small, small, s), state)


def _multiply(
    x: Float[Array, "R I"], kernel: Float[Array, "E I O"], rows: _Groups, transposed: bool = False
) -> Float[Array, "R O"]:
    """Returns the products of sorted rows with their group's matrix; O is I where it is transposed.

    Groups come in ascending order, so that what a block writes beyond its group is written over.
    """
    # The dimension of the kernel that is summed over.
    summed = 2 if transposed else 1
    dtype = jnp.promote_types(x.dtype, kernel.dtype)
    x_padded = rows.padded(x)

    def group(number: Array, y: Array) -> Array:
        which = rows.used[number]
        matrix = kernel[which]

        def block(place: Array, size: int, y: Array) -> Array:
            part = lax.dynamic_slice_in_dim(x_padded, place, size)
            product = lax.dot_general(part, matrix, (((1,), (summed - 1,)), ((), ())))
            return lax.dynamic_update_slice_in_dim(y, product.astype(dtype), place, 0)

        return _over_blocks(rows.first[which], rows.first[which + 1], rows.sizes, block, y)

    y = rows.unwritten(
        (x_padded.shape[0], kernel.shape[3 - summed]), dtype, x if transposed else kernel
    )
    return lax.fori_loop(0, rows.num_used, group, y)[: x.shape[0]]


def _sum_by_group(
    x: Float[Array, "R I"],
    gradients: Float[Array, "R O"],
    kernel: Float[Array, "E I O"],
    rows: _Groups,
) -> Float[Array, "E I O"]:
    """Returns the gradient of each group's matrix."""
    wide = jnp.promote_types(kernel.dtype, jnp.float32)
    x_padded, gradients_padded = rows.padded(x), rows.padded(gradients)

    def group(number: Array, total: Array) -> Array:
        which = rows.used[number]
        last = rows.first[which + 1]

        def block(place: Array, size: int, summed: Array) -> Array:
            part = lax.dynamic_slice_in_dim(x_padded, place, size)
            given = lax.dynamic_slice_in_dim(gradients_padded, place, size)
            own = jnp.arange(size, dtype=place.dtype)[:, None] < last - place
            given = jnp.where(own, given, jnp.zeros((), given.dtype))
            return summed + jnp.matmul(part.T, given, preferred_element_type=wide)

        zeros = jnp.zeros(kernel.shape[1:], wide)
        summed = _over_blocks(rows.first[which], last, rows.sizes, block, zeros)
        return total.at[which].set(summed.astype(kernel.dtype))

    total = rows.unwritten(kernel.shape, kernel.dtype, gradients)
    return lax.fori_loop(0, rows.num_used, group, total)
