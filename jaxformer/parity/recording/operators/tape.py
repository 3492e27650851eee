"""The operators of one run, in order, with their values."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.hardware.memory import release_freed
from jaxformer.parity.recording.operators.graph import Operator, Recent, Run, Value

# The C library keeps freed memory that fits no other array; what may be much after so many bytes.
RELEASED_AFTER = 1 << 28


class Tape:
    """The operators and values of one run.

    Attributes:
        values: all of them, in the order in which they were made.
        operators: all of them, in the order of the run.
        inputs: values of the arguments.
        argument_names: of those that were given in order, by their places, where that is known.
        parameters: values of the parameters, by path.
        buffers: values of named constants, by path.
        outputs: float values that the run returned, in order.
        output_names: their paths in the result.
        choices: by path, the integers and truth values that the run returned.
        opaque: names of operators that cannot be computed in float64.
        recent: the arrays that are there of values which may be forgotten.

    Args:
        observe: called with each new value, before any operator reads it; it may replace the data,
            and the value may be forgotten afterwards.
        recent: that of another tape; default one of its own.
    """

    def __init__(
        self, observe: Callable[[Value], None] | None = None, recent: Recent | None = None
    ) -> None:
        self._observe = observe
        self._recorded = 0
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.inputs: list[Value] = []
        self.argument_names: Mapping[str, str] = {}
        self.parameters: dict[str, Value] = {}
        self.buffers: dict[str, Value] = {}
        self.outputs: list[Value] = []
        self.output_names: list[str] = []
        self.choices: dict[str, Value] = {}
        self.opaque: set[str] = set()
        self.recent = Recent() if recent is None else recent

    def add(self, data: Any, kind: str, name: str = "") -> Value:
        """Returns a new value that no operator made."""
        value = Value(len(self.values), np.asarray(data), None, kind, name)
        value.is_constant = kind == "constant"
        value.is_weight = kind == "parameter"
        value.is_table = not value.is_weight and (value.is_constant or value.dtype.kind != "f")
        self.values.append(value)
        if kind == "input":
            self.inputs.append(value)
        elif kind == "parameter":
            self.parameters[name] = value
        elif name:
            self.buffers[name] = value
        if self._observe is not None:
            self._observe(value)
        return value

    def record(
        self, name: str, inputs: list[Value], arrays: Sequence[Any], run: Run, **about: Any
    ) -> list[Value]:
        """Adds an operator that has been run, and returns its values."""
        self._release(arrays)
        operator = Operator(len(self.operators), name, inputs, [], run, **about)
        self.operators.append(operator)
        is_constant = all(value.is_constant for value in inputs)
        is_weight = not is_constant and all(v.is_constant or v.is_weight for v in inputs)
        is_table = all(value.is_table for value in inputs)
        for array in arrays:
            value = Value(len(self.values), np.asarray(array), operator)
            value.is_constant, value.is_weight = is_constant, is_weight
            value.is_table = is_table
            self.values.append(value)
            operator.outputs.append(value)
            if self._observe is not None:
                self._observe(value)
                if value.is_quick and not value.stands_for_another:
                    self.recent.keep_for_a_while(value)
        for value in inputs:
            value.consumers.append(operator)
        return operator.outputs

    def derive(
        self,
        name: str,
        inputs: list[Value],
        shape: tuple[int, ...],
        make: Callable[..., np.ndarray],
        module: str = "",
    ) -> Value:
        """Adds a value of floats that is made of others when it is read.

        Args:
            name: of the operator that makes it.
            inputs: what it is made of.
            shape: of the value.
            make: returns its array, given those of the inputs.
            module: path of the module that answers for it.
        """
        is_seen = self._observe is not None
        made = make(*(v.data for v in inputs)) if is_seen else np.broadcast_to(0.0, shape)
        value = self.record(name, inputs, [made], lambda *arrays: [make(*arrays)], module=module)[0]
        if not is_seen:
            value.forget(self.recent)
        return value

    def _release(self, arrays: Sequence[Any]) -> None:
        """Returns to the system, now and then, the memory of arrays that were forgotten."""
        self._recorded += sum(np.asarray(array).nbytes for array in arrays)
        if self._recorded > RELEASED_AFTER:
            self._recorded = 0
            release_freed()

    def forget_gradient(self, value: Value) -> None:
        """Lets go of the gradient of a parameter when others are read."""
        for one in value.mark_as_gradient():
            if one.is_quick and not one.stands_for_another:
                self.recent.keep_for_a_while(one)

    def ancestors(self, values: Iterable[Value]) -> set[int]:
        """Returns the indices of values, and of all values that they depend on."""
        found = {value.index for value in values}
        for operator in reversed(self.operators):
            if any(value.index in found for value in operator.outputs):
                found |= {value.index for value in operator.inputs}
        return found
