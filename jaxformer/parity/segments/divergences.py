"""A wrong segment, as a walk through the candidate's tape finds it."""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.layouts import Layout, distance, find_layout
from jaxformer.parity.matching.values import largest, rounding_allowed
from jaxformer.parity.recording.operators.graph import Operator, Value
from jaxformer.parity.recording.operators.kinds import LAYOUT_ONLY
from jaxformer.parity.recording.operators.running_again import run_again

# What puts a segment right leaves less than this share of its error.
REMAINS = 1e-2
# So many operators are run again at most, to find what makes a segment right.
MOST_RUN = 20_000


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
        reader: the operator that reads the value and must read another one, where the value itself
            is right.
        owner: path of the known module whose code it is, where one asked for it.
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
    reader: Operator | None = None
    owner: str | None = None

    @property
    def error(self) -> float:
        """The largest difference at the end, of scale."""
        return self.difference.error / (self.difference.scale or 1.0)

    def is_made_again(self, value: Value) -> bool:
        """Returns whether an operator has made the wrong end once more, as a value."""
        made, own = value.producer, self.value.producer
        if made is None or own is None or self.reader is not None:
            return False
        wrong = self.array
        return (
            (made.name, made.source) == (own.name, own.source)
            and value.shape == wrong.shape
            and value.index > self.value.index
            # Zeros are in many places.
            and bool(np.ptp(wrong))
            and distance(value.data, wrong) <= rounding_allowed(wrong)
        )

    @property
    def lines(self) -> set[str]:
        """Lines of the candidate's segment; of a value that is misread, its own and the reader's.

        The gradient of such a value is wrong too.
        """
        operators = self.operators
        if self.reader is not None:
            operators = [op for op in (self.reader, self.value.producer) if op is not None]
        return {operator.source for operator in operators if operator.source}

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


class Trials:
    """Tries whether a segment, or all up to the required value, is right with other arrays.

    What does not depend on the other arrays is computed once, and no array is tried twice. Tries
    of a long recurrence would take minutes: once too many operators were run, no try succeeds.

    Args:
        divergence: the segment.
        most: how many operators are run again at most.

    Attributes:
        right_with: the other arrays of the last try that succeeded.
    """

    def __init__(self, divergence: Divergence, most: int = MOST_RUN):
        self._divergence, self._left = divergence, most
        self.right_with: Mapping[int, Any] = {}
        self._end = divergence.layout.apply(divergence.reference_value.data)
        parts = (divergence.operators, divergence.required_operators)
        operators = {op.index: op for part in parts for op in part}
        self._operators = [operators[index] for index in sorted(operators)]
        made = {v.index for op in self._operators for v in op.outputs}
        known = {i: a for i, a in divergence.arrays.items() if i not in made}
        self._before = run_again(self._operators, known)
        self._own = {op.index for op in divergence.operators}
        self._later: dict[tuple[int, ...], _Later] = {}
        self._tried: dict[bytes, bool] = {}

    def agree(self, given: Mapping[int, Any], allowed: float) -> bool:
        """Returns whether the segment is right with other arrays.

        Args:
            given: the other arrays, by the index of their values.
            allowed: the largest difference, of scale; a change that leaves more than a small part
                of the error is none that makes the segment right.
        """
        allowed = min(allowed, self._divergence.error * REMAINS)
        one = digest(given, allowed)
        if one not in self._tried:
            if self._left <= 0:
                return False
            self._tried[one] = self._is_right_with(given, allowed)
        if self._tried[one]:
            self.right_with = given
        return self._tried[one]

    def _is_right_with(self, given: Mapping[int, Any], allowed: float) -> bool:
        later = self._later_than(tuple(given))
        arrays = {**later.known, **given}
        segment = self._divergence
        for operators, value, wanted in (
            (later.own, segment.value, self._end),
            (later.others, segment.required, segment.required_reference.data),
        ):
            self._left -= len(operators)
            arrays = run_again(operators, arrays)
            again = arrays.get(value.index)
            if again is None or again.size != wanted.size:
                continue
            limit = allowed * (largest(wanted) or 1.0)
            is_right = (
                again.shape == wanted.shape and distance(again, wanted) <= limit
                if wanted is self._end
                else find_layout(wanted, again, limit) is not None
            )
            if is_right:
                return True
        return False

    def _later_than(self, given: tuple[int, ...]) -> "_Later":
        """Returns what depends on some values, which are given by index."""
        if given not in self._later:
            changed, later = set(given), []
            for operator in self._operators:
                if any(v.index in changed for v in operator.inputs):
                    later.append(operator)
                    changed |= {v.index for v in operator.outputs}
            self._later[given] = _Later(
                [op for op in later if op.index in self._own],
                [op for op in later if op.index not in self._own],
                {i: array for i, array in self._before.items() if i not in changed},
            )
        return self._later[given]


@dataclasses.dataclass(frozen=True)
class _Later:
    """What depends on other arrays.

    Attributes:
        own: operators of the segment.
        others: those between its end and the required value.
        known: arrays that do not depend on them and are not as recorded, by index.
    """

    own: list[Operator]
    others: list[Operator]
    known: Mapping[int, Any]


def digest(given: Mapping[int, Any], allowed: float = 0.0) -> bytes:
    """Returns a few bytes that tell arrays from others."""
    found = hashlib.blake2b(np.float64(allowed).tobytes(), digest_size=16)
    for index, array in given.items():
        found.update(f"{index} {array.shape} {array.dtype}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.digest()


def _named_before(value: Value) -> Operator | None:
    """Returns the operator with a known source that made a value, or what it was made of."""
    producer = value.producer
    while producer is not None and not producer.source:
        before = next((v for v in producer.inputs if v.is_activation), None)
        producer = None if before is None else before.producer
    return producer
