"""Models whose weights are stored in int8 or bfloat16, to be read faster while text is written."""

import copy
from typing import TypeVar

import torch
from torch import nn
from torch.nn import functional

from torch_ref.adapters import LoRALinear
from torch_ref.convolutions import FrameConvolution
from torch_ref.experts import Router
from torch_ref.layers import Linear
from torch_ref.patches import PatchEmbedding

LARGEST_INT8 = 127
# Modules whose layers keep their dtype.
KEPT = FrameConvolution | PatchEmbedding | Router

M = TypeVar("M", bound=nn.Module)


class NarrowLinear(nn.Module):
    """Computes y = scale ⊙ (x Wᵀ) + b, with ``weight`` W (out_features, in_features) as stored.

    W is int8 with a ``scale`` (out_features,) of each output, or bfloat16 without one. The weight
    is widened to the dtype of x and scaled; the product is that of a linear layer.

    >>> layer = NarrowLinear(torch.ones((5, 3), dtype=torch.int8), torch.ones(5), None)
    >>> tuple(layer(torch.ones(2, 7, 3)).shape)
    (2, 7, 5)
    """

    weight: torch.Tensor
    scale: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None):
        super().__init__()
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` (…, in_features), projected (…, out_features)."""
        wide = self.weight.to(x.dtype)
        if self.scale is not None:
            wide = wide * self.scale.to(x.dtype)[:, None]
        return functional.linear(x, wide, self.bias)


def round_to_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the nearest int8 numbers and the scale of each output: weight ≈ int8 · scale.

    A scale is the largest magnitude of its row over 127; a row of zeros has 1.
    """
    scale = weight.abs().amax(dim=1) / LARGEST_INT8
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    steps = torch.round(weight / scale[:, None])
    return steps.clamp(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scale


@torch.no_grad()
def narrow_weights(module: M, dtype: str) -> M:
    """Returns a copy of a model with the weights of its linear layers stored in ``dtype``.

    Experts, their routers and convolutions keep their dtype. Adapters are added to the weights
    that they adapt.
    """
    narrow = copy.deepcopy(module).eval()
    for owner in list(narrow.modules()):
        if isinstance(owner, KEPT | Linear):
            continue
        for name, layer in list(owner._modules.items()):
            if isinstance(layer, Linear):
                owner._modules[name] = _narrow_linear(layer, dtype)
    return narrow


def _narrow_linear(layer: Linear, dtype: str) -> NarrowLinear:
    weight = layer.weight
    if isinstance(layer, LoRALinear):
        weight = weight + layer.alpha / layer.rank * (layer.lora_b.weight @ layer.lora_a.weight)
    bias = None if layer.bias is None else layer.bias.detach()
    if dtype == "bfloat16":
        return NarrowLinear(weight.detach().to(torch.bfloat16), None, bias)
    return NarrowLinear(*round_to_int8(weight.detach()), bias)
