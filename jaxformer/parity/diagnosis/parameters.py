"""Parameters whose numbers the other side does not have, as where a checkpoint was not loaded."""

from collections.abc import Sequence

from jaxformer.parity.diagnosis.evidence import Diagnosis
from jaxformer.parity.recording.operators.graph import Operator
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.words import listed


def unknown_parameter(divergence: Divergence, walk: Walk) -> Diagnosis | None:
    """Finds parameters of a segment that should be those of the reference's segment, and are none.

    Each side reads one whose numbers are nowhere on the other side: these two belong together.
    """
    own = _read(divergence.operators, walk.unknown)
    right = _read(divergence.reference_operators, walk.missing)
    if not own or not right:
        return None
    reader = next(op for op in divergence.operators if any(v.name == own[0] for v in op.inputs))
    named = reader if reader.source else None
    verb = "has" if len(own) == 1 else "have"
    none = [name for name in right if name not in walk.partly]
    most = [f"{name} but for {walk.partly[name]}" for name in right if name in walk.partly]
    held = [f"none of {listed(none)}"] if none else []
    held += [listed(most)] if most else []
    return Diagnosis(
        f"{listed(own)} {verb} numbers that the reference does not have; the candidate has "
        + ", and ".join(held),
        named,
    )


def _read(operators: Sequence[Operator], among: set[str]) -> list[str]:
    """Returns the parameters of some that operators read, in order."""
    read = (v for op in operators for v in op.inputs if v.kind == "parameter" and v.name in among)
    return list(dict.fromkeys(value.name for value in read))
