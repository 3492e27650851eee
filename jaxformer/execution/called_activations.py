"""GELU as a custom call, for runs on a CPU whose products are custom calls too.

For the backward pass its slope is made in the forward pass, from what both have in common. XLA
makes the two in passes of their own, and the common part twice.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution.called_products import wanted_library
from jaxformer.hardware import activation_calls

# Fewer numbers take no longer in XLA than a call.
FEWEST_NUMBERS = 4096


def fits(x: Float[Array, "..."]) -> bool:
    """Returns whether GELU of these numbers is to be a custom call, and can be one."""
    is_wanted = x.size >= FEWEST_NUMBERS and wanted_library(x) is not None
    return is_wanted and activation_calls.are_known()


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def gelu(x: Float[Array, "..."], root: float = 0.0) -> Float[Array, "..."]:
    """Computes x Φ(x), or with a root x s(2 root (x + 0.044715 x³)) (arXiv 1606.08415, section 2).

    s is the logistic function. It is differentiated backward alone.

    Args:
        x: what ``fits``.
        root: about sqrt(2/π); 0 is exact.
    """
    (y,) = _call(activation_calls.GELU, 1, x, root)
    return y


def _gelu_forward(x: Array, root: float) -> tuple[Array, Array]:
    y, slope = _call(activation_calls.GELU_AND_SLOPE, 2, x, root)
    return y, slope


def _call(target: str, count: int, x: Array, root: float) -> list[Array]:
    results = [jax.ShapeDtypeStruct((x.size,), jnp.float32)] * count
    call = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    return [y.reshape(x.shape) for y in call(x.reshape(-1), np.array([root], np.float32))]


gelu.defvjp(_gelu_forward, lambda _, slope, dy: (dy * slope,))
