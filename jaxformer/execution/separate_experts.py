"""Experts for few rows on a CPU: the kernel of each is an array of its own, and a branch's operand.

A matrix that is taken out of a stack while the program runs is copied first. For few rows this
takes as long as the product. So each expert has a branch of the program here, whose matrices are
known when it is compiled. The branches do not wait for each other.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.few_rows import MOST_ROWS
from jaxformer.execution.grouped_feed_forward import Activate, Kernels

# Each branch of each layer is a piece of the program to compile, which takes some 10 ms. It is
# worth that where a copy takes 0.1 ms for each token.
MOST_EXPERTS = 16
LEAST_BYTES = 2**20
# Arrays of JAX begin at multiples of so many bytes; at others they would have to be copied.
ALIGNMENT = 64


def separate(kernel: Float[Array, "E I O"], rows: int) -> tuple[Float[Array, "I O"], ...] | None:
    """Returns the kernels of experts as arrays of their own, which share the memory of the stack.

    Args:
        kernel: the stack.
        rows: of each call that is to come.

    Returns:
        The matrices; None where it is not worth it, or cannot be done without a copy.
    """
    if rows > MOST_ROWS or kernel.shape[0] > MOST_EXPERTS or isinstance(kernel, jax.core.Tracer):
        return None
    size = kernel.nbytes // kernel.shape[0]
    if size < LEAST_BYTES or size % ALIGNMENT or CompilationTarget.here().platform != "cpu":
        return None
    devices = kernel.devices()
    if len(devices) > 1 or {device.platform for device in devices} != {"cpu"}:
        return None
    # Made of a second view: an array of JAX keeps what numpy made of it, and then is not donated.
    stack = np.asarray(kernel.addressable_data(0))
    return tuple(jax.device_put(matrix, *devices, may_alias=True) for matrix in stack)


@functools.partial(jax.jit, static_argnames=("most_rows", "activate"))
def separate_feed_forward(
    x: Float[Array, "R D"],
    kernels: Sequence[Kernels],
    biases: Any,
    groups: Int[Array, "R"],
    most_rows: int,
    activate: Activate,
) -> Float[Array, "R D"]:
    """Returns what ``grouped_feed_forward`` does.

    Args:
        x: the rows, sorted by group.
        kernels: the matrices of each group.
        biases: see ``grouped_feed_forward``.
        groups: see ``grouped_feed_forward``.
        most_rows: how many rows a group may have.
        activate: see ``grouped_feed_forward``.
    """
    numbers = jnp.arange(len(kernels) + 1, dtype=groups.dtype)
    first = jnp.searchsorted(groups, numbers, method="compare_all")
    # Rows that fill a block up cost little beside reading the matrices.
    sizes = tuple(2**n for n in range((most_rows - 1).bit_length() + 1))
    padded = jnp.pad(x, ((0, sizes[-1]), (0, 0)))
    width = kernels[0].down.shape[1]
    dtype = jnp.promote_types(x.dtype, kernels[0].down.dtype)

    def run(size: int, own: Kernels, own_biases: Any, start: Array) -> Array:
        rows = lax.dynamic_slice_in_dim(padded, start, size, allow_negative_indices=False)
        gate, up = product(rows, own.gate), product(rows, own.up)
        y = product(activate(gate, up, own_biases, None), own.down)
        return jnp.pad(y, ((0, sizes[-1] - size), (0, 0)))

    def run_none(start: Array) -> Array:
        return jnp.zeros((sizes[-1], width), dtype)

    made = []
    for number, own in enumerate(kernels):
        own_biases = jax.tree.map(lambda stack, number=number: stack[number], biases)
        branches = [functools.partial(run, size, own, own_biases) for size in sizes]
        count = first[number + 1] - first[number]
        branch = jnp.sum(count > np.array((0, *sizes[:-1])))
        made.append(lax.switch(branch, [run_none, *branches], first[number]))
    places = groups * sizes[-1] + jnp.arange(x.shape[0], dtype=groups.dtype) - first[groups]
    return jnp.concatenate(made).at[places].get(mode="clip")


def product(x: Float[Array, "R I"], kernel: Float[Array, "I O"]) -> Float[Array, "R O"]:
    """Returns x W, by a kernel of XLA that reads W as it lies.

    XLA has two. The other one, for rows that lie one after the other, brings W into an order of its
    own first.
    """
    columns = lax.optimization_barrier(x.T)
    return lax.dot_general(columns, kernel, (((0,), (0,)), ((), ())))
