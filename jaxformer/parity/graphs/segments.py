"""Goes through the candidate's tape from anchor to anchor, and puts right what is wrong on the way.

An anchor is a value of the candidate that equals one of the reference. Some values must be anchors:
what enters and leaves an operator that reads a parameter, where the reference's operator reads the
same one, and the results. Where such a value is none, the operators between it and the last anchors
compute something else than the reference's between the same places: a *divergence*. The earliest
value which, replaced by the reference's, makes the rest right, ends the wrong segment. The
reference's value takes its place, so that what follows is judged by itself.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.graphs.constants import TABLE_ALLOWED, constant_rounding
from jaxformer.parity.graphs.divergences import Divergence, Table
from jaxformer.parity.graphs.effects import depending
from jaxformer.parity.graphs.layouts import Layout, distance, find_layout, nearest_layout
from jaxformer.parity.graphs.matching import Index, Match, largest, rounding_allowed
from jaxformer.parity.graphs.tape import Operator, Tape, Value, region_before, run_again
from jaxformer.parity.tolerance import MIDDLE, ROUNDOFF

# What an operator does with a parameter, in both frameworks' words. Products and sums number by
# number are left out: they can be taken in another order, with other values in between.
KINDS = {
    "dot_general": "product", "mm": "product", "bmm": "product", "mv": "product",
    "matmul": "product", "conv_general_dilated": "product", "convolution": "product",
    "gather": "lookup", "embedding": "lookup", "index_select": "lookup", "index": "lookup",
    "dynamic_slice": "lookup", "slice": "lookup",
}  # fmt: skip
# How many steps of a wrong segment are tried as its end, for each size.
MOST_TRIED = 40
MOST_NEAR = 8
# Two segments do the same if what they make of the same is this near; their numbers may be rounded.
ALIKE = 1e-5


class Walk:
    """One way through the candidate's tape.

    Args:
        reference: its tape.
        candidate: its tape.
        corrected: arrays to use in place of some parameters of the candidate, by index.

    Attributes:
        matches: of each value of the candidate that is an anchor.
        divergences: what was found, in the order of the run.
        tables: constants in float32.
        checked: operators of the reference whose counterpart was compared.
        expected: operators of the reference that read a parameter.
        uncompared: results of the candidate that could not be compared, with the reason.
        remarks: what a reader should know of how the results were compared.
    """

    def __init__(self, reference: Tape, candidate: Tape, corrected: Mapping[int, Any]):
        self.reference, self.candidate = reference, candidate
        self.index = Index(reference)
        self.arrays: dict[int, Any] = dict(corrected)
        # Values that have the reference's numbers in place of their own.
        self.pinned: set[int] = set()
        self.matches: dict[int, list[Match]] = {}
        self.reached: set[int] = set()
        self.divergences: list[Divergence] = []
        self.tables: list[Table] = []
        self.checked: set[int] = set()
        self.uncompared: list[str] = []
        self.remarks: list[str] = []
        self.largest_error = 0.0

    def run(self) -> "Walk":
        """Goes all the way."""
        for value in self.candidate.values:
            if value.producer is None:
                self._match(value)
        uses = self._uses(self.candidate, self._candidate_weight)
        expected = self._uses(self.reference, lambda value: value.index)
        self.expected = {op.index for ops in expected.values() for op, _ in ops}
        partners = {
            one.index: (one, other, activations, reference_activations)
            for key, ops in uses.items()
            if len(ops) == len(expected.get(key, ()))
            for (one, activations), (other, reference_activations) in zip(
                ops, expected[key], strict=True
            )
        }
        for operator in self.candidate.operators:
            pair = partners.get(operator.index)
            if pair is not None:
                for value, wanted in zip(pair[2], pair[3], strict=False):
                    self._require(value, wanted)
            self._compute(operator)
            if pair is not None and operator.outputs[0].data.size == pair[1].outputs[0].data.size:
                self._require(operator.outputs[0], pair[1].outputs[0])
                self.checked.add(pair[1].index)
        self._require_outputs()
        return self

    def array(self, value: Value) -> Any:
        """Returns a value's array, put right where it was wrong."""
        return self.arrays.get(value.index, value.data)

    def _candidate_weight(self, value: Value) -> int | None:
        """Returns the first value of the reference that a weight is."""
        found = [m.value.index for m in self._matches_of(value) if m.value.is_weight]
        return min(found) if found else None

    def _matches_of(self, value: Value) -> list[Match]:
        if value.index not in self.matches:
            self._match(value)
        return self.matches.get(value.index, [])

    def _uses(
        self, tape: Tape, identify: Any
    ) -> dict[tuple[int, str, int], list[tuple[Operator, list[Value]]]]:
        """Returns the operators that read one weight and activations, by weight and kind."""
        same: dict[int, int] = {}
        found: dict[tuple[int, str, int], list[tuple[Operator, list[Value]]]] = defaultdict(list)
        ambiguous = self._ambiguous()
        for operator in tape.operators:
            kind = KINDS.get(operator.name)
            weights = [v for v in operator.inputs if v.is_weight and v.data.dtype.kind == "f"]
            if kind is None or len(weights) != 1 or len(operator.outputs) != 1:
                continue
            if not (operator.outputs[0].is_activation or kind == "lookup"):
                continue
            weight = weights[0]
            if tape is self.reference:
                if weight.index not in same:
                    twins = self.index.find(weight.data)
                    same[weight.index] = min(
                        (m.value.index for m in twins if m.value.is_weight), default=weight.index
                    )
                key: int | None = same[weight.index]
            else:
                key = identify(weight)
            if key is None or key in ambiguous:
                continue
            activations = [v for v in operator.inputs if v.is_activation]
            found[key, kind, operator.outputs[0].data.size].append((operator, activations))
        return found

    def _ambiguous(self) -> set[int]:
        """Returns values of parameters that several parameters of the reference share."""
        counts: dict[int, int] = defaultdict(int)
        for value in self.reference.parameters.values():
            twins = [m.value.index for m in self.index.find(value.data) if m.value.is_weight]
            counts[min(twins, default=value.index)] += 1
            if np.ptp(value.data) == 0:
                counts[min(twins, default=value.index)] += 1
        return {index for index, count in counts.items() if count > 1}

    def _compute(self, operator: Operator) -> None:
        """Computes an operator anew if what it reads was put right, and looks for its values."""
        if all(value.index in self.pinned for value in operator.outputs):
            return
        if any(value.index in self.arrays for value in operator.inputs):
            made = operator.run(*(self.array(value) for value in operator.inputs))
            self.arrays |= {v.index: a for v, a in zip(operator.outputs, made, strict=True)}
        for value in operator.outputs:
            self._match(value)

    def _match(self, value: Value) -> None:
        array = self.array(value)
        if getattr(getattr(array, "dtype", None), "kind", "") != "f":
            return
        found = self.index.find(array)
        if not found and value.is_constant:
            found = self._match_table(value, array)
        if found:
            self.matches[value.index] = found
            self.reached |= {match.value.index for match in found}
            scale = largest(array) or 1.0
            self.largest_error = max(self.largest_error, found[0].error / scale)
        else:
            self.matches.pop(value.index, None)

    def _match_table(self, value: Value, array: np.ndarray) -> list[Match]:
        allowed = TABLE_ALLOWED * max((*array.shape, 1))
        near = [m for m in self.index.find(array, allowed, 1e8 * allowed) if m.value.is_constant]
        if near:
            right = near[0].layout.apply(near[0].value.data)
            self.arrays[value.index] = right
            self.tables.append(Table(value, near[0].value, near[0].error))
            return self.index.find(right)
        return []

    def _require(self, value: Value, wanted: Value) -> None:
        """Finds out why a value is not what it must be, and puts it right."""
        if value.data.size != wanted.data.size or value.data.dtype.kind != "f":
            return
        if any(m.value is wanted for m in self._matches_of(value)):
            return
        array = self.array(value)
        layout = find_layout(wanted.data, array, rounding_allowed(wanted.data))
        if layout is not None:
            self.matches.setdefault(value.index, []).append(Match(wanted, *layout))
            self.reached.add(wanted.index)
            return
        self._diverge(value, wanted)

    def _diverge(self, value: Value, wanted: Value) -> None:
        operators, _ = region_before([value], lambda v: v.index in self.matches)
        reference_operators, _ = region_before([wanted], lambda v: v.index in self.reached)
        end = self._earliest_end(value, wanted, operators, reference_operators)
        if end is None:
            return
        end_value, end_wanted, layout = end
        array = self.array(end_value)
        right = layout.apply(end_wanted.data)
        error = distance(right, array)
        scale = largest(end_wanted.data) or 1.0
        own, boundary = region_before([end_value], lambda v: v.index in self.matches)
        reference_own, reference_boundary = region_before(
            [end_wanted], lambda v: v.index in self.reached
        )
        factors = self._wrong_factors(end_value, end_wanted, own, reference_own)
        if factors:
            for one, other in factors:
                self._require(one, other)
            self._put_right_after(operators)
            self._require(value, wanted)
            return
        if error <= self._allowed(own, end_value, scale):
            pass
        elif error <= constant_rounding(own, end_value, self.arrays) + constant_rounding(
            reference_own, end_wanted, {}
        ):
            self.tables.append(Table(end_value, end_wanted, error / scale))
        else:
            self.divergences.append(
                Divergence(
                    end_value, end_wanted, layout, own, boundary, reference_own,
                    reference_boundary, error / scale, array, dict(self.arrays),
                    value, wanted, operators,
                )
            )  # fmt: skip
        self._put_right(end_value, end_wanted, layout, operators)
        if end_value is not value:
            self._require(value, wanted)

    def _allowed(self, operators: Sequence[Operator], end: Value, scale: float) -> float:
        """Returns the largest error that is rounding: how far the segment is from its float32."""

        def narrow(array: Any) -> Any:
            if getattr(getattr(array, "dtype", None), "kind", "") == "f":
                return array.astype(np.float32).astype(np.float64)
            return array

        with np.errstate(over="ignore"):
            in_float32 = run_again(operators, self.arrays_before(operators), narrow)
        far = distance(in_float32[end.index].astype(np.float32), self.array(end))
        amplified = far if np.isfinite(far) else 0.0
        return MIDDLE * max(ROUNDOFF["float32"] * scale, amplified)

    def arrays_before(self, operators: Sequence[Operator]) -> dict[int, Any]:
        """Returns the corrected arrays that operators read and do not make."""
        made = {value.index for operator in operators for value in operator.outputs}
        read = {value.index for operator in operators for value in operator.inputs}
        return {i: self.arrays[i] for i in read - made if i in self.arrays}

    def _earliest_end(
        self,
        value: Value,
        wanted: Value,
        operators: Sequence[Operator],
        reference_operators: Sequence[Operator],
    ) -> tuple[Value, Value, Layout] | None:
        """Returns the first value of a segment that, replaced, makes the required value right."""
        by_size: dict[int, list[Value]] = defaultdict(list)
        for operator in reference_operators:
            for made in operator.outputs:
                if made.data.dtype.kind == "f" and made.index not in self.reached:
                    by_size[made.data.size].append(made)
        limit = rounding_allowed(wanted.data)
        known = self.arrays_before(operators)
        first = None
        for end, other, layout in self._ends(operators, value, by_size):
            later = depending(operators, end)
            remade = {v.index for op in later for v in op.outputs}
            given = {
                v.index: self.arrays[v.index]
                for op in operators
                for v in op.outputs
                if v.index in self.arrays and v.index not in remade
            }
            again = run_again(later, {**known, **given, end.index: layout.apply(other.data)})
            if value.index in again and find_layout(wanted.data, again[value.index], limit):
                if self._follows_alike(end, other, layout, value, wanted, reference_operators):
                    return end, other, layout
                first = first or (end, other, layout)
        if first is not None:
            return first
        # Between values that have little in common any layout may be the nearest.
        found = nearest_layout(wanted.data, self.array(value), gain=0.8)
        return None if found is None else (value, wanted, found[0])

    def _follows_alike(
        self,
        end: Value,
        other: Value,
        layout: Layout,
        value: Value,
        wanted: Value,
        reference_operators: Sequence[Operator],
    ) -> bool:
        """Returns whether the reference makes of a wrong end what the candidate makes of it.

        If not, the two ends are not the same place: scores before a mask and after it.
        """
        later = depending(reference_operators, other)
        if any(operator.name == "written" for operator in later):
            return True
        if not later:
            return other is wanted
        own = layout.invert(self.array(end), other.data.shape)
        made = run_again(later, {other.index: own}).get(wanted.index)
        wrong = self.array(value)
        return made is None or find_layout(made, wrong, ALIKE * (largest(wrong) or 1.0)) is not None

    def _wrong_factors(
        self,
        value: Value,
        wanted: Value,
        operators: Sequence[Operator],
        reference_operators: Sequence[Operator],
    ) -> list[tuple[Value, Value]]:
        """Returns the factors of a product that make the value right if both are replaced.

        Queries and keys may both be wrong, and then neither alone makes the scores right.
        """
        limit = rounding_allowed(wanted.data)
        for operator in reversed(operators):
            factors = [v for v in operator.inputs if v.is_activation]
            if KINDS.get(operator.name) != "product" or len(factors) != 2:
                continue
            if any(factor.index in self.matches for factor in factors):
                continue
            among = []
            for factor in factors:
                near = [
                    (found[1], made.index, made, found[0])
                    for other in reference_operators
                    for made in other.outputs
                    if made.data.size == factor.data.size and made.data.dtype.kind == "f"
                    for found in [nearest_layout(made.data, self.array(factor))]
                    if found is not None
                ]
                among.append(sorted(near, key=lambda item: item[:2])[:6])
            later = [op for op in operators if op.index >= operator.index]
            for one, other in itertools.product(*among):
                trial = self.arrays_before(later) | {
                    factor.index: chosen[3].apply(chosen[2].data)
                    for factor, chosen in zip(factors, (one, other), strict=True)
                }
                again = run_again(later, trial)
                if value.index in again and find_layout(wanted.data, again[value.index], limit):
                    return [(factors[0], one[2]), (factors[1], other[2])]
        return []

    def _put_right_after(self, operators: Sequence[Operator]) -> None:
        """Computes operators of a segment anew where what they read was put right."""
        for operator in operators:
            if not any(value.index in self.matches for value in operator.outputs):
                self._compute(operator)

    def _ends(
        self,
        operators: Sequence[Operator],
        value: Value,
        by_size: Mapping[int, Sequence[Value]],
    ) -> Iterator[tuple[Value, Value, Layout]]:
        """Yields values of a segment with what they might have to be, in order."""
        for operator in operators:
            for made in operator.outputs:
                array = self.array(made)
                if made is value or getattr(array, "dtype", np.dtype(int)).kind != "f":
                    continue
                if made.index in self.matches:
                    continue
                tried = []
                for other in by_size.get(array.size, ())[:MOST_TRIED]:
                    near = nearest_layout(other.data, array)
                    if near is not None:
                        tried.append((near[1], other.index, other, near[0]))
                for _, _, other, layout in sorted(tried, key=lambda t: t[:2])[:MOST_NEAR]:
                    yield made, other, layout

    def _put_right(
        self, value: Value, wanted: Value, layout: Layout, operators: Sequence[Operator]
    ) -> None:
        self.arrays[value.index] = layout.apply(wanted.data)
        self.pinned.add(value.index)
        self.matches[value.index] = [
            Match(wanted, layout, 0.0), *self.index.find(self.arrays[value.index])
        ]  # fmt: skip
        self.reached |= {match.value.index for match in self.matches[value.index]}
        first = -1 if value.producer is None else value.producer.index
        last = operators[-1].index if operators else first
        for operator in self.candidate.operators[first + 1 : last + 1]:
            if any(v.index in self.arrays for v in operator.inputs) and not any(
                v is value for v in operator.outputs
            ):
                self._compute(operator)

    def _last_entry(self, value: Value, shape: tuple[int, ...]) -> Value:
        """Returns the last entry of a result along the axis where the reference has one entry."""
        at = tuple(
            slice(None) if m == n else slice(-1, None)
            for m, n in zip(shape, value.data.shape, strict=True)
        )

        def take(array: np.ndarray) -> list[np.ndarray]:
            return [array[at]]

        self.remarks.append(
            f"the reference gives only the last entry: {shape} of {value.data.shape}"
        )
        operator = self.candidate.record("slice", [value], take(value.data), take)[0].producer
        assert operator is not None
        self._compute(operator)
        return operator.outputs[0]

    def _require_outputs(self) -> None:
        wanted = list(self.reference.outputs)
        for place, value in enumerate(self.candidate.outputs):
            matches = self._matches_of(value)
            if any(match.value in wanted for match in matches):
                continue
            same = [w for w in wanted if w.data.size == value.data.size]
            if len(wanted) == len(self.candidate.outputs) and wanted[place] in same:
                same = [wanted[place]]
            same = same or [w for w in wanted if _is_last_entry(w.data.shape, value.data.shape)]
            if same and same[0].data.size != value.data.size:
                value = self._last_entry(value, same[0].data.shape)
            if not same:
                shapes = ", ".join(str(w.data.shape) for w in wanted)
                self.uncompared.append(
                    f"result {place} of shape {value.data.shape}: the reference gives {shapes}"
                )
                continue
            self._require(value, same[0])


def _is_last_entry(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Returns whether a shape has one entry along an axis where another has several."""
    pairs = list(zip(shape, whole, strict=False))
    return len(shape) == len(whole) and [m for m, n in pairs if m != n] == [1]
