"""What is wrong with a gradient whose value in the forward pass is right."""

import numpy as np

from jaxformer.parity.diagnosis.operators.evidence import Diagnosis, sides_of
from jaxformer.parity.segments.operators.divergences import Divergence
from jaxformer.parity.segments.operators.walk import Walk


def stopped_gradient(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Returns a diagnosis if no gradient arrives where the reference has one."""
    own, right = sides_of(divergence)
    if np.any(own) or not np.any(right):
        return None
    return Diagnosis("no gradient arrives here in the candidate; in the reference one does")
