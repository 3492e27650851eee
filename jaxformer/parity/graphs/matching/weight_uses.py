"""Which operators of the two sides read the same parameter: they should read and give the same."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxformer.parity.graphs.matching.anchors import Anchors
from jaxformer.parity.graphs.recording.tape import Operator, Value

# What an operator does with a parameter, in both frameworks' words. Products and sums number by
# number are left out: they can be taken in another order, with other values in between.
KINDS = {
    "dot_general": "product", "mm": "product", "bmm": "product", "mv": "product",
    "matmul": "product", "conv_general_dilated": "product", "convolution": "product",
    "gather": "lookup", "embedding": "lookup", "index_select": "lookup", "index": "lookup",
    "dynamic_slice": "lookup", "slice": "lookup",
}  # fmt: skip

Uses = dict[tuple[int, str, int], list[tuple[Operator, list[Value]]]]


class WeightUses:
    """Finds the operators that read a weight, and pairs those of the two sides.

    Args:
        anchors: which weights are equal.
    """

    def __init__(self, anchors: Anchors):
        self._anchors = anchors
        self._first: dict[int, int] = {}

    def of_reference(self, operators: Sequence[Operator]) -> Uses:
        """Returns the uses of weights by operators of the reference."""
        return self._collect(operators, self._first_twin)

    def pairs(
        self, operators: Sequence[Operator], expected: Uses
    ) -> Iterator[tuple[Operator, list[Value], Operator, list[Value]]]:
        """Yields an operator of the candidate, what it reads, and the same of the reference.

        Args:
            operators: of the candidate.
            expected: the reference's uses.
        """
        for key, uses in self._collect(operators, self._of_candidate).items():
            if len(uses) != len(expected.get(key, ())):
                continue
            for (one, read), (other, reference_read) in zip(uses, expected[key], strict=True):
                yield one, read, other, reference_read

    def _collect(
        self, operators: Sequence[Operator], identify: Callable[[Value], int | None]
    ) -> Uses:
        """Returns the operators that read one weight, and their activations, by weight and kind."""
        found: Uses = defaultdict(list)
        ambiguous = self._ambiguous()
        for operator in operators:
            kind = KINDS.get(operator.name)
            weights = [v for v in operator.inputs if v.is_weight and v.data.dtype.kind == "f"]
            if kind is None or len(weights) != 1 or len(operator.outputs) != 1:
                continue
            if not (operator.outputs[0].is_activation or kind == "lookup"):
                continue
            key = identify(weights[0])
            if key is None or key in ambiguous:
                continue
            activations = [v for v in operator.inputs if v.is_activation]
            found[key, kind, operator.outputs[0].data.size].append((operator, activations))
        return found

    def _of_candidate(self, value: Value) -> int | None:
        """Returns the first value of the reference that a weight of the candidate is."""
        found = self._anchors.matches.get(value.index, ())
        return min((m.value.index for m in found if m.value.is_weight), default=None)

    def _first_twin(self, value: Value) -> int:
        """Returns the first value of the reference with the numbers of one of its weights."""
        if value.index not in self._first:
            twins = self._anchors.index.find(value.data)
            self._first[value.index] = min(
                (m.value.index for m in twins if m.value.is_weight), default=value.index
            )
        return self._first[value.index]

    def _ambiguous(self) -> set[int]:
        """Returns values of parameters that several parameters of the reference share."""
        counts: dict[int, int] = defaultdict(int)
        for value in self._anchors.reference.parameters.values():
            counts[self._first_twin(value)] += 1 + (np.ptp(value.data) == 0)
        return {index for index, count in counts.items() if count > 1}
