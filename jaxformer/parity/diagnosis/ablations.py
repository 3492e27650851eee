"""Leaves out one operator at a time: a step that only one side has."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.diagnosis.evidence import (
    FITS,
    Diagnosis,
    fits,
    own_name,
    where,
)
from jaxformer.parity.matching.layouts import find_layout
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk

# Operators that limit numbers, in the words of JAX and of PyTorch.
LIMITS = ("max", "min", "clamp", "maximum", "minimum", "clamp_min", "clamp_max", "hardtanh")


def extra_write(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each operator that writes to a part of an array, as ``.at[…]`` does, or limits it.

    Another index may be outside of the array, and then nothing is written either; a limit that is
    far enough limits nothing: so this is tried before other numbers.
    """
    writes = [op for op in divergence.operators if op.name.startswith("scatter")]
    limits = [op for op in divergence.operators if op.name in LIMITS]
    if any(op.name in LIMITS for op in divergence.reference_operators):
        # Both have limits: the numbers differ.
        limits = []
    return _extra(divergence, walk, writes) or _extra(divergence, walk, limits, "fi")


def extra_step(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each operator of the candidate that keeps a shape, and sees whether that helps."""
    return _extra(divergence, walk, divergence.operators)


def _extra(
    divergence: Divergence, walk: Walk, operators: Sequence[Operator], kinds: str = "f"
) -> Diagnosis | None:
    trials = Trials(divergence)
    for operator, kept, term in _steps(operators, kinds):
        array = divergence.arrays.get(kept.index, kept.data)
        helps = trials.agree({operator.outputs[0].index: array}, FITS)
        if not helps or _is_also_done(operator, kept, divergence):
            continue
        made = operator.outputs[0]
        known = walk.index.find(divergence.arrays.get(made.index, made.data))
        if known and made.consumers:
            # The reference has this step, and reads what it makes elsewhere.
            reader, right = made.consumers[0], own_name(kept, walk)
            text = f"{reader.name} reads {where(known[0].value)}; it must read {right}"
            right_with = trials.right_with
            return Diagnosis(text, reader, is_operand=True, read=made, right_with=right_with)
        text = f"{_name_step(operator, term, walk)}: the reference has no such step"
        return Diagnosis(text, operator, right_with=trials.right_with)
    return None


def _name_step(operator: Operator, term: Value | None, walk: Walk) -> str:
    """Returns what a step that is too many does, with the other value that it reads, if it does."""
    if term is None:
        return f"{operator.name} is one step too many"
    if operator.name in LIMITS and term.is_constant:
        number = term.data.flat[0]
        limit = f"the limit {number:g}" if (term.data == number).all() else "a limit"
        return f"{limit} by {operator.name} is one step too many"
    return f"{own_name(term, walk)} comes in by {operator.name}"


def _is_also_done(operator: Operator, kept: Value, divergence: Divergence) -> bool:
    """Returns whether an operator of the reference does with what it reads the same as another one.

    Args:
        operator: of the candidate.
        kept: the value that it reads and changes.
        divergence: whose reference is looked at; what another operator of the candidate makes is
            that one's counterpart.
    """
    kind = operator.outputs[0].dtype.kind
    others = [op for op in divergence.operators if op is not operator]
    values = [v for op in others for v in op.outputs if v.dtype.kind == kind]
    arrays = [divergence.arrays.get(v.index, v.data) for v in values]
    for other in divergence.reference_operators:
        wanted = other.outputs[0]
        if wanted.dtype.kind != kind:
            continue
        if any(array.shape == wanted.shape and fits(array, wanted.data) for array in arrays):
            continue
        for value in other.inputs:
            if value.shape != kept.shape or value.dtype.kind != kept.dtype.kind:
                continue
            made = run_again([operator], {kept.index: value.data})[operator.outputs[0].index]
            does_something = made.shape == wanted.shape and not np.array_equal(made, value.data)
            if does_something and fits(made, wanted.data):
                return True
    return False


def missing_step(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each operator of the reference that keeps a shape: is this the candidate?"""
    own = divergence.array
    operators = divergence.reference_operators
    for operator, kept, term in _steps(operators):
        end = divergence.reference_value
        if operator.outputs[0] is end:
            made: Any = kept.data
        else:
            made = run_again(operators, {operator.outputs[0].index: kept.data}).get(end.index)
        if made is None or made.size != own.size:
            continue
        if find_layout(made, own, FITS * (largest(own) or 1.0)) is not None:
            at = f" at {_line(operator)}" if operator.source else ""
            if term is None:
                return Diagnosis(f"the reference's {operator.name}{at} is missing")
            return Diagnosis(
                f"{where(_first_maker(term))} is missing: the reference's {operator.name}{at}"
            )
    return None


def _first_maker(value: Value) -> Value:
    """Returns the value that a mask or another layout has made another one of."""
    while value.producer is not None:
        read = [v for v in value.producer.inputs if v.dtype.kind == "f" and not v.is_constant]
        is_masked = value.producer.name == "where" and len(read) == 1
        if value.producer.name not in LAYOUT_ONLY and not is_masked:
            break
        value = read[0] if is_masked else value.producer.inputs[0]
    return value


def _steps(
    operators: Sequence[Operator], kinds: str = "f"
) -> Iterator[tuple[Operator, Value, Value | None]]:
    """Yields operators, what they would give if they did nothing, and what they add to it."""
    for operator in reversed(operators):
        if operator.name in LAYOUT_ONLY or len(operator.outputs) != 1:
            continue
        made = operator.outputs[0]
        if made.dtype.kind not in kinds:
            continue
        for kept in operator.inputs:
            if kept.shape != made.shape or kept.dtype.kind != made.dtype.kind:
                continue
            others = [v for v in operator.inputs if v is not kept]
            if kept.is_constant or np.array_equal(kept.data, made.data):
                continue
            yield operator, kept, others[0] if len(others) == 1 else None


def _line(operator: Operator) -> str:
    return operator.source.rpartition("/")[2]
