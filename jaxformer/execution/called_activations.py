"""GELU as a custom call, for runs on a CPU whose products are custom calls too.

For the backward pass its slope is made in the forward pass, from what both have in common. XLA
makes the two in passes of their own, and the common part twice. The bias of the layer before is
added within the call, and its gradient made within the one on the way back. Results are written in
place of what they are made of, which takes less of the memory's time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution.called_products import wanted_library
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.hardware import activation_calls

# Fewer numbers take no longer in XLA than a call.
FEWEST_NUMBERS = 4096


def fits(x: Array | jax.ShapeDtypeStruct, *biases: Float[Array, "F"]) -> bool:
    """Returns whether GELU of these numbers is to be a custom call, and can be one.

    Args:
        x: what it is of, or what that will be like.
        biases: the one that is added before, where there is one.
    """
    is_wanted = x.size >= FEWEST_NUMBERS and wanted_library(x, *biases) is not None
    return is_wanted and activation_calls.are_known()


def gelu(
    x: Float[Array, "*dims F"], bias_F: Float[Array, "F"] | None = None, *, root: float = 0.0
) -> Float[Array, "*dims F"]:
    """Computes y Φ(y) of y = x + bias, or y s(2 root (y + 0.044715 y³)), with the logistic s.

    Both are of arXiv 1606.08415, section 2. It is differentiated backward alone.

    Args:
        x: what ``fits``.
        bias_F: None for 0.
        root: about sqrt(2/π); 0 is exact.
    """
    rows = jnp.reshape(x, (-1, x.shape[-1]))
    bias_F = jnp.zeros(x.shape[-1], jnp.float32) if bias_F is None else bias_F
    return jnp.reshape(_gelu(root, rows, bias_F), x.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gelu(root: float, x_RF: Array, bias_F: Array) -> Array:
    arguments = x_RF, bias_F, _number(root)
    return call_for_floats(activation_calls.GELU, [x_RF.shape], *arguments, replaces={0: 0})[0]


def _gelu_forward(root: float, x_RF: Array, bias_F: Array) -> tuple[Array, Array]:
    shapes, arguments = [x_RF.shape, x_RF.shape], (x_RF, bias_F, _number(root))
    y_RF, slope_RF = call_for_floats(
        activation_calls.GELU_AND_SLOPE, shapes, *arguments, replaces={0: 0}
    )
    return y_RF, slope_RF


def _gelu_back(root: float, slope_RF: Array, dy_RF: Array) -> tuple[Array, ...]:
    shapes = [slope_RF.shape, slope_RF.shape[1:]]
    return call_for_floats(activation_calls.GELU_BACK, shapes, dy_RF, slope_RF, replaces={0: 0})


def _number(root: float) -> np.ndarray:
    return np.array([root], np.float32)


_gelu.defvjp(_gelu_forward, _gelu_back)
