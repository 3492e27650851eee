"""Models whose weights are stored in int8 or bfloat16, to be read faster while text is written."""

from typing import Literal, TypeVar, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8

from jaxformer.adapters import LoRALinear
from jaxformer.convolutions import FrameConvolution
from jaxformer.execution import few_rows
from jaxformer.execution.narrow_products import narrow_product
from jaxformer.experts import Router
from jaxformer.layers import Linear, widen
from jaxformer.parameters import join_path, merge, split
from jaxformer.patches import PatchEmbedding

NarrowDtype = Literal["bfloat16", "int8"]
LARGEST_INT8 = 127
# Modules whose layers keep their dtype.
KEPT = FrameConvolution | PatchEmbedding | Router

M = TypeVar("M", bound=nnx.Module)


class NarrowLinear(nnx.Module):
    """Computes y = scale ⊙ (x Wᵀ) + b, with ``weight`` W (out_features, in_features) as stored.

    W is int8 with a ``scale`` (out_features,) of each output, or bfloat16 without one. Products are
    made of x as it is and of W in the dtype of x, and are added up in float32 or wider.

    Args:
        weight: W.
        scale: in float32 or wider, or None.
        bias: b (out_features,) in any dtype, or None.

    >>> NarrowLinear(jnp.ones((5, 3), jnp.int8), jnp.ones(5), None)(jnp.ones((2, 7, 3))).shape
    (2, 7, 5)

    In programs that make tokens ``uses_custom_call`` may be set; see ``prepare_few_rows``.
    """

    uses_custom_call = False

    def __init__(self, weight: Array, scale: Array | None, bias: Array | None):
        self.weight = nnx.Param(weight)
        self.scale = None if scale is None else nnx.Param(scale)
        self.bias = None if bias is None else nnx.Param(bias)

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Returns ``x``, of any leading shape, projected; in the dtype of x."""
        rows, weight = jnp.reshape(x, (-1, x.shape[-1])), self.weight[...]
        if self.uses_custom_call and few_rows.fits_call(rows):
            y = few_rows.call_product_by_transposed(rows, weight)
        else:
            y = narrow_product(rows, weight)
        if self.scale is not None:
            y = y * self.scale[...].astype(y.dtype)[None, :]
        if self.bias is not None:
            y = y + self.bias[...].astype(y.dtype)[None, :]
        return jnp.reshape(y.astype(x.dtype), (*x.shape[:-1], y.shape[-1]))


def round_to_int8(
    weight: Float[Array, "O I"],
) -> tuple[Int8[Array, "O I"], Float[Array, "O"]]:
    """Returns the nearest int8 numbers and the scale of each output: weight ≈ int8 · scale.

    A scale is the largest magnitude of its row over 127, in float32 or wider, so that no number is
    off by more than half of it; a row of zeros has 1. Halves are rounded to even. (Symmetric
    vector-wise quantization of weights: Dettmers et al., arXiv 2208.07339, section 2.1 and 3.1.)
    """
    wide = widen(weight)
    scale = jnp.max(jnp.abs(wide), axis=1) / LARGEST_INT8
    scale = jnp.where(scale == 0, jnp.ones_like(scale), scale)
    steps = jnp.round(wide / scale[:, None])
    return jnp.clip(steps, -LARGEST_INT8, LARGEST_INT8).astype(jnp.int8), scale


_round_to_int8 = jax.jit(lambda kernel_IO: round_to_int8(kernel_IO.T))
_round_to_bfloat16 = jax.jit(lambda kernel_IO: kernel_IO.T.astype(jnp.bfloat16))


def narrow_weights(module: M, dtype: str) -> M:
    """Returns a copy of a model with the weights of its linear layers stored in ``dtype``.

    They are used as they are stored, at the precision of the activations; see ``NarrowLinear``.
    Embeddings, also where they are the output head, norms, biases, scales, convolutions, experts
    and their routers keep their dtype and are shared with the model. LoRA adapters are added to
    the weights that they adapt. The copy is for reading and writing text: it is not trained.

    Args:
        module: any model.
        dtype: ``bfloat16`` halves weights in float32; ``int8`` quarters them, with a scale for each
            output, see ``round_to_int8``. A layer that is as narrow already stays as it is.

    Raises:
        ValueError: the dtype is another, or a weight is not finite.
    """
    if dtype not in get_args(NarrowDtype):
        raise ValueError(f"dtype must be {' or '.join(get_args(NarrowDtype))}: got {dtype}")
    narrow: M = merge(*split(module))
    narrow.eval()
    for path, owner in list(nnx.iter_modules(narrow)):
        if isinstance(owner, KEPT | Linear):
            continue
        for name, layer in list(vars(owner).items()):
            if isinstance(layer, Linear):
                setattr(owner, name, _narrow_linear(layer, dtype, join_path((*path, name))))
    return narrow


def is_narrow(module: nnx.Module) -> bool:
    """Returns whether ``narrow_weights`` made the model."""
    return any(isinstance(node, NarrowLinear) for _, node in nnx.iter_modules(module))


def _narrow_linear(layer: Linear, dtype: str, name: str) -> Linear | NarrowLinear:
    kernel = layer.kernel[...]
    if isinstance(layer, LoRALinear):
        change = layer.lora_a.kernel[...] @ layer.lora_b.kernel[...]
        kernel = kernel + (layer.alpha / layer.rank) * change
    elif kernel.dtype.itemsize <= jnp.dtype(dtype).itemsize:
        return layer
    bias = None if layer.bias is None else layer.bias[...]
    if dtype == "bfloat16":
        return NarrowLinear(_round_to_bfloat16(kernel), None, bias)
    weight, scale = _round_to_int8(kernel)
    if not bool(jnp.all(jnp.isfinite(scale))):
        raise ValueError(f"{name}.kernel has numbers that are not finite, which int8 cannot hold")
    return NarrowLinear(weight, scale, bias)
