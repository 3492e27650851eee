"""What must be equal around two operators that read the same weight."""

import numpy as np

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.moved_scales import without_moved_scale
from jaxformer.parity.matching.weight_uses import Use
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.segments.effects import depending

# How many operators behind a product are looked at.
MOST_STEPS = 60


def required_values(own: Use, right: Use) -> tuple[list[tuple[Value, Value]], tuple[Value, Value]]:
    """Returns what must be equal before two uses of a weight, and what after them.

    A convolution reads an image, a product that stands for it the patches: too far for a layout.
    """
    entering = list(zip(own.read, right.read, strict=False))
    if own.is_convolution != right.is_convolution:
        entering = []
    if len(entering) != 1:
        return entering, (own.made, right.made)
    (value, other) = entering[0]
    pair, wanted = without_moved_scale((value, own.made), (other, right.made))
    return [(pair[0], wanted[0])], (pair[1], wanted[1])


def leads_right(anchors: Anchors, own: Use, right: Use) -> bool:
    """Returns whether two uses read other values, and what follows them is equal all the same.

    A product is linear: terms and factors may come before it or after it, on either side.
    """
    if any(value.index in anchors.matches for value in (*own.read, own.made)):
        return False
    behind = anchors.reference.operators[right.operator.index :][:MOST_STEPS]
    wanted = {v.index for step in depending(behind, right.made) for v in step.outputs}
    first = own.operator.index
    steps = anchors.candidate.operators[first : first + MOST_STEPS]
    again = run_again(steps, anchors.arrays)
    for step in depending(steps[1:], own.made):
        for made in step.outputs:
            array = again.get(made.index, made.data)
            if made.is_activation and array.size and np.ptp(array) > 0:
                found = anchors.matches.get(made.index, ())
                found = anchors.index.find(array) if made.index in again else found
                if any(match.value.index in wanted for match in found):
                    return True
    return False
