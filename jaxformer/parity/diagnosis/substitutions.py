"""Puts another number, or another input, in the place of one that a segment reads."""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.parity.diagnosis.evidence import (
    FITS,
    Diagnosis,
    added_numbers,
    numbers_of,
    own_name,
    tell_apart,
    where,
)
from jaxformer.parity.matching.layouts import layouts
from jaxformer.parity.recording.operators.graph import Operator, Value, first_shape
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import apart

# The number with which an operator does nothing.
NEUTRAL = {"mul": 1.0, "div": 1.0, "add": 0.0, "sub": 0.0, "pow": 1.0}
# The same where a number is put in the place of another.
NUMBER_FITS = 1e-6
# A larger number is not made of others: few are meant, beside those that stand for infinity.
LARGEST_MADE = 1e6
# What this many times a number does as well is not that number.
OTHER_THAN = 13.7

# How many layouts of another input are tried.
MOST_LAYOUTS = 8

# Numbers that a reference may hold in a table and not in an operator: bases of rotary positions.
COMMON_NUMBERS = (1.0, 2.0, 1e4, 5e5, 1e6)


def other_number(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Puts each number of the reference in the place of each of the candidate's."""
    # A step that is too many may look like a wrong number in another.
    neutral = [(op, NEUTRAL[op.name]) for op in divergence.operators if op.name in NEUTRAL]
    substitutes, trials = _reference_numbers(divergence), Trials(divergence)
    for operator, number in neutral:
        found = _replaced(trials, operator, {number: ""})
        if found is not None:
            exact = None
            if number == 0:
                # An eps of 1e-12 does as well as none.
                tiny = {n: "" for n in added_numbers(divergence) if 0 < abs(n) < NUMBER_FITS}
                exact = _replaced(trials, operator, tiny, may_be_nothing=True)
            # And one of 1e-6 nearly.
            if exact is None and _replaced(trials, operator, {number: ""}, FITS) is None:
                exact = _replaced(trials, operator, substitutes, FITS)
            if exact is not None:
                return Diagnosis(exact, operator, right_with=trials.right_with)
            text = f"{found}: the reference has no such step"
            return Diagnosis(text, operator, right_with=trials.right_with)
    # What the reference has is likelier than what is made of it.
    written = {
        n: substitutes[n] for n in numbers_of(divergence.reference_operators) if n in substitutes
    }
    powers = [op for op in divergence.operators if op.name == "pow"]
    # With the base of a power goes a factor of its exponent, which is rarely meant.
    places = [(substitutes, op) for op in powers]
    # Positions are whole numbers: what else fits is likelier to be wrong.
    others = sorted(divergence.operators, key=lambda op: op.outputs[0].dtype.kind == "i")
    places += itertools.product((written, substitutes), others)
    for some, operator in places:
        found = _replaced(trials, operator, some)
        if found is not None:
            return Diagnosis(found, operator, right_with=trials.right_with)
    return None


def other_tiny_number(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Puts a number of the reference in the place of a tiny one that is added before the segment.

    A variance plus 1e-12 is an anchor like the variance, so that it stands before the segment
    though its number is what is wrong.
    """
    wanted = [n for n in added_numbers(divergence) if n]
    trials = Trials(divergence)
    for value in divergence.boundary:
        # What the add makes may be brought into another layout first.
        steps: list[Operator] = []
        maker = value.producer
        while maker is not None and maker.name in LAYOUT_ONLY | {"sqrt", "rsqrt"}:
            steps.append(maker)
            maker = maker.inputs[0].producer
        if maker is None or not maker.name.startswith("add"):
            continue
        for constant in maker.inputs:
            if not (constant.is_constant and constant.size == 1 and constant.dtype.kind == "f"):
                continue
            number = float(constant.data.item())
            if abs(number) > NUMBER_FITS:
                continue
            for other in wanted:
                if other == number:
                    continue
                given = {constant.index: np.full(constant.shape, other, constant.dtype)}
                read = {v.index: walk.array(v) for v in maker.inputs if v is not constant}
                made = run_again([maker, *reversed(steps)], read | given)[value.index]
                if trials.agree({value.index: made}, NUMBER_FITS):
                    text = f"the number {apart(number, other)} in {maker.name} must be "
                    return Diagnosis(
                        text + apart(other, number), maker, right_with=trials.right_with
                    )
    return None


def _replaced(
    trials: Trials,
    operator: Operator,
    substitutes: Mapping[float, str],
    allowed: float = NUMBER_FITS,
    *,
    may_be_nothing: bool = False,
) -> str | None:
    """Returns which number of an operator must be another one, if that makes the segment right.

    Args:
        trials: of the segment.
        operator: one of its operators.
        substitutes: the other numbers, each with a formula for it or "".
        allowed: the largest difference that is left, of scale; the reference may have a table in
            float32.
        may_be_nothing: whether the other number may be one that does nothing at all.
    """
    for value in operator.inputs:
        data = value.data
        if not (value.is_constant and value.producer is None and data.size == 1):
            continue
        if data.dtype.kind not in "fi":
            continue
        number = float(data.item())
        counts = _counts(operator, number)
        for other, name in substitutes.items():
            if other == number or (data.dtype.kind == "i" and other != int(other)):
                continue
            if counts and other not in counts:
                continue

            def is_right(one: float, value: Value = value, data: np.ndarray = data) -> bool:
                return trials.agree({value.index: np.full(data.shape, one, data.dtype)}, allowed)

            def is_sure(one: float, is_right: Any = is_right, data: np.ndarray = data) -> bool:
                """Returns whether not just any number would do as well, which then does nothing."""
                if may_be_nothing or not one:
                    return True
                if data.dtype.kind == "i":
                    # A place behind the end is the last one.
                    return not (is_right(one - 1) and is_right(one + 1))
                return not is_right(OTHER_THAN * one)

            # Once more, so that the trials know it for the last that was right.
            if is_right(other) and is_sure(other) and is_right(other):
                formula = f" = {name}" if name else ""
                return (
                    f"the number {apart(number, other)} in {_user(operator).name} must be "
                    f"{apart(other, number)}{formula}"
                )
    return None


def _counts(operator: Operator, number: float) -> set[float]:
    """Returns what may take the place of a number that makes a mean of a sum, none of any other.

    It counts what is added: it may be one less, or count along other axes.
    """
    made = first_shape(operator.inputs[0]).producer
    if operator.name != "div" or made is None or made.name != "reduce_sum":
        return set()
    summed = made.inputs[0]
    if summed.size != number * made.outputs[0].size:
        return set()
    axes = range(1, summed.ndim + 1)
    sizes = (some for count in axes for some in itertools.combinations(summed.shape, count))
    return {1.0, number - 1, number + 1, *(float(math.prod(some)) for some in sizes)}


def _user(operator: Operator) -> Operator:
    """Returns the operator that makes something of a number which is cast or repeated first."""
    while operator.name in LAYOUT_ONLY and operator.outputs[0].consumers:
        operator = operator.outputs[0].consumers[0]
    return operator


def _reference_numbers(divergence: Divergence) -> dict[float, str]:
    """Returns the numbers of the reference's segment and functions of them, with formulas."""
    numbers = dict.fromkeys(
        (
            *numbers_of(divergence.reference_operators),
            *numbers_of(divergence.operators),
            *COMMON_NUMBERS,
        )
    )
    sizes = {n for v in divergence.boundary for n in v.shape if n > 1}
    found = {number: "" for number in numbers if math.isfinite(number)}
    for number in [*found]:
        for other in (-number, number + 1, number - 1):
            found.setdefault(other, "")
        if number > 0:
            for other in (1 / number, math.sqrt(number), 1 / math.sqrt(number), number**2):
                if other <= LARGEST_MADE:
                    found.setdefault(other, "")
    for size in sizes:
        for power, name in ((0.5, "sqrt({})"), (-0.5, "1/sqrt({})"), (1.0, "{}"), (-1.0, "1/{}")):
            found[float(size) ** power] = name.format(size) if power != 1 else ""
    return found


def other_input(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Lets each operator read another value of the reference of the same size."""
    made = {v.index for op in divergence.operators for v in op.outputs}
    others = list(dict.fromkeys([
        *divergence.reference_boundary,
        *(v for op in divergence.reference_operators for v in op.outputs),
        *walk.reference.parameters.values(),
    ]))  # fmt: skip
    # To read the result itself would explain nothing.
    others = [other for other in others if other is not divergence.reference_value]
    trials = Trials(divergence)
    for operator in reversed(divergence.operators):
        for value in operator.inputs:
            if value.index in made or value.is_constant or value.dtype.kind != "f":
                continue
            array = walk.array(value)
            for other in others:
                if other.is_weight != value.is_weight or other.size != array.size:
                    continue
                if other.dtype.kind != "f":
                    continue
                for layout in itertools.islice(layouts(other.shape, array.shape), MOST_LAYOUTS):
                    substitute = layout.apply(other.data)
                    if trials.agree({value.index: substitute}, FITS):
                        own, right = _name_reads(value, other, substitute, walk)
                        return Diagnosis(
                            f"{operator.name} reads {own}; it must read {right}",
                            operator,
                            is_operand=True,
                            read=value,
                            right_with=trials.right_with,
                        )
    return None


def _name_reads(value: Value, other: Value, substitute: Any, walk: Walk) -> tuple[str, str]:
    """Returns names for what is read and what must be, or what differs if both are one value.

    Args:
        value: of the candidate, which is read.
        other: of the reference, which must be read.
        substitute: its numbers, in the layout in which they are right.
        walk: which knows the values that are equal.
    """
    own, right = own_name(value, walk), where(other)
    matches = walk.matches.get(value.index, [])
    if not any(match.value is other for match in matches):
        if matches and own == right:
            return tell_apart(matches[0].value, other, walk)
        return own, right
    array = walk.array(value)
    for order in itertools.permutations(range(array.ndim)):
        if np.array_equal(array.transpose(order), substitute):
            moved = sorted(axis for place, axis in enumerate(order) if axis != place)
            if len(moved) == 2:
                return own, f"it with axes {moved[0]} and {moved[1]} exchanged"
            return own, f"it with its axes in the order {order}"
    return own, "it in another order of its numbers"
