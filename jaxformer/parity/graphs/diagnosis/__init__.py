"""What would make a wrong segment right.

A diagnosis is tried, never guessed: it is given only if the substitution makes the candidate's
segment agree with the reference's value, or if the formula gives what that side computes.

- ``evidence``: both sides of a segment, what enters it, and its numbers.
- ``formulas``: the function, norm or softmax that each side computes.
- ``lookups``: which rows of a table are read.
- ``masks``: which keys each query may attend to.
- ``substitutions``: another number or input.
- ``ablations``: a step that only one side has.
- ``counts``: weights that one side reads more often.
- ``parameters``: numbers that were never loaded.
- ``relations``: factors, missing terms, axes and order.
- ``rotations``: layout, base and first position of rotary positions.
- ``reductions``: the numbers over which a mean or an extreme is taken.
- ``gradients``: what only a backward pass has.
"""

import contextlib

import numpy as np

from jaxformer.parity.graphs.diagnosis.ablations import (
    extra_step,
    extra_write,
    missing_step,
)
from jaxformer.parity.graphs.diagnosis.counts import other_count
from jaxformer.parity.graphs.diagnosis.evidence import Diagnosis
from jaxformer.parity.graphs.diagnosis.formulas import (
    other_combination,
    other_function,
    other_norm,
    other_softmax,
)
from jaxformer.parity.graphs.diagnosis.gradients import stopped_gradient
from jaxformer.parity.graphs.diagnosis.lookups import other_lookup
from jaxformer.parity.graphs.diagnosis.masks import other_mask
from jaxformer.parity.graphs.diagnosis.parameters import unknown_parameter
from jaxformer.parity.graphs.diagnosis.reductions import other_reduction
from jaxformer.parity.graphs.diagnosis.relations import (
    other_axes,
    other_rows,
    other_value,
    simple_relation,
)
from jaxformer.parity.graphs.diagnosis.rotations import no_rotation, other_rotation
from jaxformer.parity.graphs.diagnosis.substitutions import other_input, other_number
from jaxformer.parity.graphs.segments.divergences import Divergence
from jaxformer.parity.graphs.segments.walk import Walk

# The most specific first.
ATTEMPTS = (
    unknown_parameter, other_lookup, other_function, other_norm, other_softmax, other_combination,
    other_mask, extra_write, other_count, other_number, other_rotation, simple_relation,
    other_axes, other_rows, extra_step, missing_step, other_reduction, other_input, other_value,
    no_rotation,
)  # fmt: skip
# Errors of an operator that gets an array which it does not take.
NO_CAUSE = (TypeError, ValueError, IndexError, RuntimeError)

# What tries everything in every place, which takes minutes where there are more operators: those of
# a mixture's experts, for one, whose loops are recorded step by step.
EXHAUSTIVE = (other_number, other_input)
MOST_OPERATORS = 200

# A derivative has other operators than what it is the derivative of: formulas do not serve.
BACKWARD_ATTEMPTS = (stopped_gradient, simple_relation, other_axes, other_input, other_value)


def diagnose(divergence: Divergence, walk: Walk) -> Diagnosis:
    """Returns the first cause that explains a divergence; an empty text if none does."""
    is_long = len(divergence.operators) > MOST_OPERATORS
    for attempt in BACKWARD_ATTEMPTS if divergence.is_backward else ATTEMPTS:
        if is_long and attempt in EXHAUSTIVE:
            continue
        found = None
        # What cannot be computed with a substitute is not mended by it.
        with np.errstate(all="ignore"), contextlib.suppress(*NO_CAUSE):
            found = attempt(divergence, walk)
        if found is not None:
            return found
    return Diagnosis("")
