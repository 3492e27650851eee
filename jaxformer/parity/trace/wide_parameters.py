"""PyTorch models whose parameters become float64 when they are read, and only then.

All weights of a large model in float64 would be the largest thing in memory.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from jaxformer.parity.trace.torch_values import finish_float64, is_float


def with_shared_parameters(module: Any) -> Any:
    """Returns a copy in evaluation mode with the same parameters; its buffers are in float64.

    Run it inside ``wide_parameters``.
    """
    own = copy.deepcopy(module, {id(p): p for p in module.parameters()}).eval()
    for inner in own.modules():
        for name, buffer in inner._buffers.items():
            if is_float(buffer):
                inner._buffers[name] = buffer.double()
    return finish_float64(own)


@contextlib.contextmanager
def wide_parameters(module: Any, leaves: dict[int, Any] | None = None) -> Iterator[None]:
    """Gives a model's code its parameters in float64, inside the ``with`` block.

    Args:
        module: the model.
        leaves: collects, by the identity of each parameter that is read, the tensor that stands for
            it and needs a gradient; None for a run without gradients.
    """
    before = [(inner, inner._parameters) for inner in module.modules()]
    for inner, own in before:
        vars(inner)["_parameters"] = _Wide(own, leaves)
    try:
        yield
    finally:
        for inner, own in before:
            vars(inner)["_parameters"] = own


class _Wide(dict[str, Any]):
    """A module's parameters by name, in float64."""

    def __init__(self, own: dict[str, Any], leaves: dict[int, Any] | None):
        super().__init__(own)
        self._leaves = leaves

    def _wide(self, parameter: Any) -> Any:
        if not is_float(parameter):
            return parameter
        if self._leaves is None:
            return parameter.detach().double()
        if id(parameter) not in self._leaves:
            self._leaves[id(parameter)] = parameter.detach().double().requires_grad_()
        return self._leaves[id(parameter)]

    def __getitem__(self, name: str) -> Any:
        return self._wide(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a parameter in float64."""
        return self._wide(super().get(name, default))

    def values(self) -> Any:
        """Returns the parameters in float64."""
        return [self[name] for name in self]

    def items(self) -> Any:
        """Returns the names, and the parameters in float64."""
        return [(name, self[name]) for name in self]
