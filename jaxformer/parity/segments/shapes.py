"""Results of another shape than the reference's: which line gives it, and what is wrong before it.

Nothing of such a result can be compared. Where one product on each side leads to it, and only what
the products give differs in shape, the candidate's product is to blame, and what enters the two
must be equal.
"""

from collections.abc import Callable

from jaxformer.parity.matching.weight_uses import KINDS
from jaxformer.parity.recording.operators.graph import Operator, Value, region_before
from jaxformer.parity.segments.walk import Walk


def require_before(walk: Walk, value: Value, wanted: Value) -> tuple[Value, Value]:
    """Requires what enters the product before a result to be what enters the reference's.

    Args:
        walk: after the forward pass.
        value: a result of the candidate that has another size than it must have.
        wanted: what it must be.

    Returns:
        the value of the candidate that has another size first, as far as that is known, and what it
        must be.
    """
    own = _product_before(value, lambda v: v.index in walk.matches)
    right = _product_before(wanted, lambda v: v.index in walk.reached)
    if own is None or right is None or own.outputs[0].size == right.outputs[0].size:
        return value, wanted
    (read,), (other,) = (_activations(operator) for operator in (own, right))
    if read.size != other.size:
        return value, wanted
    walk.require(read, other)
    return own.outputs[0], right.outputs[0]


def _product_before(value: Value, is_known: Callable[[Value], bool]) -> Operator | None:
    """Returns the one product of an activation with a weight that leads to a value."""
    operators, _ = region_before([value], is_known)
    found = [
        operator
        for operator in operators
        if KINDS.get(operator.name) == "product"
        and len(_activations(operator)) == 1
        and any(read.is_weight for read in operator.inputs)
    ]
    return found[0] if len(found) == 1 else None


def _activations(operator: Operator) -> list[Value]:
    return [read for read in operator.inputs if read.is_activation]
