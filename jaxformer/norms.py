"""Normalisation over the last dimension, computed in float32 or wider and rounded once.

Derivatives are written out: from a norm's result y and its factor r, which is what torch's kernels
keep too. What JAX derives by itself keeps more and passes over it more often: 1 to 5 % of a step.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.layers import widen


class LayerNorm(nnx.Module):
    """Computes (x - mean) / sqrt(variance + eps) · scale + bias (arXiv 1607.06450, eq. 4).

    The variance is the mean square distance from the mean, as in PyTorch; ``eps`` is PyTorch's
    1e-5 (Flax's default is 1e-6).
    """

    def __init__(self, features: int, *, eps: float = 1e-5, use_bias: bool = True):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,)))
        self.bias = nnx.Param(jnp.zeros((features,))) if use_bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x normalised over its last dimension, in its dtype."""
        wide = widen(x)
        y = _standardize(wide, self.eps) * _like(self.scale[...], wide)
        if self.bias is not None:
            y = y + _like(self.bias[...], wide)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Computes x / sqrt(mean(x²) + eps) · scale (arXiv 1910.07467, eq. 4).

    With ``unit_offset`` the factor is 1 + scale, and scale starts at zero (Gemma, arXiv
    2403.08295): the same norm, whose parameter weight decay would draw to one, not to zero.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, unit_offset: bool = False):
        self.eps = eps
        self.unit_offset = unit_offset
        self.scale = nnx.Param(jnp.zeros((features,)) if unit_offset else jnp.ones((features,)))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x normalised over its last dimension, in its dtype."""
        wide = widen(x)
        scale = _like(self.scale[...], wide)
        factor = 1 + scale if self.unit_offset else scale
        y = _divide_by_rms(wide, self.eps) * factor
        return y.astype(x.dtype)


def make_norm(
    kind: str, features: int, *, eps: float, use_bias: bool, unit_offset: bool = False
) -> LayerNorm | RMSNorm:
    """Returns the norm of this kind, ``layer_norm`` or ``rms_norm``.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "layer_norm":
        return LayerNorm(features, eps=eps, use_bias=use_bias)
    if kind == "rms_norm":
        return RMSNorm(features, eps=eps, unit_offset=unit_offset)
    raise ValueError(f"unknown norm {kind!r}")


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _standardize(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Computes (x - mean) / sqrt(variance + eps)."""
    centred = x - _mean(x)
    return centred * jax.lax.rsqrt(_mean(jnp.square(centred)) + eps)


@_standardize.defjvp
def _standardize_jvp(
    eps: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """With y the result and r its factor: dy = r (dx - mean(dx) - y mean(y dx))."""
    (x,), (tangent,) = primals, tangents
    centred = x - _mean(x)
    factor = jax.lax.rsqrt(_mean(jnp.square(centred)) + eps)
    y = centred * factor
    along = _mean(y * tangent)
    return y, factor * (tangent - _mean(tangent) - y * along)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _divide_by_rms(x: Float[Array, "... D"], eps: float) -> Float[Array, "... D"]:
    """Computes x / sqrt(mean(x²) + eps)."""
    return x * jax.lax.rsqrt(_mean(jnp.square(x)) + eps)


@_divide_by_rms.defjvp
def _divide_by_rms_jvp(
    eps: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """With y the result and r its factor: dy = r (dx - y mean(y dx))."""
    (x,), (tangent,) = primals, tangents
    factor = jax.lax.rsqrt(_mean(jnp.square(x)) + eps)
    y = x * factor
    along = _mean(y * tangent)
    return y, factor * (tangent - y * along)


def _mean(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    return jnp.mean(x, axis=-1, keepdims=True)


def _like(parameter: Float[Array, "D"], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The parameter in x's dtype and rank, so that it broadcasts explicitly."""
    return parameter.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
