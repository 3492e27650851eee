"""Leaves out one operator at a time: a step that only one side has."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.diagnosis.operators.evidence import (
    FITS,
    Diagnosis,
    own_name,
    where,
)
from jaxformer.parity.matching.operators.layouts import find_layout
from jaxformer.parity.matching.operators.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value, run_again
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.segments.operators.divergences import Divergence, Trials
from jaxformer.parity.segments.operators.walk import Walk


def extra_write(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each operator that writes to a part of an array, as ``.at[…]`` does.

    Another index may be outside of the array, and then nothing is written either: so this is tried
    before other numbers.
    """
    writes = [op for op in divergence.operators if op.name.startswith("scatter")]
    return _extra(divergence, walk, writes)


def extra_step(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Leaves out each operator of the candidate that keeps a shape, and sees whether that helps."""
    return _extra(divergence, walk, divergence.operators)


def _extra(divergence: Divergence, walk: Walk, operators: Sequence[Operator]) -> Diagnosis | None:
    trials = Trials(divergence)
    for operator, kept, term in _steps(operators):
        array = divergence.arrays.get(kept.index, kept.data)
        helps = trials.agree({operator.outputs[0].index: array}, FITS)
        if helps:
            text = f"{operator.name} is one step too many"
            if term is not None:
                text = f"{own_name(term, walk)} comes in by {operator.name}"
            return Diagnosis(f"{text}: the reference has no such step", operator)
    return None


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
            while term.producer is not None and term.producer.name in LAYOUT_ONLY:
                term = term.producer.inputs[0]
            return Diagnosis(f"{where(term)} is missing: the reference's {operator.name}{at}")
    return None


def _steps(operators: Sequence[Operator]) -> Iterator[tuple[Operator, Value, Value | None]]:
    """Yields operators, what they would give if they did nothing, and what they add to it."""
    for operator in reversed(operators):
        if operator.name in LAYOUT_ONLY or len(operator.outputs) != 1:
            continue
        made = operator.outputs[0]
        if made.dtype.kind != "f":
            continue
        for kept in operator.inputs:
            if kept.shape != made.shape or kept.dtype.kind != "f":
                continue
            others = [v for v in operator.inputs if v is not kept]
            if kept.is_constant or np.array_equal(kept.data, made.data):
                continue
            yield operator, kept, others[0] if len(others) == 1 else None


def _line(operator: Operator) -> str:
    return operator.source.rpartition("/")[2]
