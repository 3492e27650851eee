"""Gated feed-forwards of rows, each with the matrices of its group.

A visit to a block of rows makes all of its products, so that the block, and what is made of it,
stays in a core's cache from one product to the next.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution import called_products
from jaxformer.execution.grouped_products import (
    Block,
    block_sizes,
    find_groups,
    first_rows,
    over_blocks,
)

# (gate, up, biases, keep) of a block, whose arrays are (S, F), to its hidden activations (S, F).
Activate = Callable[[Array, Array, Any, Array | None], Array]


class Kernels(NamedTuple):
    """The matrices of each group."""

    gate: Float[Array, "E D F"]
    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]


def grouped_feed_forward(
    x: Float[Array, "R D"],
    kernels: Kernels,
    biases: Any,
    keep: Bool[Array, "R F"] | None,
    groups: Int[Array, "R"],
    activate: Activate,
) -> Float[Array, "R D"]:
    """Returns activate(x · gate, x · up) · down of each row, with the matrices of its group.

    Args:
        x: the rows, sorted by group.
        kernels: the matrices.
        biases: a tree of arrays whose first dimension are groups; ``activate`` gets those of one.
        keep: a mask for dropout, of which ``activate`` gets the rows of a block.
        groups: the group of each row, as ``grouped_product`` takes it.
        activate: makes the hidden activations of both products. Layers that have equal ones are
            traced once.
    """
    library = called_products.wanted_library(x, *kernels)
    if library is not None and not jax.tree.leaves(biases):
        multiply = functools.partial(
            called_products.grouped, library, first=first_rows(groups, len(kernels.gate))
        )
        gate, up = multiply(x, kernels.gate), multiply(x, kernels.up)
        return multiply(activate(gate, up, biases, keep), kernels.down)
    return _by_blocks(x, kernels, biases, keep, groups, activate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _by_blocks(
    x: Float[Array, "R D"],
    kernels: Kernels,
    biases: Any,
    keep: Bool[Array, "R F"] | None,
    groups: Int[Array, "R"],
    activate: Activate,
) -> Float[Array, "R D"]:
    y, _ = _multiply(x, kernels, biases, keep, groups, activate, keeps_products=False)
    return y


def _forward(*arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    y, products = _multiply(*arguments, keeps_products=True)
    *inputs, _ = arguments
    return y, (*inputs, products)


def _backward(activate: Activate, kept: tuple[Any, ...], gradient: Array) -> tuple[Any, ...]:
    return *_multiply_back(*kept, gradient, activate), None, None


_by_blocks.defvjp(_forward, _backward)


# Layers of equal shapes have their loops traced once for all.
@functools.partial(jax.jit, static_argnames=("activate", "keeps_products"))
def _multiply(
    x: Float[Array, "R D"],
    kernels: Kernels,
    biases: Any,
    keep: Bool[Array, "R F"] | None,
    groups: Int[Array, "R"],
    activate: Activate,
    *,
    keeps_products: bool,
) -> tuple[Float[Array, "R D"], tuple[Float[Array, "R F"], ...]]:
    """Returns the outputs, and x · gate and x · up if they are to be kept."""
    num_groups, _, width = kernels.gate.shape
    rows = find_groups(groups, num_groups, block_sizes(x.shape[0], num_groups))
    dtype = jnp.promote_types(x.dtype, kernels.gate.dtype)

    def visit(block: Block, own: tuple[Kernels, Any], state: Any) -> Any:
        y, products = state
        matrices, own_biases = own
        x_block = block.rows_of(x)
        gate, up = x_block @ matrices.gate, x_block @ matrices.up
        hidden = activate(gate, up, own_biases, jax.tree.map(block.rows_of, keep))
        if keeps_products:
            products = block.write(gate, products[0]), block.write(up, products[1])
        return block.write(hidden @ matrices.down, y), products

    kept = kernels[:2] if keeps_products else ()
    unwritten = (
        rows.unwritten(x.shape, dtype, kernels.down),
        tuple(rows.unwritten((x.shape[0], width), dtype, near) for near in kept),
    )
    found: tuple[Array, tuple[Array, ...]] = over_blocks(
        (kernels, biases), rows, x.shape[0], visit, unwritten
    )
    return found


@functools.partial(jax.jit, static_argnames="activate")
def _multiply_back(
    x: Float[Array, "R D"],
    kernels: Kernels,
    biases: Any,
    keep: Bool[Array, "R F"] | None,
    groups: Int[Array, "R"],
    products: tuple[Float[Array, "R F"], Float[Array, "R F"]],
    gradient: Float[Array, "R D"],
    activate: Activate,
) -> tuple[Float[Array, "R D"], Kernels, Any]:
    """Returns the gradients of rows, matrices and biases."""
    gate, up = products
    num_groups = kernels.gate.shape[0]
    rows = find_groups(groups, num_groups, block_sizes(x.shape[0], num_groups))
    wide = jnp.promote_types(kernels.gate.dtype, jnp.float32)

    def to_input(given: Array, matrix: Array) -> Array:
        return lax.dot_general(given, matrix, (((1,), (1,)), ((), ())))

    def to_matrix(of_rows: Array, given: Array) -> Array:
        return jnp.matmul(of_rows.T, given, preferred_element_type=wide)

    def visit(block: Block, own: tuple[Kernels, Any], state: Any) -> Any:
        to_x, *to_groups = state
        matrices, own_biases = own
        x_block, keep_block = jax.tree.map(block.rows_of, (x, keep))
        hidden, pull_back = jax.vjp(
            lambda gate, up, biases: activate(gate, up, biases, keep_block),
            block.rows_of(gate),
            block.rows_of(up),
            own_biases,
        )
        given = block.rows_of(gradient)
        # Rows of other groups add nothing to the gradients of this one's matrices.
        given = jnp.where(block.own, given, jnp.zeros((), given.dtype))
        to_gate, to_up, to_biases = pull_back(to_input(given, matrices.down))
        to_kernels = Kernels(
            to_matrix(x_block, to_gate), to_matrix(x_block, to_up), to_matrix(hidden, given)
        )
        to_x_block = to_input(to_gate, matrices.gate) + to_input(to_up, matrices.up)
        return block.write(to_x_block, to_x), *jax.tree.map(
            block.add, [to_kernels, to_biases], to_groups
        )

    unwritten = (
        rows.unwritten(x.shape, x.dtype, gradient),
        Kernels(*(rows.unwritten(k.shape, wide, gradient, i) for i, k in enumerate(kernels))),
        jax.tree.map(jnp.zeros_like, biases),
    )
    to_x, to_kernels, to_biases = over_blocks((kernels, biases), rows, x.shape[0], visit, unwritten)
    narrow = Kernels(*(g.astype(k.dtype) for g, k in zip(to_kernels, kernels, strict=True)))
    return to_x, narrow, to_biases
