"""Normalisation over the last dimension, computed in float32 or wider and rounded once."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.layers import widen


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) · scale + bias (Ba et al., arXiv 1607.06450, eq. 4).

    The variance is the mean square distance from the mean, as in PyTorch; ``eps`` is PyTorch's
    1e-5 (Flax's default is 1e-6).
    """

    def __init__(self, features: int, *, eps: float = 1e-5, use_bias: bool = True):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((features,)))
        self.bias = nnx.Param(jnp.zeros((features,))) if use_bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalised x, in its dtype."""
        wide = widen(x)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        y = centred * jax.lax.rsqrt(variance + self.eps) * _like(self.scale[...], wide)
        if self.bias is not None:
            y = y + _like(self.bias[...], wide)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · scale (Zhang and Sennrich, arXiv 1910.07467, eq. 4).

    With ``unit_offset`` the factor is 1 + scale, and scale starts at zero (Gemma, arXiv
    2403.08295): the same norm, whose parameter weight decay would draw to one, not to zero.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, unit_offset: bool = False):
        self.eps = eps
        self.unit_offset = unit_offset
        self.scale = nnx.Param(jnp.zeros((features,)) if unit_offset else jnp.ones((features,)))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """The normalised x, in its dtype."""
        wide = widen(x)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        scale = _like(self.scale[...], wide)
        factor = 1 + scale if self.unit_offset else scale
        y = wide * jax.lax.rsqrt(mean_square + self.eps) * factor
        return y.astype(x.dtype)


def make_norm(
    kind: str, features: int, *, eps: float, use_bias: bool, unit_offset: bool = False
) -> LayerNorm | RMSNorm:
    """The norm that a config names.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind == "layer_norm":
        return LayerNorm(features, eps=eps, use_bias=use_bias)
    if kind == "rms_norm":
        return RMSNorm(features, eps=eps, unit_offset=unit_offset)
    raise ValueError(f"unknown norm {kind!r}")


def _like(parameter: Float[Array, "D"], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The parameter in x's dtype and rank, so that it broadcasts explicitly."""
    return parameter.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))
