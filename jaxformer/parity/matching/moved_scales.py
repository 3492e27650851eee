"""Scales that one side applies before a product and the other one after it: the same numbers.

A product is linear, so ``(c · x) W`` is ``c · (x W)``. T5's head scales what it reads, a port may
scale the logits. Then neither what the two products read nor what they give is equal, but what
is read before the scale is, and what comes after it; with a bias, after that is added too.
"""

import dataclasses
import itertools
from collections.abc import Iterator

from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY

# What makes the gradient of a number: products, and their sum.
LINEAR = {"mul", "div", "neg", "sum", "reduce_sum"}

# Two scales are equal if they differ by no more than what is left of a number in float32.
SAME = 1e-6


@dataclasses.dataclass(frozen=True)
class Scaled:
    """A value before a product or after it.

    Attributes:
        value: it.
        factor: by which the scales between it and the product multiply.
        added: how many biases are added between the product and it.
    """

    value: Value
    factor: float = 1.0
    added: int = 0


def without_moved_scale(
    own: tuple[Value, Value], right: tuple[Value, Value]
) -> tuple[tuple[Value, Value], tuple[Value, Value]]:
    """Returns what must be equal of two products: what enters and leaves them, with their scales.

    Args:
        own: the activation that the candidate's product reads, and what it gives.
        right: the same of the reference.

    Returns:
        the same as was given, unless one side has before the product what the other has after it.
    """
    ways = [
        itertools.product(enumerate(unscaled(read)), enumerate(_scaled(made)))
        for read, made in (own, right)
    ]
    # The fewest steps away from the products.
    shortest = None
    for ((i, before), (j, after)), ((k, first), (n, last)) in itertools.product(*ways):
        if not _differ(before.factor, first.factor) or after.added != last.added:
            continue
        if _differ(before.factor * after.factor, first.factor * last.factor):
            continue
        if shortest is None or i + j + k + n < shortest[0]:
            shortest = i + j + k + n, (before.value, after.value), (first.value, last.value)
    return (own, right) if shortest is None else shortest[1:]


def unscaled(value: Value) -> list[Scaled]:
    """Returns a value, and each of which it is a multiple, number by number."""
    found = [Scaled(value)]
    while value.producer is not None:
        step = _scale(value.producer)
        if step is None or step[0].size != value.size:
            break
        value = step[0]
        if step[1] != 1:
            found.append(Scaled(value, found[-1].factor * step[1]))
    return found


def _scaled(value: Value) -> list[Scaled]:
    """Returns a value, and what scales and biases make of it where nothing else reads it.

    The gradient of a scale may read it too.
    """
    found = [Scaled(value)]
    while True:
        readers = [reader for reader in value.consumers if not _is_of_one_number(reader)]
        steps = [step for reader in readers for step in _steps(reader, value)]
        if len(readers) != 1 or len(steps) != 1:
            return found
        step, last = steps[0], found[-1]
        value = step.value
        if step.factor != 1 or step.added:
            found.append(Scaled(value, last.factor * step.factor, last.added + step.added))


def _steps(reader: Operator, value: Value) -> Iterator[Scaled]:
    """Yields what an operator makes of a value, if it is a scale, a bias or another layout."""
    is_bias = _adds_weight(reader)
    step = (value, 1.0) if is_bias else _scale(reader)
    if step is not None and step[0] is value and reader.outputs[0].size == value.size:
        yield Scaled(reader.outputs[0], step[1], int(is_bias))


def _is_of_one_number(operator: Operator) -> bool:
    """Returns whether what an operator makes is only added up to one number."""
    value = operator.outputs[0]
    while value.size != 1 and len(value.consumers) == 1:
        reader = value.consumers[0]
        if reader.name not in LAYOUT_ONLY | LINEAR:
            return False
        value = reader.outputs[0]
    return value.size == 1 and operator.outputs[0].size != 1


def _differ(one: float, other: float) -> bool:
    return abs(one - other) > SAME * abs(other)


def _adds_weight(operator: Operator) -> bool:
    if operator.name.removesuffix("_") != "add" or len(operator.inputs) != 2:
        return False
    return sum(value.is_weight for value in operator.inputs) == 1


def _is_number(value: Value) -> bool:
    return value.size == 1 and (value.is_constant or value.is_weight)


def _scale(operator: Operator) -> tuple[Value, float] | None:
    """Returns what an operator multiplies by a number, and the number; 1 for a change of layout.

    The number may be written in the code, or a parameter, like the temperature of an attention.
    """
    read = [value for value in operator.inputs if value.is_activation]
    if len(read) != 1 or len(operator.outputs) != 1:
        return None
    if operator.name in LAYOUT_ONLY:
        return read[0], 1.0
    name = operator.name.removesuffix("_")
    if name not in ("mul", "div") or (name == "div" and operator.inputs[0] is not read[0]):
        return None
    numbers = [float(v.data.item()) for v in operator.inputs if _is_number(v)]
    if "other" in operator.numbers:
        numbers.append(operator.numbers["other"])
    if len(numbers) != 1 or not numbers[0]:
        return None
    return read[0], numbers[0] if name == "mul" else 1 / numbers[0]
