"""What a diagnosis is made of: both sides of a segment, what enters it, and its numbers."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# Formulas hold to this share of scale; a wrong formula is off by far more than rounding.
FITS = 1e-9
# The same for functions whose numbers may be in float32, such as the 0.7978846 of a GELU.
FITS_IN_FLOAT32 = 2e-7


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """A cause that was tried.

    Attributes:
        text: what is wrong, in a sentence.
        operator: of the candidate, where the text is about one.
        is_operand: whether the operator is right, and what it reads is wrong.
        read: the value of the candidate that is read and must not be, where the text is about one.
        has_line: whether the cause is where the wrong value is made.
        right_with: the other arrays that make the segment right, by the index of their values,
            where the text says that these must be others.
    """

    text: str
    operator: Operator | None = None
    is_operand: bool = False
    read: Value | None = None
    has_line: bool = True
    right_with: Mapping[int, Any] = dataclasses.field(default_factory=dict)


def fits(one: Any, other: np.ndarray, allowed: float = FITS) -> bool:
    """Returns whether what a formula gives is an array, up to rounding."""
    return bool(np.abs(one - other).max() <= allowed * (largest(other) or 1.0))


def has_many_numbers(array: np.ndarray, least: int) -> bool:
    """Returns whether at least so many numbers of an array are different."""
    rest = array.reshape(-1)
    for _ in range(least - 1):
        rest = rest[rest != rest[0]] if rest.size else rest
    return rest.size > 0


def activations_of(divergence: Divergence, walk: Walk) -> list[np.ndarray]:
    """Returns activations that enter the segment, then those of which they are parts."""
    entering = [value for value in divergence.boundary if value.is_activation]
    whole = [
        read
        for value in entering
        if value.producer is not None
        for read in value.producer.inputs
        if read.is_activation and read.size > value.size
    ]
    return [walk.array(value) for value in dict.fromkeys([*entering, *whole])]


def sides_of(divergence: Divergence) -> tuple[np.ndarray, np.ndarray]:
    """Returns what the candidate computes, and what it must be."""
    return divergence.array, divergence.layout.apply(divergence.reference_value.data)


def name_both(
    divergence: Divergence, identify: Callable[[np.ndarray], str], verb: str = "computes"
) -> Diagnosis | None:
    """Returns a diagnosis if both sides have a name, and not the same."""
    computed, wanted = sides_of(divergence)
    own = identify(computed)
    right = identify(wanted) if own else ""
    if right and own != right:
        return Diagnosis(f"the candidate {verb} {own}; the reference {verb} {right}")
    return None


def numbers_of(operators: Sequence[Operator]) -> list[float]:
    """Returns the numbers that are written into operators."""
    found = [
        float(value.data.item())
        for operator in operators
        for value in operator.inputs
        if value.is_constant and value.size == 1 and value.dtype.kind in "fi"
    ]
    return found + [n for operator in operators for n in operator.numbers.values()]


def added_numbers(divergence: Divergence) -> list[float]:
    """Returns the numbers that the reference adds in its segment, and last to what that reads.

    A sum plus 1e-12 is an anchor like the sum, so that a tiny eps stands before the segment.
    """
    makers = list(divergence.reference_operators)
    for value in divergence.reference_boundary:
        maker = value.producer
        while maker is not None and maker.name in LAYOUT_ONLY | {"sqrt", "rsqrt"}:
            maker = maker.inputs[0].producer
        if maker is not None:
            makers.append(maker)
    return numbers_of([maker for maker in makers if maker.name.startswith("add")])


def own_name(value: Value, walk: Walk) -> str:
    """Returns a name for a value of the candidate, by the reference's where they are equal."""
    if value.producer is None:
        return value.name if value.is_weight else f"the {value.kind} {value.name}".rstrip()
    matches = walk.matches.get(value.index)
    return where(matches[0].value) if matches else f"the result of {value.producer.name}"


def tell_apart(one: Value, other: Value, walk: Walk) -> tuple[str, str]:
    """Returns names for two values of the reference, which differ."""
    names = where(one), where(other)
    if names[0] != names[1]:
        return names
    if one is other:
        return names[0], f"{names[1]} in another order of its numbers"
    same = [value.index for value in walk.reference.values if where(value) == names[0]]
    first, second = (same.index(value.index) + 1 for value in (one, other))
    return f"{names[0]} (number {first} of {len(same)})", f"number {second} of them"


def where(value: Value) -> str:
    """Returns a name for a value of the reference."""
    if value.producer is None:
        return f"the {value.kind} {value.name}".rstrip()
    return f"the {value.producer.name} of {value.producer.module or 'the model'}"
