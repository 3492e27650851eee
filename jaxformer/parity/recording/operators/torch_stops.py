"""Where the code of a PyTorch module stops gradients."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.torch_values import require_torch


class Stops:
    """The places that detach what is read afterwards, or compute without gradients.

    PyTorch itself detaches what it keeps for the backward pass, which no operator of the forward
    pass reads.

    Args:
        source_of: returns "path:line" of the code that is running.

    Attributes:
        sources: "path:line" of each place.
    """

    def __init__(self, source_of: Callable[[], str]):
        self._source_of = source_of
        self.sources: dict[str, None] = {}
        # Where a value was detached last, by its index.
        self._detached: dict[int, str] = {}

    def note(self, operator: Any, tensors: Sequence[Any], values: Sequence[Value]) -> None:
        """Looks at an operator that is about to run, and at what it reads."""
        torch = require_torch()
        if torch._C._current_autograd_node() is not None:
            return
        for tensor, value in zip(tensors, values, strict=True):
            if not tensor.requires_grad:
                self._note_detached(value)
            elif not torch.is_grad_enabled():
                self.sources[self._source_of()] = None
            elif operator is torch.ops.aten.detach.default:
                self._detached[value.index] = self._source_of()

    def _note_detached(self, value: Value) -> None:
        while value.producer is not None and value.producer.name == "detach":
            value = value.producer.inputs[0]
            if value.index in self._detached:
                self.sources[self._detached[value.index]] = None
                return
