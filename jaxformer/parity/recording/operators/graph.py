"""Operators and their values; what they depend on, and parts of a run that are run again."""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording.operators.kinds import (
    COPIES,
    LAYOUT_ONLY,
    OWN_MEMORY,
    QUICK,
    SUMS,
)

Run = Callable[..., Sequence[Any]]

# Products of matrices, one for each head, are quick if their sums have no more terms.
MOST_TERMS = 256
# What takes more operators, one after another, is kept: the sums of a residual stream are many.
MOST_STEPS = 12
# Those of up to so many bytes are kept sooner: all of them take little memory.
SMALL, MOST_STEPS_OF_SMALL = 1 << 21, 6
# Smaller arrays are kept.
LARGE = 1 << 18
# Of arrays that were made again, or may be: the last ones that take so much memory are kept.
MOST_BYTES = 1 << 28
# Of a sum that takes the memory of what it adds, so many numbers are added at once.
ADDED_AT_ONCE = 1 << 18


class Value:
    """An array of a run.

    A large one may be forgotten, and is then made again when it is read: by the operators that it
    came from, or of the value that it stands for.

    Args:
        index: its place on the tape.
        data: the array.
        producer: the operator that made it; None for inputs, parameters and constants.
        kind: "input", "parameter", "constant", or "" for what an operator made.
        name: of an input or a parameter.

    Attributes:
        shape: of the array.
        dtype: of the array.
        is_constant: whether it depends on no input and no parameter.
        is_weight: whether it depends on parameters and on no input.
        is_table: whether it depends on no parameter and on no input of floats: what is made of
            positions and constants, which may be rounded to float32.
        is_gradient: whether it is the gradient of a parameter, or added to one: such values are
            hardly ever read, and all of them take as much memory as a model.
        consumers: the operators that read it.
        steps: how many operators, one after another, make it again from what is kept; views are
            no steps.
    """

    def __init__(
        self,
        index: int,
        data: np.ndarray,
        producer: "Operator | None" = None,
        kind: str = "",
        name: str = "",
    ):
        self.index, self.producer, self.kind, self.name = index, producer, kind, name
        self.shape, self.dtype = data.shape, data.dtype
        self._data: np.ndarray | None = data
        self._other: Callable[[], np.ndarray] | None = None
        self._recent: Recent | None = None
        self.is_constant = self.is_weight = self.is_table = self.is_gradient = False
        self.consumers: list[Operator] = []
        read = () if producer is None else producer.inputs
        forgotten = (v.steps for v in read if v.is_quick and not v.stands_for_another)
        is_view = producer is not None and producer.name in LAYOUT_ONLY - COPIES
        self.steps: int = max(forgotten, default=0) + (not is_view)

    @property
    def data(self) -> np.ndarray:
        """The array, on the host; floats in float64."""
        return self.data_beside({})

    @data.setter
    def data(self, array: np.ndarray) -> None:
        self._data, self._other, self._recent = array, None, None

    def data_beside(self, others: Mapping[int, np.ndarray]) -> np.ndarray:
        """Returns the array, which is made of other values' arrays where that is possible.

        Args:
            others: arrays that are there, by the index of their values.
        """
        if self._data is not None:
            return self._data
        if self.index in others:
            return others[self.index]
        if self._other is not None:
            return self._remember(self._other())
        operators, _ = region_before([self], lambda v: v.is_there or v.index in others)
        made = _make_again(operators, others)
        # What was made on the way is as likely to be read next.
        for operator in operators:
            for value in operator.outputs:
                if value._data is None and value.index in made:
                    value._remember(made[value.index])
        return np.asarray(made[self.index])

    @property
    def size(self) -> int:
        """The count of numbers."""
        return math.prod(self.shape)

    @property
    def ndim(self) -> int:
        """The count of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array."""
        return self.size * self.dtype.itemsize

    @property
    def is_activation(self) -> bool:
        """Whether it depends on an input, and holds floats."""
        return not (self.is_constant or self.is_weight) and self.dtype.kind == "f"

    @property
    def is_quick(self) -> bool:
        """Whether it is large, and soon made again by the operator that made it."""
        if self.nbytes < LARGE or self.producer is None:
            return False
        is_short = 0 < self.producer.terms <= MOST_TERMS
        most = MOST_STEPS if self.nbytes > SMALL else MOST_STEPS_OF_SMALL
        is_quick = (is_short or self.producer.name in QUICK) and self.steps <= most
        return self.is_gradient or is_quick

    def mark_as_gradient(self) -> Iterator["Value"]:
        """Marks the gradient of a parameter, and what it is the sum of, and yields these."""
        self.is_gradient = True
        yield self
        producer = self.producer
        if producer is not None and producer.name in LAYOUT_ONLY | SUMS:
            for value in producer.inputs:
                if value.size == self.size and not value.is_gradient:
                    yield from value.mark_as_gradient()

    @property
    def stands_for_another(self) -> bool:
        """Whether it has the numbers of another value."""
        return self._other is not None

    @property
    def is_there(self) -> bool:
        """Whether reading it runs no operator of its own tape."""
        return self._data is not None or self._other is not None

    def _remember(self, array: Any) -> np.ndarray:
        """Keeps an array that was made again for a while, and returns it."""
        made = self._data = np.asarray(array)
        if self._recent is not None:
            self._recent.add(self)
        return made

    def forget(self, recent: "Recent") -> None:
        """Lets go of the array, which is made again when it is read, and kept for a while."""
        self._data, self._recent = None, recent

    def stand_for(self, other: Callable[[], np.ndarray], recent: "Recent") -> None:
        """Takes the numbers of another value in place of its own."""
        if self.nbytes < LARGE:
            self.data = other()
        else:
            self._other = other
            self.forget(recent)


class Recent:
    """The arrays that were read last, of values that can be made again.

    Args:
        most: how many bytes they may take.
    """

    def __init__(self, most: int | None = None):
        self._most = MOST_BYTES if most is None else most
        self._values: deque[Value] = deque()
        self._bytes = 0

    def add(self, value: Value) -> None:
        """Keeps a value's array, and forgets the oldest ones."""
        self._values.append(value)
        self._bytes += value.nbytes
        self._forget_until(self._most)

    def clear(self) -> None:
        """Forgets all of them."""
        self._forget_until(0)

    def _forget_until(self, most: int) -> None:
        while self._bytes > most and self._values:
            oldest = self._values.popleft()
            self._bytes -= oldest.nbytes
            if oldest._recent is self:
                oldest.forget(self)

    def keep_for_a_while(self, value: Value) -> None:
        """Keeps a value's array that has just been made, until others are read."""
        value._recent = self
        self.add(value)


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
        terms: of products of matrices, one for each head: how many terms their sums have; else 0.
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
    terms: int = 0


def same_numbers(value: Value) -> Value | None:
    """Returns the value whose numbers another one brings into another shape, None if it is none."""
    producer = value.producer
    if producer is None or producer.name not in LAYOUT_ONLY - {"index", "select"}:
        return None
    floats = [v for v in producer.inputs if v.dtype.kind == "f"]
    if len(floats) == 1 and floats[0].size == value.size:
        return floats[0]
    return None


def first_shape(value: Value) -> Value:
    """Returns the value from which operators of layout alone have made another, or itself."""
    while (source := same_numbers(value)) is not None:
        value = source
    return value


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


def _make_again(operators: Sequence[Operator], given: Mapping[int, np.ndarray]) -> dict[int, Any]:
    """Runs operators once more and returns what they make, by the index of the value.

    What is too large to be kept for a while is let go of as soon as its last operator has read it.

    Args:
        operators: in the order of the tape.
        given: arrays of values that they do not make.
    """
    arrays: dict[int, Any] = dict(given)
    last = {value.index: operator for operator in operators for value in operator.inputs}
    for operator in operators:
        known = [arrays.get(v.index) for v in operator.inputs]
        read = [
            value.data if array is None else array
            for value, array in zip(operator.inputs, known, strict=True)
        ]
        del known
        for value in operator.inputs:
            if value.nbytes > MOST_BYTES and last[value.index] is operator:
                arrays.pop(value.index, None)
        made = _add_in_place(operator, read, [*arrays.values(), *given.values()])
        made = made or operator.run(*read)
        del read
        arrays |= {v.index: array for v, array in zip(operator.outputs, made, strict=True)}
    return arrays


def _add_in_place(operator: Operator, read: list[Any], kept: list[Any]) -> Sequence[Any]:
    """Adds arrays of one shape in the memory of one of them, some rows at a time.

    Args:
        operator: any.
        read: what it reads.
        kept: arrays that are still needed.

    Returns:
        what it makes; nothing if it is no such sum, or if all that it reads is needed.
    """
    shape = operator.outputs[0].shape
    if operator.name not in SUMS or not shape or any(array.shape != shape for array in read):
        return ()
    for value, array in zip(operator.inputs, read, strict=True):
        if value.is_there or value.producer is None or value.producer.name not in OWN_MEMORY:
            continue
        others = [*kept, *(other for other in read if other is not array)]
        if not array.flags.writeable or any(np.may_share_memory(array, o) for o in others):
            continue
        rows = max(1, ADDED_AT_ONCE * shape[0] // array.size)
        for first in range(0, shape[0], rows):
            part = slice(first, first + rows)
            (array[part],) = operator.run(*(one[part] for one in read))
        return [array]
    return ()
