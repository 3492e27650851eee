"""The arrays in trees of JAX: which are floats, on the host, and others in their places."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def is_float(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is an array of floats."""
    return is_number(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def is_number(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is an array, and not one of random keys."""
    return hasattr(leaf, "dtype") and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_whole(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is an array of integers or truth values."""
    return is_number(leaf) and (jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_)


def is_integer(leaf: Any) -> bool:
    """Returns whether a leaf is a known array of integers that has an axis."""
    is_known = hasattr(leaf, "dtype") and not isinstance(leaf, jax.core.Tracer)
    return is_known and jnp.issubdtype(leaf.dtype, jnp.integer) and leaf.ndim > 0


def is_numeric(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is a number, or an array of numbers or random keys."""
    if hasattr(leaf, "dtype"):
        return getattr(leaf.dtype, "kind", "") not in tuple("OSUMm")
    return isinstance(leaf, int | float | complex)


def leaf_names(tree: Any) -> list[str]:
    """Returns the path of each leaf of a pytree, joined by dots."""
    return [
        jax.tree_util.keystr(path, simple=True, separator=".")
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def is_complex(leaf: Any) -> bool:
    """Returns whether a leaf of a pytree is an array of complex numbers."""
    return is_number(leaf) and jnp.issubdtype(leaf.dtype, jnp.complexfloating)


def in_float64(leaf: Any) -> Any:
    """Returns floats as float64 on the host, complex numbers of two such; all else unchanged."""
    if is_complex(leaf):
        return np.asarray(leaf).astype(np.complex128)
    return np.asarray(leaf).astype(np.float64) if is_float(leaf) else leaf


def on_host(array: Any) -> Any:
    """Returns an array on the host; of random keys, their bits."""
    return np.asarray(array if is_number(array) else jax.random.key_data(array))


def float_arrays(tree: Any) -> list[Any]:
    """Returns the float arrays of a tree, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_float(leaf)]


def integer_arrays(tree: Any) -> list[Any]:
    """Returns the integer arrays of a tree that have an axis, in order."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_integer(leaf)]


def refill(
    tree: Any, arrays: Sequence[Any], is_replaced: Callable[[Any], bool] | None = None
) -> Any:
    """Returns the tree with its first float arrays replaced, in order.

    Args:
        tree: any tree.
        arrays: the replacements, None to keep one; there may be fewer than float arrays.
        is_replaced: which leaves to replace; default those that are arrays of floats.
    """
    waiting = list(arrays)
    leaves, structure = jax.tree.flatten(tree)
    for place, leaf in enumerate(leaves):
        if (is_replaced or is_float)(leaf) and waiting:
            other = waiting.pop(0)
            leaves[place] = leaf if other is None else other
    return jax.tree.unflatten(structure, leaves)


def refill_integers(tree: Any, arrays: Sequence[Any]) -> Any:
    """Returns the tree with its first integer arrays replaced; see ``refill``."""
    return refill(tree, arrays, is_integer)
