"""A wrong segment, as a walk through the candidate's tape finds it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.operators.layouts import Layout, distance, find_layout
from jaxformer.parity.matching.operators.values import largest
from jaxformer.parity.recording.operators.graph import Operator, Value, run_again
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY

# What puts a segment right leaves less than this share of its error.
REMAINS = 1e-2


NO_OPERATOR = Operator(0, "", [], [], list)


@dataclasses.dataclass
class Divergence:
    """A segment of the candidate that computes something else than the reference's.

    Attributes:
        value: the end of the candidate's segment.
        reference_value: what it should be.
        layout: from the reference's to the candidate's.
        operators: of the candidate's segment, in order.
        boundary: the values that enter it.
        reference_operators: of the reference's segment.
        reference_boundary: the values that enter that.
        difference: at the end, and what of it would be rounding.
        array: what the candidate computed at the end.
        arrays: of the candidate's values that were put right before, by index.
        required: the value that had to be an anchor, at the segment's end or after it.
        required_reference: what that should be.
        required_operators: all operators between the last anchors and the required value.
        is_backward: whether it belongs to the backward pass.
    """

    value: Value
    reference_value: Value
    layout: Layout
    operators: list[Operator]
    boundary: list[Value]
    reference_operators: list[Operator]
    reference_boundary: list[Value]
    difference: Difference
    array: np.ndarray
    arrays: Mapping[int, Any]
    required: Value
    required_reference: Value
    required_operators: list[Operator]
    is_backward: bool = False

    @property
    def error(self) -> float:
        """The largest difference at the end, of scale."""
        return self.difference.error / (self.difference.scale or 1.0)

    @property
    def reference_operator(self) -> Operator:
        """The last operator of the reference's segment, or before it, whose source is known."""
        own = self.reference_value.producer
        named = (op for op in reversed(self.reference_operators) if op.source)
        return next(named, _named_before(self.reference_value) or own or NO_OPERATOR)

    @property
    def reference_module(self) -> str:
        """Path of the reference's module in which the last operator that is a step runs."""
        steps = (
            op
            for op in reversed(self.reference_operators)
            if op.source and op.name not in LAYOUT_ONLY
        )
        return next(steps, self.reference_operator).module

    def agrees(self, given: Mapping[int, Any], allowed: float) -> bool:
        """Returns whether the segment, or all up to the required value, is right with other arrays.

        Args:
            given: arrays of values that no operator of the segment makes, by index.
            allowed: the largest difference, of scale; a change that leaves more than a small part
                of the error is none that makes the segment right.
        """
        allowed = min(allowed, self.error * REMAINS)
        end = self.layout.apply(self.reference_value.data)
        for operators, value, wanted in (
            (self.operators, self.value, end),
            (self.required_operators, self.required, self.required_reference.data),
        ):
            made = {v.index for op in operators for v in op.outputs}
            known = {i: a for i, a in self.arrays.items() if i not in made}
            again = run_again(operators, {**known, **given}).get(value.index)
            if again is None or again.size != wanted.size:
                continue
            limit = allowed * (largest(wanted) or 1.0)
            is_right = (
                again.shape == wanted.shape and distance(again, wanted) <= limit
                if wanted is end
                else find_layout(wanted, again, limit) is not None
            )
            if is_right:
                return True
        return False


def _named_before(value: Value) -> Operator | None:
    """Returns the operator with a known source that made a value, or what it was made of."""
    producer = value.producer
    while producer is not None and not producer.source:
        before = next((v for v in producer.inputs if v.is_activation), None)
        producer = None if before is None else before.producer
    return producer
