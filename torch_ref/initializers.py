"""Initial weights, with the distributions of ``torch.nn.init``.

``fan_in`` is the number of inputs of a linear layer, ``fan_out`` that of its outputs. An
initializer fills a tensor in place, from a generator or from torch's global one, and returns it.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

Initializer = Callable[[torch.Tensor, torch.Generator | None], torch.Tensor]


def uniform(bound: float) -> Initializer:
    """Returns the initializer of U(-bound, bound)."""
    return lambda tensor, generator: nn.init.uniform_(tensor, -bound, bound, generator=generator)


def normal(std: float) -> Initializer:
    """Returns the initializer of N(0, std²)."""
    return lambda tensor, generator: nn.init.normal_(tensor, std=std, generator=generator)


def constant(value: float) -> Initializer:
    """Returns the initializer of a constant; nothing is drawn."""
    return lambda tensor, generator: nn.init.constant_(tensor, value)


def kaiming_uniform(fan_in: int, negative_slope: float = 0.0) -> Initializer:
    """Returns U(-b, b) with b = sqrt(6 / ((1 + negative_slope²) · fan_in)) (arXiv 1502.01852).

    ``torch.nn.init.kaiming_uniform_`` with ``a=negative_slope``.
    """
    return uniform(math.sqrt(6 / ((1 + negative_slope**2) * fan_in)))


def xavier_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Returns U(-b, b) with b = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010, eq. 16)."""
    return uniform(math.sqrt(6 / (fan_in + fan_out)))


def torch_linear(fan_in: int) -> tuple[Initializer, Initializer]:
    """Returns the initializers of torch.nn.Linear's weight and bias, U(±1/sqrt(fan_in)) both."""
    return kaiming_uniform(fan_in, math.sqrt(5)), uniform(1 / math.sqrt(fan_in))


def initialize(
    module: nn.Module, scheme: str, num_layers: int, generator: torch.Generator | None = None
) -> None:
    """Draws every parameter of ``module`` anew, in place, by the named scheme.

    - ``gpt2``: weights and embeddings N(0, 0.02²), the last projection of each residual branch
      (``o_proj``, ``down_proj``) N(0, 0.02² / (2·num_layers)), biases zero (GPT-2; nanoGPT).
    - ``torch``: what the constructors draw. Nothing is changed, unless a generator is given: then
      the same distributions are drawn from it.
    - ``xavier_uniform``: that distribution for every parameter of two or more dimensions, biases as
      constructed (``torch.nn.Transformer``).
    - ``kaiming_uniform``, ``normal`` (std 0.02): likewise, biases zero.

    Norm weights are left as constructed in every scheme: at one, or at zero where one is added. So
    are the two numbers of an ``XIELU``, the biases of a ``Router``'s choice and attention's sinks.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme == "torch" and generator is None:
        return
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            if name == "bias":
                init = _bias(scheme, owner)
            elif parameter.ndim == 1 or hasattr(owner, "eps"):
                continue
            else:
                init = _weight(scheme, path, owner, parameter, num_layers)
            init(parameter, generator)


def _bias(scheme: str, owner: nn.Module) -> Initializer:
    if scheme in ("torch", "xavier_uniform") and _is_linear(owner):
        return torch_linear(owner.get_parameter("weight").shape[-1])[1]
    return constant(0)


def _is_linear(owner: nn.Module) -> bool:
    """Whether it multiplies by a matrix, or by one of several."""
    weight = getattr(owner, "weight", None)
    return isinstance(owner, nn.Linear) or (weight is not None and weight.ndim == 3)


def _weight(
    scheme: str, path: str, owner: nn.Module, weight: torch.Tensor, num_layers: int
) -> Initializer:
    fan_out, fan_in = weight.shape[-2:]
    if scheme == "torch":
        return torch_linear(fan_in)[0] if _is_linear(owner) else normal(1)
    if scheme == "xavier_uniform":
        return xavier_uniform(fan_in, fan_out)
    if scheme == "kaiming_uniform":
        return kaiming_uniform(fan_in)
    if scheme not in ("gpt2", "normal"):
        raise ValueError(f"unknown initialization {scheme!r}")
    residual = scheme == "gpt2" and path.rpartition(".")[2] in ("o_proj", "down_proj")
    return normal(0.02 / math.sqrt(2 * num_layers) if residual else 0.02)
