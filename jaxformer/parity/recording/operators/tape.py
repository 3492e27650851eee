"""The operators of one run, in order, with their values; parts of it can be run again."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Run = Callable[..., Sequence[Any]]

# Operators that only bring numbers into another shape are no steps.
LAYOUT_ONLY = {
    "reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "view", "unsqueeze",
    "_unsafe_view", "expand", "permute", "t", "clone", "copy", "convert_element_type", "_to_copy",
    "to", "detach", "alias", "slice", "split", "select", "index", "concatenate", "cat", "stack",
}  # fmt: skip


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a run.

    Attributes:
        index: its place on the tape.
        data: the array, on the host; floats in float64.
        producer: the operator that made it; None for inputs, parameters and constants.
        kind: "input", "parameter", "constant", or "" for what an operator made.
        name: of an input or a parameter.
        is_constant: whether it depends on no input and no parameter.
        is_weight: whether it depends on parameters and on no input.
        is_table: whether it depends on no parameter and on no input of floats: what is made of
            positions and constants, which may be rounded to float32.
        consumers: the operators that read it.
    """

    index: int
    data: np.ndarray
    producer: "Operator | None" = None
    kind: str = ""
    name: str = ""
    is_constant: bool = False
    is_weight: bool = False
    is_table: bool = False
    consumers: list["Operator"] = dataclasses.field(default_factory=list)

    @property
    def is_activation(self) -> bool:
        """Whether it depends on an input, and holds floats."""
        return not (self.is_constant or self.is_weight) and self.data.dtype.kind == "f"


@dataclasses.dataclass(eq=False)
class Operator:
    """One operator of a run.

    Attributes:
        index: its place on the tape.
        name: of the primitive of JAX or the ATen operator.
        inputs: the values that it reads.
        outputs: the values that it made.
        run: computes the outputs' arrays from the inputs' arrays.
        source: "path:line" of the code that called it; "" where it is not known.
        caller: "path:line" of what called the function with that code, where it is known.
        module: path or name of the module that called it; "" where it is not known.
        numbers: numbers written into the operator itself, by name of the argument.
    """

    index: int
    name: str
    inputs: list[Value]
    outputs: list[Value]
    run: Run
    source: str = ""
    caller: str = ""
    module: str = ""
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)


class Tape:
    """The operators and values of one run.

    Attributes:
        values: all of them, in the order in which they were made.
        operators: all of them, in the order of the run.
        inputs: values of the arguments.
        parameters: values of the parameters, by path.
        buffers: values of named constants, by path.
        outputs: float values that the run returned, in order.
        opaque: names of operators that cannot be computed in float64.

    Args:
        observe: called with each new value, before any operator reads it; it may replace the data.
    """

    def __init__(self, observe: Callable[[Value], None] | None = None) -> None:
        self._observe = observe
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.inputs: list[Value] = []
        self.parameters: dict[str, Value] = {}
        self.buffers: dict[str, Value] = {}
        self.outputs: list[Value] = []
        self.opaque: set[str] = set()

    def add(self, data: Any, kind: str, name: str = "") -> Value:
        """Returns a new value that no operator made."""
        value = Value(len(self.values), np.asarray(data), None, kind, name)
        value.is_constant = kind == "constant"
        value.is_weight = kind == "parameter"
        value.is_table = not value.is_weight and (value.is_constant or value.data.dtype.kind != "f")
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
        for value in inputs:
            value.consumers.append(operator)
        return operator.outputs

    def ancestors(self, values: Iterable[Value]) -> set[int]:
        """Returns the indices of values, and of all values that they depend on."""
        found = {value.index for value in values}
        for operator in reversed(self.operators):
            if any(value.index in found for value in operator.outputs):
                found |= {value.index for value in operator.inputs}
        return found


def same_numbers(value: Value) -> Value | None:
    """Returns the value whose numbers another one brings into another shape, None if it is none."""
    producer = value.producer
    if producer is None or producer.name not in LAYOUT_ONLY - {"index", "select"}:
        return None
    floats = [v for v in producer.inputs if v.data.dtype.kind == "f"]
    if len(floats) == 1 and floats[0].data.size == value.data.size:
        return floats[0]
    return None


def region_before(
    ends: Iterable[Value], is_boundary: Callable[[Value], bool]
) -> tuple[list[Operator], list[Value]]:
    """Returns the operators on which values depend, back to a boundary, and the boundary's values.

    Args:
        ends: the values; they are not asked whether they are on the boundary.
        is_boundary: whether to stop at a value.
    """
    operators: dict[int, Operator] = {}
    boundary: dict[int, Value] = {}
    waiting = [value for value in ends if value.producer is not None]
    while waiting:
        operator = waiting.pop().producer
        if operator is None or operator.index in operators:
            continue
        operators[operator.index] = operator
        for value in operator.inputs:
            if value.producer is None or is_boundary(value):
                boundary[value.index] = value
            else:
                waiting.append(value)
    return [operators[i] for i in sorted(operators)], [boundary[i] for i in sorted(boundary)]


def run_again(
    operators: Sequence[Operator],
    given: Mapping[int, Any],
    cast: Callable[[Any], Any] | None = None,
) -> dict[int, Any]:
    """Runs operators once more, with other values in some places.

    Args:
        operators: in the order of the tape.
        given: arrays of values by their index, also of values that the operators make; every other
            value is as recorded.
        cast: applied to each array before an operator reads it.

    Returns:
        the arrays of all values that depend on what was given, and what was given.
    """
    arrays = dict(given)
    for operator in operators:
        if cast is None and not any(value.index in arrays for value in operator.inputs):
            continue
        if all(value.index in given for value in operator.outputs):
            continue
        read = [arrays.get(value.index, value.data) for value in operator.inputs]
        made = operator.run(*(read if cast is None else map(cast, read)))
        for value, array in zip(operator.outputs, made, strict=True):
            if value.index not in given:
                arrays[value.index] = array
    return arrays
