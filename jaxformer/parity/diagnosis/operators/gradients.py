"""What is wrong with a gradient whose value in the forward pass is right."""

import numpy as np

from jaxformer.parity.diagnosis.operators.evidence import Diagnosis, sides_of
from jaxformer.parity.segments.operators.divergences import Divergence
from jaxformer.parity.segments.operators.walk import Walk


def stopped_gradient(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Returns a diagnosis if a gradient arrives on one side alone."""
    own, right = map(np.any, sides_of(divergence))
    if own == right:
        return None
    if own:
        return Diagnosis("a gradient arrives here in the candidate; in the reference none does")
    return Diagnosis("no gradient arrives here in the candidate; in the reference one does")
