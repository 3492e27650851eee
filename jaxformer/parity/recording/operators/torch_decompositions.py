"""PyTorch's compound operators, taken apart so that what is inside can be compared."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxformer.parity.recording.torch_values import require_torch

# These PyTorch takes apart itself.
DECOMPOSED = (
    "addmm", "baddbmm", "linear", "native_layer_norm", "_softmax", "_log_softmax", "silu",
    "hardswish", "mish", "logit", "_fused_rms_norm", "native_batch_norm",
    "_native_batch_norm_legit_no_training",
    # Its kernel has a sixth in float32.
    "hardsigmoid_backward",
)  # fmt: skip


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Returns a function of smaller operators for each operator that is taken apart.

    It returns ``NotImplemented`` of a call that has no smaller ones.
    """
    torch = require_torch()
    from torch._decomp import get_decompositions

    aten = torch.ops.aten
    found = dict(get_decompositions([getattr(aten, n) for n in DECOMPOSED if hasattr(aten, n)]))
    # PyTorch's own way multiplies the deviation into the scale: nothing normalised is left to see.
    found[aten.native_group_norm.default] = _group_norm
    # PyTorch's own way imports its compiler, which takes five seconds.
    found[aten.gelu.default] = _gelu
    found[aten.convolution.default] = _convolution
    found[aten.embedding_dense_backward.default] = _embedding_backward
    found[aten.elu_backward.default] = _elu_backward
    found[aten.polygamma.default] = _polygamma
    # Of the other tensor only the shape is read: the result does not depend on its numbers.
    found[aten.expand_as.default] = lambda x, other: x.expand(other.shape)
    return found


def _convolution(x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
    """Returns a convolution, and then its bias added: the product is seen by itself."""
    if bias is None:
        return NotImplemented
    made = require_torch().ops.aten.convolution.default(x, weight, None, *settings)
    return made + bias.reshape(-1, *(1 for _ in weight.shape[2:]))


def _embedding_backward(
    gradient: Any, ids: Any, count: int, padding: int, by_frequency: bool
) -> Any:
    """Returns the gradient of an embedding, with that of its padding token.

    PyTorch leaves that row out, which no port does: see ``TorchRun.padding_rows``.
    """
    if padding < 0:
        return NotImplemented
    aten = require_torch().ops.aten
    return aten.embedding_dense_backward.default(gradient, ids, count, -1, by_frequency)


def _group_norm(
    x: Any, weight: Any, bias: Any, batch: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    """Returns a group norm, the means and the inverse deviations (Wu and He, 2018, eq. 1 and 6)."""
    grouped = x.reshape(batch, groups, channels // groups, size)
    mean = grouped.mean((2, 3), keepdim=True)
    centred = grouped - mean
    inverse = (centred.square().mean((2, 3), keepdim=True) + eps).rsqrt()
    made = (centred * inverse).reshape(x.shape)
    row = (channels, *(1 for _ in x.shape[2:]))
    made = made if weight is None else made * weight.reshape(row)
    made = made if bias is None else made + bias.reshape(row)
    return made, mean.reshape(batch, groups), inverse.reshape(batch, groups)


def _gelu(x: Any, *, approximate: str = "none") -> Any:
    """Returns the GELU, by erf or by tanh (Hendrycks and Gimpel, 2016, section 2)."""
    if approximate == "none":
        return x * 0.5 * (1 + (x * math.sqrt(0.5)).erf())
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x))
    return x * 0.5 * (1 + inner.tanh())


def _elu_backward(
    gradient: Any, alpha: float, scale: float, input_scale: float, is_result: bool, x: Any
) -> Any:
    """Returns the gradient of an ELU, where it is that of CELU: PyTorch takes 1/α of a float32."""
    narrow = float(np.float32(alpha))
    is_rounded = narrow not in (0, alpha) and input_scale == 1 / narrow
    if input_scale == 1 or not is_rounded:
        return NotImplemented
    aten = require_torch().ops.aten
    return aten.elu_backward.default(gradient, alpha, scale, 1 / alpha, is_result, x)


def _polygamma(n: int, x: Any) -> Any:
    """Returns ψ'(x) = ζ(2, x), of which PyTorch's own kernel has ten digits, in the first order."""
    return require_torch().special.zeta(2.0, x) if n == 1 else NotImplemented
