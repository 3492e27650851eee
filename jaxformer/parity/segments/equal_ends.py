"""Which of several equal values is wrong, where the reference has two that differ."""

from collections.abc import Sequence

import numpy as np

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.layouts import Layout, find_layout
from jaxformer.parity.matching.values import rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.effects import depending


def last_equal_end(
    anchors: Anchors,
    end: tuple[Value, Value, Layout],
    required: tuple[Value, Value, float],
    operators: Sequence[Operator],
    reference_operators: Sequence[Operator],
) -> tuple[Value, Value, Layout]:
    """Returns the end of a wrong segment, or the last value equal to it that may be wrong instead.

    A loss that takes the same axis twice computes one value two times. The reference computes that
    value, and later another one: so does a candidate whose second value is wrong.

    Args:
        anchors: what is known to be right.
        end: a value of the candidate, what it must be, and in which layout.
        required: the value that it leads to, what that must be, and how far it may be off.
        operators: of the candidate's segment.
        reference_operators: of the reference's.
    """
    value, wanted, layout = end
    array = anchors.array(value)
    twins = [
        made
        for operator in reversed(operators)
        for made in operator.outputs
        if made.index > value.index
        and made.shape == value.shape
        and made.index not in anchors.matches
        and np.array_equal(anchors.array(made), array)
    ]
    earlier = [
        made
        for operator in reference_operators
        for made in operator.outputs
        if made.index < wanted.index and made.size == value.size
    ]
    if not twins or not any(
        find_layout(made.data, array, rounding_allowed(made.data)) for made in earlier
    ):
        return end
    known = anchors.arrays_before(operators)
    last, right, allowed = required
    for twin in twins:
        given = known | {twin.index: layout.apply(wanted.data)}
        again = run_again(depending(operators, twin), given).get(last.index)
        if again is not None and find_layout(right.data, again, allowed):
            return twin, wanted, layout
    return end
