"""Tries all causes, the most specific first."""

import contextlib

import numpy as np

from jaxformer.parity.diagnosis.ablations import (
    extra_step,
    extra_write,
    missing_step,
)
from jaxformer.parity.diagnosis.counts import other_count
from jaxformer.parity.diagnosis.evidence import Diagnosis
from jaxformer.parity.diagnosis.formulas import (
    other_combination,
    other_function,
    other_norm,
    other_softmax,
)
from jaxformer.parity.diagnosis.gradients import extra_gradient, stopped_gradient
from jaxformer.parity.diagnosis.lookups import other_lookup
from jaxformer.parity.diagnosis.masks import other_comparison, other_mask
from jaxformer.parity.diagnosis.means import other_centre
from jaxformer.parity.diagnosis.parameters import unknown_parameter
from jaxformer.parity.diagnosis.reductions import other_reduction
from jaxformer.parity.diagnosis.relations import (
    missing_term,
    other_axes,
    other_rows,
    other_value,
    simple_relation,
)
from jaxformer.parity.diagnosis.rotations import no_rotation, other_rotation
from jaxformer.parity.diagnosis.rows import other_function_of_rows
from jaxformer.parity.diagnosis.substitutions import (
    other_input,
    other_number,
    other_tiny_number,
)
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk

# The most specific first.
ATTEMPTS = (
    unknown_parameter, other_lookup, other_function, other_tiny_number, other_norm, other_softmax,
    other_combination, other_mask, other_comparison, extra_write, other_count, other_centre,
    other_number, other_rotation, simple_relation, other_axes, other_rows, extra_step,
    missing_step, other_reduction, other_input, missing_term, other_value, no_rotation,
    other_function_of_rows,
)  # fmt: skip
# Errors of an operator that gets an array which it does not take.
NO_CAUSE = (TypeError, ValueError, IndexError, RuntimeError)

# What tries everything in every place, which takes minutes where there are more operators: those of
# a mixture's experts, for one, whose loops are recorded step by step.
EXHAUSTIVE = (other_number, other_input)
MOST_OPERATORS = 200

# A derivative has other operators than what it is the derivative of: formulas do not serve.
BACKWARD_ATTEMPTS = (
    stopped_gradient, extra_gradient, simple_relation, missing_term, other_axes, other_input,
    other_value,
)  # fmt: skip


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
