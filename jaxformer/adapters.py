"""Low-rank adapters of linear layers: LoRA (Hu et al., arXiv 2106.09685)."""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.layers import Dropout, Linear, in_float32
from jaxformer.parameters import Parameters


class LoRALinear(Linear):
    """Computes y = x W + b + (alpha / rank) · dropout(x) A B (arXiv 2106.09685, section 4.1).

    ``lora_a`` A (in_features, rank) starts as the weights of ``torch.nn.Linear`` do and ``lora_b``
    B (rank, out_features) at zero, as in PEFT, so that a new adapter changes nothing. W and b are
    those of the layer that it adapts, and are not trained.

    >>> from flax import nnx
    >>> LoRALinear(3, 5, rank=2, alpha=4.0, rngs=nnx.Rngs(0))(jnp.ones((2, 7, 3))).shape
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
        rngs: nnx.Rngs,
    ):
        super().__init__(in_features, out_features, use_bias=use_bias, rngs=rngs)
        self.rank, self.alpha = rank, alpha
        self.lora_dropout = Dropout(dropout)
        self.lora_a = Linear(in_features, rank, use_bias=False, rngs=rngs)
        self.lora_b = Linear(rank, out_features, use_bias=False, rngs=rngs)
        self.lora_b.kernel = nnx.Param(jnp.zeros((rank, out_features)))

    def __call__(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """Returns ``x``, of any leading shape, projected; in the dtype of x and of the kernel."""
        change = self.lora_b(self.lora_a(self.lora_dropout(x)))
        return super().__call__(x) + in_float32(lambda y: y * (self.alpha / self.rank), change)


def add_adapters(
    module: nnx.Module,
    targets: Sequence[str],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    rngs: nnx.Rngs,
) -> None:
    """Puts a ``LoRALinear`` around every linear layer of these names, with its weights."""
    for _, owner in list(nnx.iter_modules(module)):
        for name in targets:
            layer = vars(owner).get(name)
            if not isinstance(layer, Linear):
                continue
            adapted = LoRALinear(
                *layer.kernel[...].shape,
                rank=rank,
                alpha=alpha,
                dropout=dropout,
                use_bias=layer.bias is not None,
                rngs=rngs,
            )
            adapted.kernel, adapted.bias = layer.kernel, layer.bias
            setattr(owner, name, adapted)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter is one of an adapter, by its path."""
    return ".lora_a." in name or ".lora_b." in name


def trained_parameters(parameters: Parameters) -> Parameters:
    """Returns what training changes: adapters where there are any, else all parameters."""
    adapters = {name: value for name, value in parameters.items() if is_adapter(name)}
    return adapters or parameters


def merge_adapters(parameters: Parameters, scale: float) -> Parameters:
    """Returns the parameters of the same model without adapters: kernels W + scale · A B.

    Args:
        parameters: by path.
        scale: alpha / rank.
    """
    merged = {name: value for name, value in parameters.items() if not is_adapter(name)}
    for name, a in parameters.items():
        owner, found, _ = name.partition(".lora_a.")
        if found:
            change = scale * (a @ parameters[f"{owner}.lora_b.kernel"])
            kernel = merged[f"{owner}.kernel"]
            merged[f"{owner}.kernel"] = (kernel + change).astype(kernel.dtype)
    return merged
