"""Normalisation over the last dimension, computed in float32 or wider and rounded once."""

import torch
from torch import nn
from torch.nn import functional


class LayerNorm(nn.Module):
    """Computes (x - mean) / sqrt(variance + eps) · weight + bias (arXiv 1607.06450, eq. 4).

    The variance is the mean square distance from the mean.

    Args:
        features: D, or the last dimensions of x, such as (N, H): then weight and bias have this
            shape, one row a head, and mean and variance are still those of the last dimension.
        eps: see the formula.
        use_bias: whether there is a bias.
        use_scale: whether there is a weight (OLMo, arXiv 2402.00838, has none).
        unit_offset: the factor is 1 + weight, and weight starts at zero (Nemotron, arXiv
            2402.16819).

    Raises:
        ValueError: unit_offset without a weight.
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
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = _weight(features, use_scale, unit_offset)
        self.bias = nn.Parameter(torch.zeros(features)) if use_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (…, D) normalised over its last dimension, in its dtype."""
        if self.weight is not None and self.weight.ndim == 1 and not self.unit_offset:
            # torch.nn.LayerNorm's kernel widens bfloat16 to float32 by itself.
            return functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        y = functional.layer_norm(wide, wide.shape[-1:], eps=self.eps)
        y = _scaled(y, self.weight, self.unit_offset)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y.to(x.dtype)


class RMSNorm(nn.Module):
    """Computes x / sqrt(mean(x²) + eps) · weight (arXiv 1910.07467, eq. 4).

    With ``unit_offset`` the factor is 1 + weight, and weight starts at zero (Gemma, arXiv
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
        super().__init__()
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = _weight(features, use_scale, unit_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (…, D) normalised over its last dimension, in its dtype."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean_square = wide.square().mean(dim=-1, keepdim=True)
        y = wide * torch.rsqrt(mean_square + self.eps)
        return _scaled(y, self.weight, self.unit_offset).to(x.dtype)


class LayerScale(nn.Module):
    """Multiplies each feature of what a branch adds by a trained factor (arXiv 2103.17239, eq. 8).

    It stands where a norm of the branch's output would.

    Args:
        features: D.
        initial: what ``weight`` starts at.
    """

    def __init__(self, features: int, *, initial: float = 1.0):
        super().__init__()
        self.initial = initial
        self.weight = nn.Parameter(torch.full((features,), initial))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x (…, D) · weight, in the dtype of x."""
        return x * self.weight


class NoNorm(nn.Module):
    """Leaves its input as it is: in place of a norm that a block has not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x."""
        return x


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


def _weight(
    features: int | tuple[int, ...], use_scale: bool, unit_offset: bool
) -> nn.Parameter | None:
    if unit_offset and not use_scale:
        raise ValueError("unit_offset needs a scale: got use_scale=False")
    if not use_scale:
        return None
    return nn.Parameter(torch.zeros(features) if unit_offset else torch.ones(features))


def _scaled(y: torch.Tensor, weight: nn.Parameter | None, unit_offset: bool) -> torch.Tensor:
    if weight is None:
        return y
    factor = weight.to(y.dtype)
    return y * (1 + factor if unit_offset else factor)
