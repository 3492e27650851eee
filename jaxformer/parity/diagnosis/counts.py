"""Weights that one side reads more often: another number of layers that share them, or of steps."""

from jaxformer.parity.diagnosis.evidence import Diagnosis
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk


def other_count(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds a call of a weight in a segment that has no counterpart on the other side."""
    found = walk.other_count(divergence)
    if found is None:
        return None
    count, operator = found
    return Diagnosis(str(count), operator if operator is not None and operator.source else None)
