"""JAX modules by path, and copies of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.parameters import join_path
from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.module_calls import called_methods


def in_dtype(module: Any, dtype: str | None) -> Any:
    """Returns a copy in evaluation mode, its float arrays cast unless the dtype is None.

    In float64 an int32, like the index of a cache, becomes int64, as Python's integers do.
    """

    def cast(leaf: Any) -> Any:
        if is_float(leaf):
            return jnp.asarray(leaf, dtype) if dtype else leaf
        is_short = dtype == "float64" and getattr(leaf, "dtype", None) == np.int32
        return jnp.asarray(leaf, np.int64) if is_short else leaf

    definition, state = nnx.split(module)
    copied = nnx.merge(definition, jax.tree.map(cast, state))
    copied.eval()
    return copied


def resolve(module: Any, path: str) -> tuple[Any, str]:
    """Returns the module at a path, and the method to call: a path may end in a called method."""
    node = module
    parts = path.split(".") if path else []
    for place, part in enumerate(parts):
        if place == len(parts) - 1 and part in called_methods(type(node)):
            return node, part
        node = node[int(part)] if part.isdigit() else getattr(node, part)
    return node, "__call__"


def parameters_of(module: Any) -> dict[str, Any]:
    """Returns the module's parameters by path; the module may hold other state too."""
    state = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {join_path(path): variable[...] for path, variable in state}


def dtype_of(module: Any) -> str:
    """Returns the dtype of the module's first parameter, or float32 if it has none."""
    for value in parameters_of(module).values():
        return str(value.dtype)
    return "float32"
