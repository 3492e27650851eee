"""A feed-forward with GELU as custom calls, for runs on a CPU with jaxformer's own products.

The product before GELU and GELU itself are one call, and so are, on the way back, the product and
the slopes that follow. What a product has just written is then still in a core's cache. As two
calls, each of them reads and writes arrays that only memory can hold.

The numbers are those of ``called_products`` and ``called_activations``.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution import called_activations, called_products
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.execution.rematerialization import keeps_everything
from jaxformer.hardware import matrix_products

# Torch's products come out of torch's library, which knows of nothing that follows.
LIBRARY: matrix_products.Library = "jaxformer"


def fits(
    x_RD: Float[Array, "R D"],
    up_DF: Float[Array, "D F"],
    bias_F: Float[Array, "F"] | None,
    down_FD: Float[Array, "F D"],
) -> bool:
    """Returns whether the feed-forward of these rows is to be custom calls, and can be."""
    given = [x for x in (x_RD, up_DF, bias_F, down_FD) if x is not None]
    is_wanted = called_products.wanted_library(*given) == LIBRARY and keeps_everything()
    has_size = len(x_RD) >= called_products.FEWEST_ROWS and all(x.size for x in given)
    return (
        is_wanted and has_size and len(x_RD) * up_DF.shape[1] >= called_activations.FEWEST_NUMBERS
    )


def feed_forward(
    x_RD: Float[Array, "R D"],
    up_DF: Float[Array, "D F"],
    bias_F: Float[Array, "F"] | None,
    down_FD: Float[Array, "F D"],
    *,
    root: float,
) -> Float[Array, "R D"]:
    """Computes GELU(x U + b) W (arXiv 1706.03762, eq. 2; 1606.08415, section 2), in float32.

    It is differentiated backward alone.

    Args:
        x_RD: rows that ``fits``.
        up_DF: U.
        bias_F: b; None for 0.
        down_FD: W.
        root: which form of GELU: see ``called_activations.gelu``.
    """
    return _feed_forward(root, x_RD, up_DF, bias_F, down_FD)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _feed_forward(
    root: float, x_RD: Array, up_DF: Array, bias_F: Array | None, down_FD: Array
) -> Array:
    shapes = [(len(x_RD), up_DF.shape[1])]
    (y_RF,) = _call(matrix_products.GELU, shapes, *_arguments(root, x_RD, up_DF, bias_F))
    return called_products.product(LIBRARY, y_RF, down_FD)


def _forward(
    root: float, x_RD: Array, up_DF: Array, bias_F: Array | None, down_FD: Array
) -> tuple[Array, tuple[Array | None, ...]]:
    shapes = [(len(x_RD), up_DF.shape[1])] * 2
    y_RF, slope_RF = _call(
        matrix_products.GELU_AND_SLOPE, shapes, *_arguments(root, x_RD, up_DF, bias_F)
    )
    z_RD = called_products.product(LIBRARY, y_RF, down_FD)
    return z_RD, (x_RD, up_DF, bias_F, down_FD, y_RF, slope_RF)


def _back(root: float, kept: tuple[Array, ...], dz_RD: Array) -> tuple[Array | None, ...]:
    x_RD, up_DF, bias_F, down_FD, y_RF, slope_RF = kept
    shapes = [slope_RF.shape, (0 if bias_F is None else len(bias_F),)]
    dh_RF, db_F = _call(matrix_products.GELU_BACK, shapes, dz_RD, down_FD, slope_RF)
    dx_RD = called_products.product_by_transposed(LIBRARY, dh_RF, up_DF)
    d_up_DF = called_products.product_of_transposed(LIBRARY, x_RD, dh_RF)
    d_down_FD = called_products.product_of_transposed(LIBRARY, y_RF, dz_RD)
    return dx_RD, d_up_DF, None if bias_F is None else db_F, d_down_FD


def _arguments(
    root: float, x_RD: Array, up_DF: Array, bias_F: Array | None
) -> tuple[Array | np.ndarray, ...]:
    bias_F = jnp.zeros(up_DF.shape[1], jnp.float32) if bias_F is None else bias_F
    return x_RD, up_DF, bias_F, np.array([root], np.float32)


def _call(
    form: str, shapes: Sequence[tuple[int, ...]], *arguments: Array | np.ndarray
) -> tuple[Array, ...]:
    return call_for_floats(matrix_products.target(LIBRARY, form), shapes, *arguments)


_feed_forward.defvjp(_forward, _back)
