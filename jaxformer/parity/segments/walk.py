"""Goes through the candidate's tape from anchor to anchor, and puts right what is wrong on the way.

An anchor is a value of the candidate that equals one of the reference. Some values must be anchors:
what enters and leaves an operator that reads a parameter, where the reference's operator reads the
same one, and the results. Where such a value is none, the operators between it and the last anchors
compute something else than the reference's between the same places: a *divergence*. The earliest
value which, replaced by the reference's, makes the rest right, ends the wrong segment. The
reference's value takes its place, so that what follows is judged by itself.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.anchors import Anchors, Table
from jaxformer.parity.matching.layouts import (
    Layout,
    distance,
    find_layout,
    nearest_layout,
)
from jaxformer.parity.matching.values import Index, Match, largest, rounding_allowed
from jaxformer.parity.matching.weight_uses import OtherCount, WeightUses
from jaxformer.parity.recording.operators.graph import Operator, Value, region_before
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.segments.constants import constant_rounding
from jaxformer.parity.segments.divergences import Divergence
from jaxformer.parity.segments.ends import (
    MOST_RUN_FOR_EXPLAINED,
    MOST_RUN_IF_EXPLAINED,
    MOST_RUN_TO_ENDS,
    Tries,
    earliest_end,
)
from jaxformer.parity.segments.factors import factors_to_put_right
from jaxformer.parity.segments.false_anchors import false_anchor
from jaxformer.parity.segments.weight_values import leads_right, required_values


class Walk(Anchors):
    """One way through the candidate's tape, which goes on as the tapes grow.

    Args:
        reference: its tape.
        line_that_reads: see ``compare_operators``.
        index: of the reference's values, where some were noted during its run.

    Attributes:
        divergences: what was found, in the order of the run.
        checked: operators of the reference whose counterpart was compared.
        expected: operators of the reference that read a parameter.
        own_checked: operators of the candidate whose counterpart was compared.
        own_expected: operators of the candidate that read a parameter.
        remarks: what a reader should know of how the results were compared.
        missing: paths of parameters of the reference whose numbers the candidate does not have.
        partly: of those of them that it has most of, which entries it does not have.
        extra_calls: operators of the candidate that read a weight, and have no counterpart because
            it reads the weight more often than the reference.
        missing_calls: operators of the reference that read a weight which the candidate reads less
            often.
        after: called with each operator of the candidate that was gone through.
        owners: of the candidate's modules, by path, the one that answers for what is computed in
            it; none where nothing is known of modules.
    """

    def __init__(
        self,
        reference: Tape,
        line_that_reads: Callable[[int], str] = lambda place: "",
        index: Index | None = None,
    ):
        super().__init__(reference, index)
        self.line_that_reads = line_that_reads
        self.divergences: list[Divergence] = []
        self.checked: set[int] = set()
        self.expected: set[int] = set()
        self.own_checked: set[int] = set()
        self.own_expected: set[int] = set()
        self.remarks: list[str] = []
        self.missing: set[str] = set()
        self.partly: Mapping[str, str] = {}
        self.extra_calls: dict[int, OtherCount] = {}
        self.missing_calls: dict[int, OtherCount] = {}
        self.after: Callable[[Operator], None] = lambda operator: None
        self.owners: Mapping[str, str] = {}
        self._uses = WeightUses(self)
        self._done, self._reference_done = 0, 0
        self._owner: str | None = None
        self._is_backward = False
        self._factored: set[int] = set()
        self._tries_if_explained = Tries(MOST_RUN_FOR_EXPLAINED, MOST_RUN_IF_EXPLAINED)
        # The operator whose operands are looked at, and the anchors that it alone must not read.
        self._reader: Operator | None = None
        self._lent: dict[int, tuple[Any, list[Match]]] = {}

    def advance(self) -> None:
        """Goes through the operators that were recorded on both tapes since the last time."""
        operators = self.candidate.operators[self._done :]
        expected = self._uses.of_reference(self.reference.operators[self._reference_done :])
        self.expected |= {use.operator.index for uses in expected.values() for use in uses}
        self.own_expected |= self._uses.reading(operators)
        pairing = self._uses.pairing(operators, expected)
        later: dict[int, list[tuple[Value, Value]]] = {}
        self.missing_calls |= pairing.missing
        for operator in operators:
            self._done = operator.index
            pair = pairing.partner(operator)
            if pair is not None:
                # Known modules have an end after each product: no finer one is required.
                if not self.owners and not leads_right(self, *pair):
                    entering, (made, wanted) = required_values(*pair)
                    self._reader = operator
                    for value, other in entering:
                        self.require(value, other)
                    self._reader = None
                    later.setdefault(_place(made), []).append((made, wanted))
                self.checked.add(pair[1].operator.index)
                self.own_checked.add(operator.index)
            elif operator.index in pairing.miscounted:
                self.extra_calls[operator.index] = pairing.miscounted[operator.index]
            self.compute(operator)
            self._take_back()
            self.after(operator)
            for value, other in later.pop(operator.index, ()):
                self.require(value, other)
        self._done = len(self.candidate.operators)
        self._reference_done = len(self.reference.operators)

    def advance_backward(self) -> None:
        """Goes through the operators of the backward pass."""
        self._is_backward = True
        self.advance()

    def owner(self, divergence: Divergence) -> str:
        """Returns the path of the known module in whose code a segment is."""
        if divergence.owner is not None:
            return divergence.owner
        producer = divergence.value.producer
        return self.owner_of("" if producer is None else producer.module)

    def owner_of(self, path: str) -> str:
        """Returns the path of the known module that answers for the code of one at a path."""
        while path and path not in self.owners:
            path = path.rpartition(".")[0]
        return self.owners.get(path, path)

    def other_count(self, divergence: Divergence) -> tuple[OtherCount, Operator | None] | None:
        """Returns which weight one side reads more often in a segment, and the first such operator.

        The operator is the candidate's; None where the reference is the one that reads it more.
        """
        for operator in divergence.operators:
            if operator.index in self.extra_calls:
                return self.extra_calls[operator.index], operator
        for operator in divergence.reference_operators:
            if operator.index in self.missing_calls and operator.index not in self.checked:
                return self.missing_calls[operator.index], None
        return None

    def require(self, value: Value, wanted: Value, layout: Layout | None = None) -> None:
        """Finds out why a value is not what it must be, and puts it right.

        Args:
            value: of the candidate.
            wanted: what it must be.
            layout: from the reference's to the candidate's, where that is known.
        """
        if value.size != wanted.size or value.dtype.kind != "f":
            return
        if any(m.value is wanted for m in self.matches.get(value.index, ())):
            return
        array = self.array(value)
        found = find_layout(wanted.data, array, rounding_allowed(wanted.data))
        if found is not None:
            self.matches.setdefault(value.index, []).append(Match(wanted, *found))
            self.reached.add(wanted.index)
            return
        self._diverge(value, wanted, layout)

    def _observe(self, value: Value) -> None:
        """Looks up a value that was just recorded; one that is wrong as before is put right.

        A checkpoint computes parts of the forward pass again in the backward pass.
        """
        before = next((d for d in self.divergences if d.is_made_again(value)), None)
        if before is None:
            super()._observe(value)
        else:
            value.data = self._pin(value, before.reference_value, before.layout)

    def _diverge(self, value: Value, wanted: Value, layout: Layout | None) -> None:
        operators, _ = region_before([value], lambda v: v.index in self.matches)
        reference_operators, _ = region_before([wanted], lambda v: v.index in self.reached)
        if self._is_backward and self._is_noise(value, wanted, operators):
            return
        tries = Tries(2 * MOST_RUN_TO_ENDS, MOST_RUN_TO_ENDS)
        if self._is_explained(operators):
            tries = self._tries_if_explained
        end = earliest_end(self, value, wanted, operators, reference_operators, layout, tries)
        if end is None:
            return
        found = self._segment(*end, value, wanted, operators)
        if not self._is_explained(found.operators) and self._put_factors_right(found):
            self._put_right_after(operators)
            self.require(value, wanted)
            return
        difference = found.difference
        if not difference.is_bug:
            pass
        elif difference.error <= self._rounding_of_constants(found.value, found.reference_value):
            self.tables.append(Table(found.value, found.reference_value, found.error))
        else:
            is_misread = found.value is value and self._is_misread(value, wanted)
            # What has made a value that is misread is right, also a norm before a bias of zeros.
            earlier = None if self._is_backward or is_misread else false_anchor(self, found)
            if earlier is not None:
                del self.matches[earlier[0].index]
                operators, _ = region_before([value], lambda v: v.index in self.matches)
                found = self._segment(*earlier, value, wanted, operators)
            elif is_misread:
                found = dataclasses.replace(
                    found, operators=[], boundary=[value], reader=self._reader
                )
            self.divergences.append(found)
        if found.value is value and self._is_misread(value, wanted):
            self._lend(value, wanted, found.layout)
            return
        self._put_right(found.value, found.reference_value, found.layout, operators)
        if found.value is not value:
            self.require(value, wanted)

    def diverge(self, value: Value, wanted: Value, layout: Layout | None, owner: str) -> None:
        """Finds out why a value, which is known to be wrong, is not what it must be.

        Args:
            value: of the candidate.
            wanted: what it must be.
            layout: from the reference's to the candidate's, where that is known.
            owner: path of the known module whose code it answers for.
        """
        self._owner = owner
        self._diverge(value, wanted, layout)
        self._owner = None

    def put_right(self, value: Value, wanted: Value, layout: Layout) -> None:
        """Gives a value the reference's numbers; what was made of it is computed anew."""
        self._put_right(value, wanted, layout, [])

    def replace(self, value: Value, array: Any) -> None:
        """Gives a value another array; what was made of it is computed anew."""
        self.matches.pop(value.index, None)
        self.pinned.add(value.index)
        self.arrays[value.index] = array
        self._compute_after(value, [])

    def _is_explained(self, operators: Sequence[Operator]) -> bool:
        """Returns whether wrong gradients follow from a line that is wrong in the forward pass.

        Then it does not matter which factors of their products are wrong too.
        """
        if not self._is_backward:
            return False
        wrong = {line for d in self.divergences if not d.is_backward for line in d.lines}
        return any(operator.source in wrong for operator in operators if operator.source)

    def _rounding_of_constants(self, value: Value, wanted: Value) -> float:
        """Returns how far apart constants in float32 may bring a value and the reference's.

        What a conversion has computed counts too: a parameter that the reference does not have.
        Tables that were put right count too: a candidate may make them once for the queries and
        once more for the keys, and of the second ones the reference has no own.
        """
        own, _ = region_before([value], lambda v: v.index in self.matches and not v.is_table)
        reference_own, _ = region_before(
            [wanted], lambda v: v.index in self.reached and not v.is_table
        )
        return constant_rounding(own, value, self.arrays, self.unknown) + constant_rounding(
            reference_own, wanted, {}
        )

    def _put_factors_right(self, found: Divergence) -> bool:
        """Finds out what is wrong with both factors of a product, once for each segment's end."""
        if found.value.index in self._factored:
            return False
        self._factored.add(found.value.index)
        wrong = factors_to_put_right(self, found)
        for value, wanted, layout in wrong:
            # It may equal another value of the reference.
            self.matches.pop(value.index, None)
            self._diverge(value, wanted, layout)
        return bool(wrong)

    def _segment(
        self,
        end: Value,
        end_wanted: Value,
        layout: Layout,
        required: Value,
        required_wanted: Value,
        operators: list[Operator],
    ) -> Divergence:
        """Returns what lies between the last anchors and the end of a wrong segment."""
        own, boundary = region_before([end], lambda v: v.index in self.matches)
        reference_own, reference_boundary = region_before(
            [end_wanted], lambda v: v.index in self.reached
        )
        scale = largest(end_wanted.data)
        difference = Difference(
            distance(layout.apply(end_wanted.data), self.array(end)),
            scale,
            self.allowed(own, end, scale or 1.0),
        )
        return Divergence(
            end, end_wanted, layout, own, boundary, reference_own, reference_boundary, difference,
            self.array(end), dict(self.arrays), required, required_wanted, operators,
            self._is_backward, owner=self._owner,
        )  # fmt: skip

    def _is_noise(self, value: Value, wanted: Value, operators: Sequence[Operator]) -> bool:
        """Returns whether a gradient is what rounding leaves of zero, like that of a key's bias."""
        near = nearest_layout(wanted.data, self.array(value))
        if near is None:
            return False
        far = distance(near[0].apply(wanted.data), self.array(value))
        if far > self.allowed(operators, value, largest(wanted.data)):
            return False
        self.matches.setdefault(value.index, []).append(Match(wanted, near[0], far))
        self.reached.add(wanted.index)
        return True

    def _put_right_after(self, operators: Sequence[Operator]) -> None:
        """Computes operators of a segment anew where what they read was put right."""
        for operator in operators:
            if not any(value.index in self.matches for value in operator.outputs):
                self.compute(operator)

    def _is_misread(self, value: Value, wanted: Value) -> bool:
        """Returns whether a value is right, and the operator that is gone through reads it wrongly.

        Others may read it rightly: a forgotten activation enters one of several products alone. A
        value that has the wanted numbers in another order is not right.
        """
        if self._reader is None or self._is_backward or value.index in self.pinned:
            return False
        found = [match.value for match in self.matches.get(value.index, ())]
        return bool(found) and not any(self.index.are_near(one, wanted) for one in found)

    def _lend(self, value: Value, wanted: Value, layout: Layout) -> None:
        """Puts an anchor right for the operator that is gone through, and for no other."""
        before = self.arrays.get(value.index), self.matches[value.index]
        self._lent.setdefault(value.index, before)
        self.arrays[value.index] = layout.apply(wanted.data)
        self.reached.add(wanted.index)

    def _take_back(self) -> None:
        """Makes anchors that were lent what they were."""
        for index, (array, matches) in self._lent.items():
            self.matches[index] = matches
            if array is None:
                del self.arrays[index]
            else:
                self.arrays[index] = array
        self._lent = {}

    def _pin(self, value: Value, wanted: Value, layout: Layout) -> Any:
        """Makes a value an anchor that is what it must be, and returns its right array."""
        array = layout.apply(wanted.data)
        self.pinned.add(value.index)
        self.matches[value.index] = [Match(wanted, layout, 0.0), *self.index.find(array)]
        self.reached |= {match.value.index for match in self.matches[value.index]}
        return array

    def _put_right(
        self, value: Value, wanted: Value, layout: Layout, operators: Sequence[Operator]
    ) -> None:
        self.arrays[value.index] = self._pin(value, wanted, layout)
        self._compute_after(value, operators)

    def _compute_after(self, value: Value, operators: Sequence[Operator]) -> None:
        """Computes what was made of a value that was put right anew."""
        first = -1 if value.producer is None else value.producer.index
        # Operators before the one that the walk has reached may have read the wrong value too.
        last = max(operators[-1].index + 1 if operators else 0, self._done)
        for operator in self.candidate.operators[first + 1 : last]:
            if any(v.index in self.arrays for v in operator.inputs) and not any(
                v is value for v in operator.outputs
            ):
                self.compute(operator)


def _place(value: Value) -> int:
    return -1 if value.producer is None else value.producer.index
