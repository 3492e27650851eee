"""Normalisation over the last dimension, computed in float32 or wider and rounded once."""

import torch
from torch import nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """Computes (x - mean) / sqrt(variance + eps) · weight + bias (arXiv 1607.06450, eq. 4).

    The variance is the mean square distance from the mean. ``torch.nn.LayerNorm`` under the
    project's keywords; its kernel widens bfloat16 to float32 by itself.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, use_bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(features))
        self.bias = nn.Parameter(torch.zeros(features)) if use_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (…, D) normalised over its last dimension, in its dtype."""
        return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x²) + eps) · weight (arXiv 1910.07467, eq. 4).

    With ``unit_offset`` the factor is 1 + weight, and weight starts at zero (Gemma, arXiv
    2403.08295): the same norm, whose parameter weight decay would draw to one, not to zero.
    """

    def __init__(self, features: int, *, eps: float = 1e-5, unit_offset: bool = False):
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = nn.Parameter(torch.zeros(features) if unit_offset else torch.ones(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (…, D) normalised over its last dimension, in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        weight = self.weight.to(wide.dtype)
        factor = 1 + weight if self.unit_offset else weight
        y = wide * torch.rsqrt(mean_square + self.eps) * factor
        return y.to(x.dtype)


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
