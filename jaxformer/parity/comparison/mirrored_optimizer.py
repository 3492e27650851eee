"""PyTorch's optimizer, for the reference's parameters in the candidate's layout."""

from typing import Any

import numpy as np

from jaxformer.optimizers import decay_mask, hidden_matrices
from jaxformer.parity.recording.torch_values import as_numpy
from jaxformer.porting.mapping.plans import Plan
from jaxformer.porting.mapping.rules import Link


class MirroredOptimizer:
    """Updates the reference's parameters as matrices of the candidate's names and shapes.

    What Muon and Adafactor make of a matrix depends on the whole of it, and the reference may have
    queries, keys and values in one. Which matrices decay, and which are Muon's, is known by name.

    Args:
        module: the reference; its parameters are updated in place.
        plan: how it is ported.
        config: torch_ref's settings of the optimizer.
    """

    def __init__(self, module: Any, plan: Plan, config: Any):
        import torch

        import torch_ref.adapters
        import torch_ref.optimizers

        trained = {id(p) for p in torch_ref.adapters.trained_parameters(module).values()}
        self.sources = {
            name: parameter
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if id(parameter) in trained
        }
        self.links = [link for link in plan.links if self.sources.keys() >= set(link.source)]
        self.mirrored: dict[str, Any] = {}
        for link in self.links:
            values = link.to_target([_numbers(self.sources[name]) for name in link.source])
            for name, value in zip(link.target, values, strict=True):
                self.mirrored[name] = torch.nn.Parameter(torch.tensor(value))
        self.optimizer = torch_ref.optimizers.optimizer_of(
            self.mirrored, decay_mask(self.mirrored), hidden_matrices(self.mirrored), config
        )

    def step(self, learning_rate: float) -> None:
        """Makes one update of every parameter that has a gradient."""
        import torch

        moved = [link for link in self.links if self._take_gradients(link)]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        for link in moved:
            values = link.view_as_source([_numbers(self.mirrored[name]) for name in link.target])
            for name, value in zip(link.source, values, strict=True):
                self.sources[name].data.copy_(torch.tensor(value))

    def _take_gradients(self, link: Link) -> bool:
        """Gives the mirrored parameters their gradients; returns whether there are any."""
        import torch

        sources = [self.sources[name] for name in link.source]
        has_gradient = any(parameter.grad is not None for parameter in sources)
        gradients = link.to_target(
            [np.zeros_like(_numbers(p)) if p.grad is None else _numbers(p.grad) for p in sources]
        )
        for name, gradient in zip(link.target, gradients, strict=True):
            self.mirrored[name].grad = torch.tensor(gradient) if has_gradient else None
        return has_gradient


def _numbers(tensor: Any) -> np.ndarray:
    return as_numpy(tensor.detach())
