"""Which operators of the two sides read the same parameter: they should read and give the same.

A parameter may be read several times, by a shared layer, and in another order than the reference
reads it. So calls belong together if they read or give the same values. Where no values are the
same there is a bug: then the nearest call counts, or the one that comes at the same place.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from jaxformer.parity.matching.anchors import Anchors
from jaxformer.parity.matching.layouts import nearest_layout
from jaxformer.parity.matching.moved_scales import unscaled
from jaxformer.parity.recording.operators.graph import Operator, Value, first_shape

# What an operator does with a parameter, in both frameworks' words. Products and sums number by
# number are left out: they can be taken in another order, with other values in between.
KINDS = {
    "dot_general": "product", "mm": "product", "bmm": "product", "mv": "product",
    "matmul": "product", "conv_general_dilated": "product", "convolution": "product",
    "gather": "lookup", "embedding": "lookup", "index_select": "lookup", "index": "lookup",
    "dynamic_slice": "lookup", "slice": "lookup",
}  # fmt: skip

# What is this much nearer than anything else is what a wrong value should be.
NEARER = 0.25
# With more calls than this, wrong values are not compared with each other.
MOST_NEAR = 32


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """An operator that reads a weight.

    Attributes:
        operator: it.
        read: the activations that it reads beside the weight.
    """

    operator: Operator
    read: list[Value]

    @property
    def made(self) -> Value:
        """What it gives."""
        return self.operator.outputs[0]

    @property
    def is_convolution(self) -> bool:
        """Whether it is a convolution."""
        return self.operator.name.startswith("conv")

    @property
    def unscaled(self) -> list[Value]:
        """What it reads, and what that is a multiple of."""
        return [step.value for value in self.read for step in unscaled(value)]


@dataclasses.dataclass(frozen=True)
class OtherCount:
    """A weight that the two sides do not read equally often.

    Attributes:
        weight: its path in the reference.
        own: how often the candidate reads it.
        right: how often the reference does.
    """

    weight: str
    own: int
    right: int

    def __str__(self) -> str:
        return f"the candidate reads {self.weight} {self.own} times; the reference {self.right}"


# By the weight, what is done with it, and the count of numbers that this gives.
Uses = dict[tuple[int, str, int], list[Use]]


class WeightUses:
    """Finds the operators that read a weight, and pairs those of the two sides.

    Args:
        anchors: which values are equal.
    """

    def __init__(self, anchors: Anchors):
        self._anchors = anchors
        self._first: dict[int, int] = {}
        # Weights that one side has read more often: what reads them later has no known counterpart.
        self._miscounted: set[int] = set()

    def of_reference(self, operators: Sequence[Operator]) -> Uses:
        """Returns the uses of weights by operators of the reference."""
        return self._collect(operators, self._first_twin)

    def pairing(self, operators: Sequence[Operator], expected: Uses) -> "Pairing":
        """Returns which operators of the candidate belong to which of the reference.

        Args:
            operators: of the candidate.
            expected: the reference's uses.
        """
        own = self._collect(operators, self._of_candidate)
        found = Pairing(self._anchors, own, expected, self._miscounted)
        self._miscounted |= found.miscounted_weights
        return found

    def reading(self, operators: Sequence[Operator]) -> set[int]:
        """Returns which operators of the candidate read a weight, known in the reference or not."""
        ambiguous = self._ambiguous()
        return {
            operator.index
            for operator in operators
            if (weight := _weight_of(operator)) is not None
            and self._of_candidate(weight) not in ambiguous
        }

    def _collect(
        self, operators: Sequence[Operator], identify: Callable[[Value], int | None]
    ) -> Uses:
        """Returns the operators that read one weight, and their activations, by weight and kind."""
        found: Uses = defaultdict(list)
        ambiguous = self._ambiguous()
        for operator in operators:
            weight = _weight_of(operator)
            key = None if weight is None else identify(weight)
            if key is None or key in ambiguous:
                continue
            activations = [v for v in operator.inputs if v.is_activation]
            use = key, KINDS[operator.name], operator.outputs[0].size
            found[use].append(Use(operator, activations))
        return found

    def _of_candidate(self, value: Value) -> int | None:
        """Returns the first value of the reference that a weight of the candidate is."""
        found = self._anchors.matches.get(value.index, ())
        return min((m.value.index for m in found if m.value.is_weight), default=None)

    def _first_twin(self, value: Value) -> int:
        """Returns the first value of the reference with the numbers of one of its weights."""
        value = first_shape(value)
        if value.index not in self._first:
            twins = self._anchors.index.twins(value)
            indices = [value.index, *(m.value.index for m in twins if m.value.is_weight)]
            self._first[value.index] = min(indices)
        return self._first[value.index]

    def _ambiguous(self) -> set[int]:
        """Returns values of parameters that several parameters of the reference share."""
        counts: dict[int, int] = defaultdict(int)
        for value in self._anchors.reference.parameters.values():
            counts[self._first_twin(value)] += 1 + self._anchors.index.is_one_number(value)
        return {index for index, count in counts.items() if count > 1}


def _weight_of(operator: Operator) -> Value | None:
    """Returns the one weight that an operator reads, if what it does with it is in ``KINDS``."""
    kind = KINDS.get(operator.name)
    weights = [v for v in operator.inputs if v.is_weight and v.dtype.kind == "f"]
    if kind is None or len(weights) != 1 or len(operator.outputs) != 1:
        return None
    return weights[0] if operator.outputs[0].is_activation or kind == "lookup" else None


class Pairing:
    """Pairs the uses of each weight, one after another, while the values are put right.

    Args:
        anchors: which values are equal.
        own: the candidate's uses.
        expected: the reference's.
        miscounted: weights whose uses are paired by equal values alone: one side has read them more
            often before.

    Attributes:
        miscounted_weights: those of these uses, too.
        miscounted: which weight operators of the candidate read more often than the reference does.
        missing: which weight operators of the reference read more often than the candidate does.
    """

    def __init__(self, anchors: Anchors, own: Uses, expected: Uses, miscounted: Collection[int]):
        self.miscounted: dict[int, OtherCount] = {}
        self.missing: dict[int, OtherCount] = {}
        self.miscounted_weights: set[int] = set()
        self._groups: dict[int, tuple[Use, _Calls]] = {}
        # Several calls may be made as one, with a larger result: then nothing can be counted.
        joined = {key[:2] for key in own if key not in expected}
        for key, uses in own.items():
            others = expected.get(key, [])
            calls = _Calls(anchors, uses, others, key[0] not in miscounted)
            self._groups |= {use.operator.index: (use, calls) for use in uses}
            count = OtherCount(anchors.reference.values[key[0]].name, len(uses), len(others))
            if len(uses) != len(others):
                self.miscounted_weights.add(key[0])
            if key[:2] in joined:
                continue
            if len(uses) > len(others):
                self.miscounted |= {use.operator.index: count for use in uses}
            elif len(uses) < len(others):
                self.missing |= {use.operator.index: count for use in others}

    def partner(self, operator: Operator) -> tuple[Use, Use] | None:
        """Returns a use by the candidate and the reference's, if the operator is one and has one.

        Args:
            operator: of the candidate; each is asked for once, in the order of the run.
        """
        if operator.index not in self._groups:
            return None
        use, calls = self._groups[operator.index]
        partner = calls.take(use)
        return None if partner is None else (use, partner)


class _Calls:
    """The calls of one weight on both sides that have no partner yet.

    Args:
        anchors: which values are equal.
        own: the candidate's calls.
        expected: the reference's.
        are_counted: whether a wrong call may be paired by what is left.
    """

    def __init__(
        self, anchors: Anchors, own: Sequence[Use], expected: Sequence[Use], are_counted: bool
    ):
        self._are_counted = are_counted
        self._anchors = anchors
        self._own, self._expected = list(own), list(expected)
        self._taken: set[Use] = set()
        self._alone: list[Use] = []
        self._readers: dict[int, list[Use]] = defaultdict(list)
        self._makers: dict[int, list[Use]] = defaultdict(list)
        for use in expected:
            self._makers[use.made.index].append(use)
            for value in use.unscaled:
                self._readers[value.index].append(use)

    def take(self, use: Use) -> Use | None:
        """Returns the reference's call that one of the candidate is, and takes it away."""
        self._own.remove(use)
        twins = self._twins(use)
        free = [other for other in twins if other not in self._taken]
        partner = next(iter(free), None) or self._wrong_partner(use) or next(iter(twins), None)
        if partner is not None:
            self._taken.add(partner)
        else:
            self._alone.append(use)
        return partner

    def _twins(self, use: Use) -> list[Use]:
        """Returns the reference's calls that read what a call reads, then those that give it."""
        pairs = [*((value, self._readers) for value in use.unscaled), (use.made, self._makers)]
        found = [
            other
            for value, uses in pairs
            for match in self._anchors.matches.get(value.index, ())
            for other in uses.get(match.value.index, ())
        ]
        if not use.read:
            found += [other for other in self._expected if _read_alike(use, other)]
        return list(dict.fromkeys(found))

    def _wrong_partner(self, use: Use) -> Use | None:
        """Returns the call that a wrong one should be: no other one is it."""
        own = [*self._alone, use]
        claimed: set[Use] = set()
        for other in self._own:
            twins = [twin for twin in self._twins(other) if twin not in self._taken]
            if twins:
                claimed.update(twins)
            else:
                own.append(other)
        left = [
            other
            for other in self._expected
            if other not in self._taken | claimed and other.made.index not in self._anchors.reached
        ]
        if len(left) != len(own) or not self._are_counted:
            return None
        return self._nearest(use, left) or left[0]

    def _nearest(self, use: Use, among: Sequence[Use]) -> Use | None:
        """Returns the call whose input is much nearer to that of a call than any other's."""
        if not use.read or not 1 < len(among) <= MOST_NEAR:
            return None
        array = self._anchors.array(use.read[0])
        found = []
        for place, other in enumerate(among):
            if other.read and other.read[0].size == array.size:
                near = nearest_layout(other.read[0].data, array, is_plain=True)
                if near is not None:
                    found.append((near[1], place))
        found.sort()
        if len(found) > 1 and found[0][0] < NEARER * found[1][0]:
            return among[found[0][1]]
        return None


def _read_alike(one: Use, other: Use) -> bool:
    """Returns whether two lookups read the same rows."""
    own, right = (list(_rows(use)) for use in (one, other))
    return any(np.array_equal(a, b) for a in own for b in right)


def _rows(use: Use) -> Iterator[np.ndarray]:
    """Yields the integers that a lookup reads, in a line."""
    for value in use.operator.inputs:
        if value.dtype.kind in "iu":
            yield value.data.reshape(-1)
