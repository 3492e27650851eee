"""Products of rows with the matrix of each row's group, without a product for every group and row.

Rows come sorted by group. A group's rows are multiplied at once, by a product of the smallest size
that holds them: sizes are written into the program, the rows of groups are known when it runs.
Groups without rows cost nothing. (Gale et al., MegaBlocks, arXiv 2211.15841, section 4, has blocks
of one size.)
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from jaxformer.execution import called_products

# The largest block holds half as many rows again as a group has on average, and at most as many: a
# product of so many loses nothing to a larger one.
MOST_ROWS = 512
# Blocks of so many sizes, in equal steps. A CPU brings the matrix into an order of its own for each
# product, which takes as long as some 20 rows, so that a group's rows are one product where they
# can be. Rows that fill a block up cost what others do: half a step in each group, on average. Each
# size is a piece of the program to compile, so that steps of few rows make fewer sizes.
MOST_SIZES, FEWER_SIZES, FEW_ROWS = 16, 6, 16

Stacks = TypeVar("Stacks")
State = TypeVar("State")


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


class Groups(NamedTuple):
    """Where the rows of groups lie.

    Attributes:
        used: the groups that have rows, and then the others.
        num_used: how many groups have rows.
        first: of each group, its first place, and the number of rows after the last.
        sizes: the rows of blocks, ascending.
    """

    used: Int[Array, "E"]
    num_used: Int[Array, ""]
    first: Int[Array, "E+1"]
    sizes: tuple[int, ...]

    def unwritten(
        self, shape: tuple[int, ...], dtype: DTypeLike, near: Array, number: int = 0
    ) -> Array:
        """Returns zeros for a loop to write over.

        They are no constant, which XLA would make once, copy for every loop of a step, and keep
        from the step's beginning: they wait for a number of ``near``, which no other loop has.
        Of several that wait for the same, each has a ``number`` of its own.
        """
        never = (self.num_used < -number) & jnp.isnan(near[(0,) * near.ndim])
        return jnp.broadcast_to(never.astype(dtype), shape)


class Block(NamedTuple):
    """Some of a group's rows, and as many others as fill a block.

    Attributes:
        group: the group.
        place: where the block begins.
        size: S, its rows.
        own: which of them are of the group, and in no other block.
        is_first: whether no block of the group is visited before.
    """

    group: Int[Array, ""]
    place: Int[Array, ""]
    size: int
    own: Bool[Array, "S 1"]
    is_first: bool

    def rows_of(self, x: Float[Array, "R I"]) -> Float[Array, "S I"]:
        """Returns the rows of the block."""
        return lax.dynamic_slice_in_dim(x, self.place, self.size, allow_negative_indices=False)

    def write(self, values: Float[Array, "S O"], y: Float[Array, "R O"]) -> Float[Array, "R O"]:
        """Returns ``y`` with the values of the group's own rows."""
        values = jnp.where(self.own, values.astype(y.dtype), self.rows_of(y))
        return lax.dynamic_update_slice_in_dim(
            y, values, self.place, 0, allow_negative_indices=False
        )

    def add(self, part: Float[Array, "..."], total: Float[Array, "E ..."]) -> Array:
        """Returns ``total`` with ``part`` added to what other blocks gave for the group."""
        if not self.is_first:
            part = part + _at(total, self.group)
        return lax.dynamic_update_index_in_dim(
            total, part, self.group, 0, allow_negative_indices=False
        )


def _at(stack: Array, index: Array) -> Array:
    # An index that may be negative would be one more computation in every block's program.
    return lax.dynamic_index_in_dim(stack, index, keepdims=False, allow_negative_indices=False)


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
    library = called_products.wanted_library(x, kernel)
    if library is not None:
        return called_products.grouped(library, x, kernel, first_rows(groups, len(kernel)))
    return _product(x, kernel, groups, block_sizes(x.shape[0], kernel.shape[0]))


def first_rows(groups: Int[Array, "R"], count: int) -> Int[Array, "E+1"]:
    """Returns where the rows of each of ``count`` groups begin, and the number of rows they have.

    Args:
        groups: the group of each row, ascending; those of group ``count`` are of none.
        count: how many groups there are.
    """
    counts = jnp.zeros(count, jnp.int32).at[groups].add(1)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def block_sizes(rows: int, groups: int) -> tuple[int, ...]:
    """Returns the rows of blocks, ascending.

    >>> block_sizes(4, 8), block_sizes(512, 8)
    ((1,), (16, 32, 48, 64, 80, 96))
    >>> block_sizes(2048, 8)
    (24, 48, 72, 96, 120, 144, 168, 192, 216, 240, 264, 288, 312, 336, 360, 384)
    """
    most = max(1, min(MOST_ROWS, rows, 3 * rows // (2 * groups)))
    step = max(-(-most // MOST_SIZES), min(FEW_ROWS, -(-most // FEWER_SIZES)))
    return tuple(range(step, most + 1, step))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _product(x: Array, kernel: Array, groups: Array, sizes: tuple[int, ...]) -> Array:
    return _multiply(x, kernel, groups, sizes)


def _forward(
    x: Array, kernel: Array, groups: Array, sizes: tuple[int, ...]
) -> tuple[Array, tuple[Array, ...]]:
    return _product(x, kernel, groups, sizes), (x, kernel, groups)


def _backward(
    sizes: tuple[int, ...], kept: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, None]:
    x, kernel, groups = kept
    return *_multiply_back(x, kernel, gradient, groups, sizes), None


_product.defvjp(_forward, _backward)


def find_groups(groups: Int[Array, "R"], count: int, sizes: tuple[int, ...]) -> Groups:
    """Returns where the rows of ``count`` groups lie.

    Args:
        groups: the group of each row, ascending; those of group ``count`` are of none.
        count: how many groups there are.
        sizes: the rows of blocks, ascending.
    """
    first = first_rows(groups, count)
    counts = jnp.diff(first)
    used = jnp.argsort(counts == 0, stable=True)
    return Groups(used, jnp.sum(counts > 0), first, sizes)


def over_blocks(
    stacks: Stacks,
    rows: Groups,
    num_rows: int,
    visit: Callable[[Block, Stacks, State], State],
    state: State,
) -> State:
    """Visits the blocks of all groups.

    Args:
        stacks: a tree of arrays whose first dimension are groups, such as their matrices.
        rows: where groups lie.
        num_rows: of all groups.
        visit: is called with a block, what its group has in ``stacks``, and the state; returns the
            next state.
        state: the first state.
    """
    *_, most = rows.sizes

    def visit_group(number: Array, state: State) -> State:
        group = _at(rows.used, number)
        own_arrays = jax.tree.map(lambda stack: _at(stack, group), stacks)
        first, last = _at(rows.first, group), _at(rows.first, group + 1)
        num_large = (last - first - 1) // most
        rest = last - first - num_large * most

        def visit_rows(
            start: Array, end: Array, size: int, state: State, *, is_first: bool
        ) -> State:
            # At the end of all rows a block begins earlier, for there are none to reach into.
            place = jnp.minimum(start, num_rows - size)
            each = place + jnp.arange(size, dtype=place.dtype)
            own = ((each >= start) & (each < end))[:, None]
            return visit(Block(group, place, size, own, is_first), own_arrays, state)

        # One of these loops makes one turn. Branches of a conditional would each copy the state.
        for fewer, size in zip((0, *rows.sizes), rows.sizes, strict=False):

            def visit_rest(turn: Array, state: State, size: int = size) -> State:
                # What does not depend on the turn would be computed before the loop, if it makes
                # a turn or not.
                start = first + turn * size
                return visit_rows(start, first + rest, size, state, is_first=True)

            is_of_size = (rest > fewer) & (rest <= size)
            state = lax.fori_loop(0, is_of_size.astype(jnp.int32), visit_rest, state)

        def visit_large(turn: Array, state: State) -> State:
            start = first + rest + turn * most
            return visit_rows(start, start + most, most, state, is_first=False)

        return lax.fori_loop(0, num_large, visit_large, state)

    return lax.fori_loop(0, rows.num_used, visit_group, state)


# Layers have products of equal shapes: their loops are traced once for all.
@functools.partial(jax.jit, static_argnames="sizes")
def _multiply(
    x: Float[Array, "R I"],
    kernel: Float[Array, "E I O"],
    groups: Int[Array, "R"],
    sizes: tuple[int, ...],
) -> Float[Array, "R O"]:
    """Returns the products of sorted rows with their group's matrix."""
    rows = find_groups(groups, kernel.shape[0], sizes)
    dtype = jnp.promote_types(x.dtype, kernel.dtype)

    def visit(block: Block, matrix: Array, y: Array) -> Array:
        return block.write(block.rows_of(x) @ matrix, y)

    y = rows.unwritten((x.shape[0], kernel.shape[2]), dtype, kernel)
    return over_blocks(kernel, rows, x.shape[0], visit, y)


@functools.partial(jax.jit, static_argnames="sizes")
def _multiply_back(
    x: Float[Array, "R I"],
    kernel: Float[Array, "E I O"],
    gradient: Float[Array, "R O"],
    groups: Int[Array, "R"],
    sizes: tuple[int, ...],
) -> tuple[Float[Array, "R I"], Float[Array, "E I O"]]:
    """Returns the gradients of the rows and of each group's matrix."""
    rows = find_groups(groups, kernel.shape[0], sizes)
    wide = jnp.promote_types(kernel.dtype, jnp.float32)

    def visit(block: Block, matrix: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        to_x, to_kernel = found
        given = block.rows_of(gradient)
        to_x = block.write(lax.dot_general(given, matrix, (((1,), (1,)), ((), ()))), to_x)
        given = jnp.where(block.own, given, jnp.zeros((), given.dtype))
        product = jnp.matmul(block.rows_of(x).T, given, preferred_element_type=wide)
        return to_x, block.add(product, to_kernel)

    unwritten = (
        rows.unwritten(x.shape, x.dtype, x),
        rows.unwritten(kernel.shape, wide, gradient),
    )
    to_x, to_kernel = over_blocks(kernel, rows, x.shape[0], visit, unwritten)
    return to_x, to_kernel.astype(kernel.dtype)
