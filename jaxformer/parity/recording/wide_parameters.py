"""PyTorch models whose parameters become float64 when they are read, and only then.

All weights of a large model in float64 would be the largest thing in memory.
"""

import contextlib
import copy
from collections.abc import Collection, Iterator
from typing import Any

from jaxformer.parity.recording.torch_values import finish_float64, is_float


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
def wide_parameters(
    module: Any, leaves: dict[int, Any] | None = None, buffers: Collection[int] = ()
) -> Iterator[None]:
    """Gives a model's code its parameters in float64, inside the ``with`` block.

    Args:
        module: the model.
        leaves: collects, by the identity of each parameter that is read, the tensor that stands for
            it and needs a gradient; None for a run without gradients.
        buffers: identities of buffers that are treated like parameters.
    """
    before = [(inner, "_parameters", inner._parameters) for inner in module.modules()]
    before += [
        (inner, "_buffers", inner._buffers)
        for inner in module.modules()
        if any(id(buffer) in buffers for buffer in inner._buffers.values())
    ]
    for inner, kind, own in before:
        asked = {id(x) for x in own.values() if kind == "_parameters" or id(x) in buffers}
        vars(inner)[kind] = _Wide(own, leaves, asked)
    try:
        yield
    finally:
        for inner, kind, own in before:
            vars(inner)[kind] = own


class _Wide(dict[str, Any]):
    """A module's parameters or buffers by name; those whose identities are given in float64."""

    def __init__(self, own: dict[str, Any], leaves: dict[int, Any] | None, asked: Collection[int]):
        super().__init__(own)
        self._leaves, self._asked = leaves, asked

    def _wide(self, parameter: Any) -> Any:
        if not is_float(parameter) or id(parameter) not in self._asked:
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
