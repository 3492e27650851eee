"""What is compared: a model of each side, and inputs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two models, and what they are called with.

    Attributes:
        reference: the PyTorch module.
        candidate: a function of JAX, and its parameters.
        inputs: of the reference.
        jax_inputs: of the candidate; None for the same.
        seen: which positions of the first result are no padding; None for all.
    """

    reference: Any
    candidate: tuple[Callable[..., Any], Any]
    inputs: Mapping[str, np.ndarray]
    jax_inputs: Mapping[str, np.ndarray] | None = None
    seen: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """One configuration of one family.

    Attributes:
        library: name of the package on PyPI.
        family: name of the model.
        name: what is odd about the configuration.
        modes: how the models are called, each with a function that makes a pair.
    """

    library: str
    family: str
    name: str
    modes: Mapping[str, Callable[[], Pair]]


def perturb(model, seed=0, size=0.2):
    """Changes every parameter of a PyTorch module, so that none has a value that hides a bug."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # What is not trained is a table that the other side may compute itself.
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += size * torch.randn(parameter.shape, generator=generator)
    return model.eval()
