"""Sums over the devices of a CPU: of all arrays at once, and the same however processes share them.

XLA on a CPU lets the devices meet once for every array of a sum, and to meet for each gradient of
``nano`` takes 5 to 10 % of its step: so arrays are laid end to end and summed as one.

XLA adds up what lies on the CPU devices of one process in the order of the devices; where there is
a coordinator gloo adds round a ring that begins at another device for every part of an array, and
floating-point sums depend on their order. So there the parts are exchanged, added in the order of
the devices, and given back: as many bytes as a ring moves, and the memory of the arrays once more.
The sum of two needs none of this, and accelerators use their own collectives.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array


def sum_over(tree: Any, axis_name: str) -> Any:
    """Sums of arrays of one dtype over the devices of a mapped axis, on all of them."""
    if jax.default_backend() != "cpu":
        return jax.lax.psum(tree, axis_name)
    # What is computed before and after stays one program, however the sum is made.
    leaves, structure = jax.tree.flatten(jax.lax.optimization_barrier(tree))
    flat = jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])
    in_ring = jax.distributed.is_initialized() and jax.lax.axis_size(axis_name) > 2
    flat = _ordered_sum(flat, axis_name) if in_ring else jax.lax.psum(flat, axis_name)
    sums, begin = [], 0
    for leaf in leaves:
        sums.append(flat[begin : begin + leaf.size].reshape(leaf.shape))
        begin += leaf.size
    return jax.lax.optimization_barrier(jax.tree.unflatten(structure, sums))


def mean_over(tree: Any, axis_name: str) -> Any:
    """Means of arrays of one dtype over the devices of a mapped axis, on all of them."""
    count = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda x: x / count, sum_over(tree, axis_name))


def _ordered_sum(flat: Array, axis_name: str) -> Array:
    """The sum of a vector over the devices: each adds up one part of it, from the first on."""
    count = jax.lax.axis_size(axis_name)
    parts = jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)
    parts = jax.lax.all_to_all(parts, axis_name, 0, 0)
    total = functools.reduce(jnp.add, [parts[device] for device in range(count)])
    return jax.lax.all_gather(total, axis_name, tiled=True)[: flat.size]
