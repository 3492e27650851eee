"""What runs over devices, ``jax.shard_map`` and ``jax.pmap``, on one device.

There each axis of the mesh has one entry: the function inside is called on whole arrays, and what
its operators exchange is what they were given, as a sum over one device is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxformer.errors import UsageError

# Operators that exchange numbers; on one device their results have the numbers of what they read.
COLLECTIVES = {
    "psum", "psum_invariant", "unreduced_psum", "preduced", "pmax", "pmin", "pvary", "pbroadcast",
    "ppermute", "all_to_all", "all_gather", "all_gather_invariant", "all_gather_reduced",
    "reduce_scatter", "unreduced_reduce_scatter", "vary_unreduced_cast_p",
}  # fmt: skip


def inside_shard_map(equation: Any) -> Any:
    """Returns the jaxpr of what ``jax.shard_map`` calls.

    Raises:
        UsageError: it calls that on several devices.
    """
    count = equation.params["mesh"].size
    if count > 1:
        raise UsageError(
            f"jax.shard_map or jax.pmap runs the candidate on {count} devices: give it one device, "
            "jax.devices()[:1], to compare it"
        )
    return equation.params["jaxpr"]


def on_one_device(equation: Any) -> Callable[..., Sequence[Any]] | None:
    """Returns what an operator that exchanges numbers computes, None of any other operator."""
    name = equation.primitive.name
    if name == "axis_index":
        return lambda: [np.int32(0)]
    if name not in COLLECTIVES:
        return None
    shapes = [atom.aval.shape for atom in equation.outvars]
    is_sent = name != "ppermute" or equation.params["perm"]
    # Those that ``jax.vmap`` has named are axes of the arrays.
    axes = tuple(axis for axis in equation.params.get("axes", ()) if isinstance(axis, int))
    if axes:
        return lambda *arrays: [getattr(array, name.removeprefix("p"))(axes) for array in arrays]

    def run(*arrays: Any) -> Sequence[Any]:
        # What is sent to nobody arrives as zeros. An axis of one entry may be added or taken away.
        pairs = zip(arrays, shapes, strict=True)
        return [(array if is_sent else 0 * array).reshape(shape) for array, shape in pairs]

    return run
