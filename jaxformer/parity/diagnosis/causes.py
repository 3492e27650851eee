"""Makes a root cause of each wrong segment: both lines of code, and a diagnosis."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxformer.parity.diagnosis.attempts import diagnose
from jaxformer.parity.diagnosis.evidence import Diagnosis
from jaxformer.parity.diagnosis.gradients import STOPPED, STOPPED_IN_PART
from jaxformer.parity.diagnosis.rows import first_after_rows
from jaxformer.parity.diagnosis.substitutions import NUMBER_FITS
from jaxformer.parity.findings import Node, RootCause
from jaxformer.parity.judging.divergences import Judged
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.results import WrongResult
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import shorten

# The stage of a segment, by whether it belongs to the backward pass.
STAGES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def find_causes(wrong: Sequence[Judged], walk: Walk) -> list[RootCause]:
    """Returns the root causes of wrong segments, in their order; equal ones are not joined yet."""
    diagnoses = [diagnose(judged.divergence, walk) for judged in wrong]
    pairs = list(zip(wrong, diagnoses, strict=True))
    causes = [_cause(judged, found, walk) for judged, found in pairs]
    return [
        cause if found.text else _explained(judged, diagnoses, causes) or cause
        for (judged, found), cause in zip(pairs, causes, strict=True)
    ]


def _explained(
    judged: Judged, diagnoses: Sequence[Diagnosis], causes: Sequence[RootCause]
) -> RootCause | None:
    """Returns a cause of other segments that is the cause of one without a diagnosis too.

    What a layer computes wrongly may also be returned, as the keys of a cache are, and these of
    all layers together: then what makes each of the layers right makes this right.

    Args:
        judged: the segment.
        diagnoses: of all segments.
        causes: of all segments, in the same order.
    """
    divergence = judged.divergence
    own = {v.index for operator in divergence.operators for v in operator.inputs + operator.outputs}
    known = [
        (found, cause)
        for found, cause in zip(diagnoses, causes, strict=True)
        if not own.isdisjoint(found.right_with) and cause.stage == STAGES[divergence.is_backward]
    ]
    together: dict[int, Any] = {}
    for found, _ in known:
        together |= {index: array for index, array in found.right_with.items() if index in own}
    with np.errstate(all="ignore"):
        if not together or not Trials(divergence).agree(together, NUMBER_FITS):
            return None
    return dataclasses.replace(known[0][1], error=divergence.error, effect=judged.effect)


def causes_of_results(wrong: Sequence[WrongResult]) -> list[RootCause]:
    """Returns the root causes of results that are wrong though their numbers are found."""
    return [
        RootCause(
            _source_of(result.candidate), _source_of(result.reference), result.message, math.inf,
            jax_operators=_operators_of(result.candidate),
            torch_operators=_operators_of(result.reference),
        )
        for result in wrong
    ]  # fmt: skip


def _source_of(value: Value) -> str:
    """Returns the line that made a value, or what it was made of; "" if none is known."""
    while value.producer is not None and not value.producer.source and value.producer.inputs:
        value = value.producer.inputs[0]
    return "" if value.producer is None else value.producer.source


def _operators_of(value: Value) -> tuple[str, ...]:
    return () if value.producer is None else (value.producer.name,)


def with_stops(
    forward: Sequence[RootCause],
    backward: Sequence[RootCause],
    stops: Sequence[str],
    others: Mapping[str, Sequence[str]],
    walk: Walk,
) -> list[RootCause]:
    """Returns the causes of both passes; of wrong gradients, with the places that stop them.

    Args:
        forward: causes of the forward pass.
        backward: those of the backward pass.
        stops: "path:line" where the candidate stops gradients.
        others: other places that gradients depend on, by what is done there.
        walk: which gets remarks on these places.
    """
    if any(cause.diagnosis == STOPPED for cause in backward):
        # What is stopped is no part of other gradients either.
        backward = [cause for cause in backward if cause.diagnosis != STOPPED_IN_PART]
    found = [*forward, *backward]
    if not backward:
        return found
    for what, places in {"the candidate stops gradients": stops, **others}.items():
        if places:
            walk.remarks.append(f"{what} at {', '.join(map(shorten, places))}")
    if len(stops) == 1:
        return [c if c.jax_source else dataclasses.replace(c, jax_source=stops[0]) for c in found]
    return found


def merge_causes(causes: Iterable[RootCause]) -> list[RootCause]:
    """Returns each cause once, with the number of its places and its largest error.

    A line that is wrong in one way, and is known to be, is one cause wherever the reference has the
    right: a rotation of queries and of keys is one function's.
    """
    found: dict[tuple[str, str, str, str], RootCause] = {}
    for cause in causes:
        is_known = cause.jax_source and cause.diagnosis
        reference = "" if is_known else cause.torch_source
        key = cause.jax_source, reference, cause.diagnosis, cause.stage
        first = found.get(key, cause)
        places = first.places + 1 if key in found else 1
        error = max(first.error, cause.error)
        known = [e for e in (first.effect, cause.effect) if e is not None]
        effect = max(known) if known else None
        found[key] = dataclasses.replace(first, places=places, error=error, effect=effect)
    return list(found.values())


def with_causes(nodes: Iterable[Node], causes: Sequence[RootCause]) -> list[Node]:
    """Returns the nodes of modules; one that has a cause in it is a bug, and says which."""
    first: dict[str, RootCause] = {}
    for cause in causes:
        first.setdefault(cause.torch_module, cause)
    return [_with_cause(node, first.get(node.reference_path)) for node in nodes]


def _with_cause(node: Node, cause: RootCause | None) -> Node:
    if cause is None:
        return node
    return dataclasses.replace(
        node, verdict="bug", stage=cause.stage, message=cause.message, is_root_cause=True,
        in_context=None,
    )  # fmt: skip


def _cause(judged: Judged, found: Diagnosis, walk: Walk) -> RootCause:
    divergence = judged.divergence
    named = _with_lines(divergence.operators)
    reader = divergence.reader
    operator = found.operator
    if not found.text and not divergence.is_backward:
        operator = operator or first_after_rows(divergence)
    operator = operator or (named[-1] if named else reader or divergence.value.producer)
    reference = divergence.reference_operator
    is_operand = found.is_operand or operator is reader
    source = _source(operator, is_operand, walk) if operator else ""
    if operator is not None and not source:
        source = _line_after(operator)
    source = source or _line_that_reads(divergence, walk)
    return RootCause(
        source if found.has_line else "",
        reference.source,
        found.text,
        divergence.error,
        STAGES[divergence.is_backward],
        tuple(op.name for op in divergence.operators),
        tuple(op.name for op in divergence.reference_operators),
        operator.module if operator else "",
        divergence.reference_module,
        effect=judged.effect,
        jax_after=_source_before(divergence, found.read),
        candidate_path=walk.owner(divergence),
    )


def _with_lines(operators: Sequence[Operator]) -> list[Operator]:
    """Returns the operators whose lines are known; of a scan those of its steps, if there are any.

    The scan itself only takes what enters a step, and stacks what comes of each. A mark says where
    a module is called, which is the line of a step that is missing.
    """
    named = [operator for operator in operators if operator.source]
    steps = [op for op in named if op.name not in ("index", "stack", "mark", "show")]
    return steps or named


def _line_that_reads(divergence: Divergence, walk: Walk) -> str:
    """Returns the line that reads a wrong result, if it is one; see ``compare_operators``."""
    pairs = zip(walk.candidate.outputs, walk.reference.outputs, strict=False)
    required, wanted = divergence.required, divergence.required_reference
    places = (n for n, (own, right) in enumerate(pairs) if own is required and right is wanted)
    return next((walk.line_that_reads(place) for place in places), "")


def _line_after(operator: Operator) -> str:
    """Returns the first line that reads what an operator without a line made."""
    waiting = [operator]
    for one in waiting:
        if one.source:
            return one.source
        readers = (reader for value in one.outputs for reader in value.consumers)
        waiting += [reader for reader in dict.fromkeys(readers) if reader not in waiting]
    return ""


def _source_before(divergence: Divergence, read: Value | None) -> str:
    """Returns the line that made what enters a segment: the last activation, if none is named."""
    entering = [value for value in divergence.boundary if value.is_activation]
    value = read or (entering[-1] if entering else None)
    while value is not None and value.producer is not None and not value.producer.source:
        value = next((v for v in value.producer.inputs if v.is_activation), None)
    return "" if value is None or value.producer is None else value.producer.source


def _source(operator: Operator, is_operand: bool, walk: Walk) -> str:
    """Returns the line to blame: of the caller, if its argument is wrong and the function right.

    The function is right if the same line, called from elsewhere, gives what the reference has.
    """
    if not is_operand or not operator.caller:
        return operator.source
    wrong = {op.index for d in walk.divergences for op in d.operators}
    is_right = any(
        other.index not in wrong
        and (other.name, other.source) == (operator.name, operator.source)
        and other.caller != operator.caller
        and all(made.index in walk.matches for made in other.outputs)
        for other in walk.candidate.operators
    )
    return operator.caller if is_right else operator.source
