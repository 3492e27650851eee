"""Normalisation over the last dimension, computed in float32 or wider and rounded once.

Derivatives are written out: from a norm's result y and its factor r, which is what torch's kernels
keep too. What JAX derives by itself keeps more and passes over it more often: 1 to 5 % of a step.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.execution import called_norms
from jaxformer.execution.gpu_shapes import compute_once
from jaxformer.layers import widen


class LayerNorm(nnx.Module):
    """Computes (x - mean) / sqrt(variance + eps) · scale + bias (arXiv 1607.06450, eq. 4).

    The variance is the mean square distance from the mean, as in PyTorch.

    Args:
        features: D, or the last dimensions of x, such as (N, H): then scale and bias have this
            shape, one row a head, and mean and variance are still those of the last dimension.
        eps: PyTorch's default 1e-5; Flax's is 1e-6.
        use_bias: whether there is a bias.
        use_scale: whether there is a scale (OLMo, arXiv 2402.00838, has none).
        unit_offset: the factor is 1 + scale, and scale starts at zero (Nemotron, arXiv 2402.16819).

    Raises:
        ValueError: unit_offset without a scale.
    """

    def __init__(
        self,
        features: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        use_bias: bool = True,
        use_scale: bool = True,
        unit_offset: bool = False,
    ):
        self.eps = eps
        self.unit_offset = unit_offset
        self.scale = _scale(features, use_scale, unit_offset)
        self.bias = nnx.Param(jnp.zeros(features)) if use_bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x normalised over its last dimension, in its dtype."""
        wide = widen(x)
        factor = _factor(self.scale, self.unit_offset, wide)
        bias = None if self.bias is None else self.bias[...].astype(wide.dtype)
        if called_norms.fits(x, factor, bias):
            return called_norms.norm(x, factor, bias, eps=self.eps, centres=True)
        y = _standardize(wide, self.eps)
        if factor is not None:
            y = y * _like(factor, wide)
        if bias is not None:
            y = y + _like(bias, wide)
        return y.astype(x.dtype)


class RMSNorm(nnx.Module):
    """Computes x / sqrt(mean(x²) + eps) · scale (arXiv 1910.07467, eq. 4).

    With ``unit_offset`` the factor is 1 + scale, and scale starts at zero (Gemma, arXiv
    2403.08295): the same norm, whose parameter weight decay would draw to one, not to zero. The
    arguments are those of ``LayerNorm``.
    """

    def __init__(
        self,
        features: int | tuple[int, ...],
        *,
        eps: float = 1e-5,
        use_scale: bool = True,
        unit_offset: bool = False,
    ):
        self.eps = eps
        self.unit_offset = unit_offset
        self.scale = _scale(features, use_scale, unit_offset)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x normalised over its last dimension, in its dtype."""
        wide = widen(x)
        factor = _factor(self.scale, self.unit_offset, wide)
        if called_norms.fits(x, factor):
            return called_norms.norm(x, factor, None, eps=self.eps, centres=False)
        y = _divide_by_rms(wide, self.eps)
        return (y if factor is None else y * _like(factor, wide)).astype(x.dtype)


class LayerScale(nnx.Module):
    """Multiplies each feature of what a branch adds by a trained factor (arXiv 2103.17239, eq. 8).

    It stands where a norm of the branch's output would.

    Args:
        features: D.
        initial: what ``scale`` starts at.
    """

    def __init__(self, features: int, *, initial: float = 1.0):
        self.initial = initial
        self.scale = nnx.Param(jnp.full((features,), initial))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x · scale, in the dtype of x."""
        wide = widen(x)
        return (wide * _like(self.scale[...].astype(wide.dtype), wide)).astype(x.dtype)


class NoNorm(nnx.Module):
    """Leaves its input as it is: in place of a norm that a block has not."""

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Returns x."""
        return x


def norm_beside(
    norm: Callable[[Array], Array], x: Float[Array, "... D"]
) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
    """Returns x, for what goes on beside a norm, and norm(x).

    Where norms are custom calls, one makes the gradient of the norm and adds the other to it.
    """
    if isinstance(norm, LayerNorm | RMSNorm):
        wide = widen(x)
        bias = norm.bias if isinstance(norm, LayerNorm) else None
        factor = _factor(norm.scale, norm.unit_offset, wide)
        given = factor, None if bias is None else bias[...].astype(wide.dtype)
        if called_norms.fits(x, *given):
            centres = isinstance(norm, LayerNorm)
            return called_norms.norm_beside(x, *given, eps=norm.eps, centres=centres)
    return x, norm(x)


def make_norm(
    kind: str,
    features: int | tuple[int, ...],
    *,
    eps: float,
    use_bias: bool,
    use_scale: bool = True,
    unit_offset: bool = False,
) -> LayerNorm | RMSNorm:
    """Returns the norm of this kind, ``layer_norm`` or ``rms_norm``, which never has a bias.

    Raises:
        ValueError: the kind is unknown, or unit_offset is wanted without a scale.
    """
    scaling = {"use_scale": use_scale, "unit_offset": unit_offset}
    if kind == "layer_norm":
        return LayerNorm(features, eps=eps, use_bias=use_bias, **scaling)
    if kind == "rms_norm":
        return RMSNorm(features, eps=eps, **scaling)
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
    centred = x - compute_once(_mean(x))
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


def _scale(
    features: int | tuple[int, ...], use_scale: bool, unit_offset: bool
) -> nnx.Param[Array] | None:
    if unit_offset and not use_scale:
        raise ValueError("unit_offset needs a scale: got use_scale=False")
    if not use_scale:
        return None
    return nnx.Param(jnp.zeros(features) if unit_offset else jnp.ones(features))


def _factor(
    scale: nnx.Param[Array] | None, unit_offset: bool, x: Float[Array, "... D"]
) -> Float[Array, "..."] | None:
    """What x is multiplied by, in its dtype."""
    if scale is None:
        return None
    factor = scale[...].astype(x.dtype)
    return 1 + factor if unit_offset else factor


def _like(parameter: Float[Array, "..."], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The parameter in x's rank, so that it broadcasts explicitly."""
    return parameter.reshape((1,) * (x.ndim - parameter.ndim) + parameter.shape)
