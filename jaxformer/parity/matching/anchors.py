"""Which values of the candidate are known to be right, because the reference has them.

A value that equals one of the reference, in any layout, is an *anchor*. Each value is looked up as
soon as it is recorded. An anchor's array is then the reference's own, in the candidate's layout: it
needs no memory of its own, and rounding does not add up.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.layouts import distance
from jaxformer.parity.matching.values import Index, Match, largest
from jaxformer.parity.recording.operators.graph import LARGE, Operator, Value, same_numbers
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY, MARK, SUMS
from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.tolerance import ROUNDOFF, allowed_error

# A constant that differs by less than this, per position, is a table in float32.
TABLE_ALLOWED = 8 * ROUNDOFF["float32"]


@dataclasses.dataclass(frozen=True)
class Table:
    """A constant of the candidate that is a float32 rounding away from the reference's."""

    value: Value
    reference_value: Value
    error: float


class Anchors:
    """The candidate's values beside the reference's.

    Args:
        reference: its tape.
        index: of its values, where some were noted during its run.

    Attributes:
        reference: its tape.
        candidate: its tape; each new value on it is looked up.
        index: the reference's values by their numbers.
        matches: of each value of the candidate that is an anchor, by index.
        reached: values of the reference that are anchors, by index.
        arrays: of values of the candidate that were put right, or depend on one that was.
        pinned: values that have the reference's numbers in place of their own.
        tables: constants in float32.
        unknown: paths of parameters of the candidate whose numbers the reference does not have.
        largest_error: the largest difference of an anchor, of scale.
        known_parameters: by name, of parameters of the candidate that need no comparison, what they
            equal.
    """

    def __init__(self, reference: Tape, index: Index | None = None):
        self.reference = reference
        self.candidate = Tape(self._observe, reference.recent)
        self.index = index or Index()
        self.matches: dict[int, list[Match]] = {}
        self.reached: set[int] = set()
        self.arrays: dict[int, Any] = {}
        self.pinned: set[int] = set()
        self.tables: list[Table] = []
        self.unknown: set[str] = set()
        self.largest_error = 0.0
        self.known_parameters: Mapping[str, Match] = {}

    def array(self, value: Value) -> Any:
        """Returns a value's array, put right where it was wrong."""
        found = self.arrays.get(value.index)
        return value.data if found is None else found

    def keep_corrections(self) -> None:
        """Makes the arrays that were put right those of their values."""
        for index, array in self.arrays.items():
            self.candidate.values[index].data = array
        self.arrays = {}

    def compute(self, operator: Operator) -> None:
        """Computes an operator anew if what it reads was put right, and looks for its values."""
        if all(value.index in self.pinned for value in operator.outputs):
            return
        if not any(value.index in self.arrays for value in operator.inputs):
            return
        made = operator.run(*(self.array(value) for value in operator.inputs))
        for value, array in zip(operator.outputs, made, strict=True):
            self.arrays[value.index] = array
            self._look_up(value, array)

    def arrays_before(self, operators: Sequence[Operator]) -> dict[int, Any]:
        """Returns the corrected arrays that operators read and do not make."""
        made = {value.index for operator in operators for value in operator.outputs}
        read = {value.index for operator in operators for value in operator.inputs}
        return {i: self.arrays[i] for i in read - made if i in self.arrays}

    def allowed(self, operators: Sequence[Operator], end: Value, scale: float) -> float:
        """Returns the largest error that is rounding: how far operators are from their float32."""

        def narrow(array: Any) -> Any:
            if getattr(getattr(array, "dtype", None), "kind", "") == "f":
                return array.astype(np.float32).astype(np.float64)
            return array

        with np.errstate(over="ignore"):
            in_float32 = run_again(operators, self.arrays_before(operators), narrow)
        # What no operator made, such as an input that is returned, has no rounding.
        low = in_float32.get(end.index)
        far = 0.0 if low is None else distance(low.astype(np.float32), self.array(end))
        return allowed_error(max(scale, self._addends(end)), far)

    def _addends(self, value: Value) -> float:
        """Returns the largest number that a sum is made of; 0 if a value is no sum.

        A sum is no more exact than what it adds. Numbers that cancel, x and -x, are rounded alike,
        so that float32 does not show it: the gradient of a key's bias, over several calls.
        """
        producer = value.producer
        while producer is not None and producer.name in LAYOUT_ONLY:
            producer = producer.inputs[0].producer
        if producer is None or producer.name not in SUMS:
            return 0.0
        arrays = [self.array(v) for v in producer.inputs if v.dtype.kind == "f"]
        return max(map(largest, arrays), default=0.0)

    def _observe(self, value: Value) -> None:
        """Looks up a value that was just recorded."""
        producer = value.producer
        if producer is not None and producer.name == MARK:
            self._take_over(value, producer.inputs[0])
            return
        known = self.known_parameters.get(value.name) if value.kind == "parameter" else None
        if known is None:
            self._look_up(value, value.data)
        else:
            self.matches[value.index] = [known]
            self.reached.add(known.value.index)
        found = self.matches.get(value.index)
        if found:
            # The nearest: with a small eps, a variance is near to itself plus eps.
            nearest = min(found, key=lambda match: match.error)
            # -1e9 and minus infinity are alike, but not in what is computed from them.
            if known is not None or self.index.is_finite(nearest.value):
                value.stand_for(
                    lambda: nearest.layout.apply(nearest.value.data), self.candidate.recent
                )

    def _take_over(self, value: Value, source: Value) -> None:
        """Knows of a value what is known of another one, which it is."""
        if value.dtype.kind != "f":
            # A choice may be the reference's in place of the candidate's own.
            return
        if source.index in self.matches:
            self.matches[value.index] = list(self.matches[source.index])
        if value.nbytes >= LARGE and source.is_there:
            value.stand_for(lambda: source.data, self.candidate.recent)

    def _look_up(self, value: Value, array: Any) -> None:
        if getattr(getattr(array, "dtype", None), "kind", "") != "f":
            return
        found = self.index.find(array, own=self._known_moments(value))
        if not found and value.is_constant:
            found = self._find_table(value, array)
        if found:
            self.matches[value.index] = found
            self.reached |= {match.value.index for match in found}
            scale = self.index.largest(found[0].value) or 1.0
            self.largest_error = max(self.largest_error, found[0].error / scale)
        else:
            self.matches.pop(value.index, None)

    def _known_moments(self, value: Value) -> np.ndarray | None:
        """Returns the moments of a value that is an anchor in another shape."""
        source = same_numbers(value)
        found = self.matches.get(source.index) if source is not None else None
        return self.index.moments_of(found[0].value) if found else None

    def _find_table(self, value: Value, array: np.ndarray) -> list[Match]:
        """Returns what a table in float32 should be."""
        allowed = TABLE_ALLOWED * max((*array.shape, 1))
        near = [m for m in self.index.find(array, allowed, 1e8 * allowed) if m.value.is_constant]
        if near:
            self.tables.append(Table(value, near[0].value, near[0].error))
            return self.index.find(near[0].layout.apply(near[0].value.data))
        return []
