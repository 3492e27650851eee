"""Low-rank adapters of linear layers: LoRA (Hu et al., arXiv 2106.09685)."""

from collections.abc import Sequence

import torch

from torch_ref.layers import Dropout, Linear


class LoRALinear(Linear):
    """Computes y = x Wᵀ + b + (alpha / rank) · dropout(x) Aᵀ Bᵀ (arXiv 2106.09685, section 4.1).

    ``lora_a`` A (rank, in_features) starts as the weights of ``torch.nn.Linear`` do and ``lora_b``
    B (out_features, rank) at zero, as in PEFT, so that a new adapter changes nothing. W and b are
    those of the layer that it adapts, and are not trained.

    >>> tuple(LoRALinear(3, 5, rank=2, alpha=4.0)(torch.ones(2, 7, 3)).shape)
    (2, 7, 5)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        use_bias: bool = True,
    ):
        super().__init__(in_features, out_features, use_bias=use_bias)
        self.rank, self.alpha = rank, alpha
        self.lora_dropout = Dropout(dropout)
        self.lora_a = Linear(in_features, rank, use_bias=False)
        self.lora_b = Linear(rank, out_features, use_bias=False)
        torch.nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns ``x`` (…, in_features), projected (…, out_features)."""
        change = self.lora_b(self.lora_a(self.lora_dropout(x)))
        y: torch.Tensor = super().forward(x)
        return y + change * (self.alpha / self.rank)


def add_adapters(
    module: torch.nn.Module, targets: Sequence[str], *, rank: int, alpha: float, dropout: float
) -> None:
    """Puts a ``LoRALinear`` around every linear layer of these names, with its weights."""
    for owner in list(module.modules()):
        for name in targets:
            layer = owner._modules.get(name)
            if not isinstance(layer, Linear):
                continue
            adapted = LoRALinear(
                layer.in_features,
                layer.out_features,
                rank=rank,
                alpha=alpha,
                dropout=dropout,
                use_bias=layer.bias is not None,
            )
            adapted.weight, adapted.bias = layer.weight, layer.bias
            setattr(owner, name, adapted)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is one of an adapter, by its path."""
    return ".lora_a." in name or ".lora_b." in name


def trained_parameters(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns what training changes: adapters where there are any, else all parameters."""
    named = dict(module.named_parameters())
    adapters = {name: parameter for name, parameter in named.items() if is_adapter(name)}
    return adapters or named


def merge_adapters(parameters: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Returns the parameters of the same model without adapters: weights W + scale · B A.

    Args:
        parameters: by path.
        scale: alpha / rank.
    """
    merged = {name: value for name, value in parameters.items() if not is_adapter(name)}
    for name, a in parameters.items():
        owner, found, _ = name.partition(".lora_a.")
        if found:
            change = scale * (parameters[f"{owner}.lora_b.weight"] @ a)
            merged[f"{owner}.weight"] = merged[f"{owner}.weight"] + change
    return merged
