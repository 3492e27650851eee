"""What is wrong with a gradient whose value in the forward pass is right."""

from collections.abc import Collection

import numpy as np

from jaxformer.parity.diagnosis.evidence import FITS, Diagnosis, sides_of
from jaxformer.parity.matching.layouts import find_layout
from jaxformer.parity.matching.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value, region_before
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY, SUMS
from jaxformer.parity.segments.divergences import Divergence, Trials
from jaxformer.parity.segments.walk import Walk

STOPPED = "no gradient arrives here in the candidate; in the reference one does"
STOPPED_IN_PART = "a part of the gradient does not arrive here in the candidate"
EXTRA = "a gradient arrives here in the candidate; in the reference none does"


def stopped_gradient(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Returns a diagnosis if a gradient arrives on one side alone."""
    own, right = map(np.any, sides_of(divergence))
    if own and right and _is_addend(divergence):
        return Diagnosis(STOPPED_IN_PART, has_line=False)
    if own == right:
        return None
    # Zeros that only stand for a gradient are made where another one is added to them.
    is_filled = all(operator.name in LAYOUT_ONLY for operator in divergence.operators)
    return Diagnosis(EXTRA) if own else Diagnosis(STOPPED, has_line=not is_filled)


def _is_addend(divergence: Divergence) -> bool:
    """Returns whether the candidate's gradient is one of those that the reference adds up."""
    own = divergence.array
    allowed = FITS * (largest(own) or 1.0)
    addends = (
        value
        for operator in divergence.reference_operators
        if operator.name in SUMS and operator.outputs[0].size == own.size
        for value in operator.inputs
        if value.size == own.size
    )
    return any(find_layout(value.data, own, allowed) is not None for value in addends)


def extra_gradient(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Returns a diagnosis if a sum of gradients is right without one of them.

    The line is where that gradient begins.
    """
    trials = Trials(divergence)
    inside = {operator.index for operator in divergence.operators}
    for operator in reversed(divergence.operators):
        if operator.name not in SUMS:
            continue
        for place, value in enumerate(operator.inputs):
            made_here = value.producer is not None and value.producer.index in inside
            if made_here and trials.agree({value.index: np.zeros(value.shape)}, FITS):
                alone = _alone(operator, place, inside)
                first = next((step for step in alone if step.source), None)
                return Diagnosis("the candidate adds a gradient that the reference does not", first)
    return None


def _alone(operator: Operator, place: int, inside: Collection[int]) -> list[Operator]:
    """Returns the operators that one addend of a sum depends on, and no other.

    Args:
        operator: the sum.
        place: of the addend.
        inside: the operators of the segment, by their index.
    """

    def before(value: Value) -> dict[int, Operator]:
        found, _ = region_before([value], lambda v: False)
        return {step.index: step for step in found if step.index in inside}

    others = [before(value) for other, value in enumerate(operator.inputs) if other != place]
    found = before(operator.inputs[place])
    return [step for index, step in found.items() if not any(index in one for one in others)]
