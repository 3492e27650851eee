"""Norms as custom calls, for runs on a CPU whose products are custom calls too.

XLA makes several passes over the rows of a norm: for each sum, and for what follows from it. The
call (``hardware.norm_calls``) finishes a row while it is in a core's cache.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxformer.execution.called_products import wanted_library
from jaxformer.execution.float_calls import call_for_floats
from jaxformer.hardware import norm_calls

# Fewer numbers take no longer in XLA than a call.
FEWEST_NUMBERS = 4096


def fits(x: Float[Array, "... D"], *parameters: Float[Array, "..."] | None) -> bool:
    """Returns whether the norm of these rows is to be a custom call, and can be one.

    Args:
        x: what is normalised over its last dimension.
        parameters: factor and bias, where there are any.
    """
    given = [p for p in parameters if p is not None]
    has_size = x.size >= FEWEST_NUMBERS and all(p.shape == x.shape[-1:] for p in given)
    return has_size and wanted_library(x, *given) is not None and norm_calls.are_known()


def norm(
    x: Float[Array, "... D"],
    factor_D: Float[Array, "D"] | None,
    bias_D: Float[Array, "D"] | None,
    *,
    eps: float,
    centres: bool,
) -> Float[Array, "... D"]:
    """Computes (x - m) / sqrt(mean((x - m)²) + eps) · factor + bias, in float32.

    Where it centres, m is the mean of the row (arXiv 1607.06450, eq. 4), else 0 (arXiv 1910.07467,
    eq. 4). It is differentiated backward alone.

    Args:
        x: what ``fits``.
        factor_D: by feature; None for 1.
        bias_D: by feature; None for 0.
        eps: beside the variance.
        centres: whether rows are centred.
    """
    arguments = _arguments(x, factor_D, bias_D)
    return jnp.reshape(_norm((eps, float(centres)), *arguments), x.shape)


def norm_beside(
    x: Float[Array, "... D"],
    factor_D: Float[Array, "D"] | None,
    bias_D: Float[Array, "D"] | None,
    *,
    eps: float,
    centres: bool,
) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
    """Returns x, for what goes on beside the norm, and the norm of x.

    One call makes the gradient of the norm and adds that of what goes on. Arguments as of ``norm``.
    """
    arguments = _arguments(x, factor_D, bias_D)
    passed, y = _norm_beside((eps, float(centres)), *arguments)
    return jnp.reshape(passed, x.shape), jnp.reshape(y, x.shape)


def _arguments(
    x: Float[Array, "... D"], *parameters: Float[Array, "D"] | None
) -> tuple[Array, Array, Array]:
    factor, bias = (jnp.zeros(0, jnp.float32) if p is None else p for p in parameters)
    return jnp.reshape(x, (-1, x.shape[-1])), factor, bias


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(settings: tuple[float, float], x_RD: Array, factor: Array, bias: Array) -> Array:
    return _norm_and_moments(settings, x_RD, factor, bias)[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_beside(
    settings: tuple[float, float], x_RD: Array, factor: Array, bias: Array
) -> tuple[Array, Array]:
    return x_RD, _norm_and_moments(settings, x_RD, factor, bias)[0]


def _norm_and_moments(
    settings: tuple[float, float], x_RD: Array, factor: Array, bias: Array
) -> tuple[Array, Array]:
    """The result; and of each row what is taken away, and what it is multiplied by."""
    shapes = [x_RD.shape, (len(x_RD), 2)]
    y_RD, moments_R2 = call_for_floats(
        norm_calls.NORM, shapes, x_RD, factor, bias, np.array(settings, np.float32)
    )
    return y_RD, moments_R2


def _norm_forward(
    settings: tuple[float, float], x_RD: Array, factor: Array, bias: Array
) -> tuple[Array, tuple[Array, ...]]:
    y_RD, moments_R2 = _norm_and_moments(settings, x_RD, factor, bias)
    return y_RD, (x_RD, factor, bias, moments_R2)


def _norm_beside_forward(
    settings: tuple[float, float], x_RD: Array, factor: Array, bias: Array
) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    y_RD, kept = _norm_forward(settings, x_RD, factor, bias)
    return (x_RD, y_RD), kept


def _norm_back(
    settings: tuple[float, float], kept: tuple[Array, ...], dy_RD: Array
) -> tuple[Array, ...]:
    return _gradients(settings, kept, jnp.zeros(0, jnp.float32), dy_RD)


def _norm_beside_back(
    settings: tuple[float, float], kept: tuple[Array, ...], gradients: tuple[Array, Array]
) -> tuple[Array, ...]:
    return _gradients(settings, kept, *gradients)


def _gradients(
    settings: tuple[float, float], kept: tuple[Array, ...], beside: Array, dy_RD: Array
) -> tuple[Array, ...]:
    """Those of rows, factor and bias; ``beside`` is what rows have besides, or empty."""
    x_RD, factor, bias, moments_R2 = kept
    shapes = [x_RD.shape, factor.shape, bias.shape]
    arguments = x_RD, factor, bias, np.array(settings, np.float32), moments_R2, dy_RD, beside
    # The gradient of the rows is written in place of that of the result.
    return call_for_floats(norm_calls.NORM_BACK, shapes, *arguments, replaces={5: 0})


_norm.defvjp(_norm_forward, _norm_back)
_norm_beside.defvjp(_norm_beside_forward, _norm_beside_back)
