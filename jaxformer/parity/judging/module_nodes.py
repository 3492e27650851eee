"""Makes the node of each pair of modules from what was required of it."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import AttentionMaps, Difference, Histogram, Node
from jaxformer.parity.judging.module_rounding import Output, OutputPart
from jaxformer.parity.judging.verdicts import explain, last_right_input, worst_difference
from jaxformer.parity.matching.known_modules import (
    KnownModules,
    PairCall,
    Requirement,
)
from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.matching.pairs import Pair, PairKey
from jaxformer.parity.matching.reference_attention import ReferenceAttention
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.narrow_runs import NarrowRun
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.tolerance import judge

BINS = 40
# The largest number of values that a histogram counts; of larger outputs it counts every n-th one.
COUNTED = 1 << 16
# Of longer sequences a map shows the beginning.
MAP_LENGTH = 64


@dataclasses.dataclass(frozen=True)
class ModuleNodes:
    """Makes nodes of pairs of modules.

    Attributes:
        pairs: the modules, in the order of calls.
        depths: how many pairs are around each pair, in the whole models.
        known: their calls.
        kinds: the classes of the candidate's modules, by path.
        reference_kinds: the classes of the reference's modules, by path.
        walk: after the forward pass.
        attention: of the reference.
    """

    pairs: Sequence[Pair]
    depths: Mapping[PairKey, int]
    known: KnownModules
    kinds: Mapping[str, str]
    reference_kinds: Mapping[str, str]
    walk: Walk
    attention: ReferenceAttention

    def make(
        self,
        required: Sequence[Requirement],
        gradients: Sequence[Requirement],
        parameters: Mapping[str, Difference],
    ) -> dict[PairKey, Node]:
        """Returns a node for every pair that was called or holds parameters.

        Args:
            required: of the forward pass.
            gradients: of the backward pass.
            parameters: differences of the candidate's parameters, by name.
        """
        forward: dict[PairKey, list[tuple[str, Difference]]] = defaultdict(list)
        backward: dict[PairKey, dict[str, Difference]] = defaultdict(dict)
        for one in sorted(required, key=lambda one: one.place):
            if one.difference is not None:
                forward[one.owner].append((one.name, one.difference))
        for one in gradients:
            before = backward[one.owner].get(one.name)
            if one.difference is not None and (
                before is None or one.difference.excess > before.excess
            ):
                backward[one.owner][one.name] = one.difference
        found = {}
        for order, pair in enumerate(self.pairs):
            key = pair.candidate
            unmatched = self.known.unmatched.get(key)
            if unmatched is not None and unmatched.is_uncalled and not pair.parameters:
                continue
            kind = self.kinds[pair.candidate[0]]
            node = Node(
                pair.path,
                pair.reference_path,
                kind if len(pair.candidate) == 1 else f"{len(pair.candidate)} {kind}",
                self.reference_kinds[pair.reference[0]],
                self.depths[key],
                order,
                parameters={n: parameters[n] for n in pair.parameters if n in parameters},
            )
            if unmatched is not None:
                found[key] = dataclasses.replace(node, message=unmatched.message)
                continue
            found[key] = dataclasses.replace(
                node,
                forward=worst_difference(difference for _, difference in forward[key]),
                message=explain(forward[key], list(backward[key].items())),
                backward=backward[key],
                wrong_after=last_right_input(forward[key]),
            )
        return found

    def contexts(
        self, required: Sequence[Requirement], raw: NarrowRun | None
    ) -> dict[PairKey, dict[str, Any]]:
        """Returns the fields of nodes that describe their first outputs in the whole models.

        Args:
            required: of the forward pass, whose corrections are not yet the candidate's values.
            raw: what the candidate makes in the whole model, where that is not what it made here.
        """
        outputs = {
            (one.owner, one.values[0].index): one for one in required if one.name == "its output"
        }
        found: dict[PairKey, dict[str, Any]] = {}
        for key, calls in self.known.calls.items():
            if not calls:
                continue
            ones = [
                (path, n, one)
                for path, own, places in zip(
                    calls[0].pair.candidate, calls[0].own, calls[0].returned, strict=True
                )
                for n in places
                if (one := outputs.get((key, own.returned[n].index))) is not None
            ]
            firsts = [(path, n, one) for path, n, one in ones if n == min(m for _, m, _ in ones)]
            if firsts:
                found[key] = {**self._in_context(firsts, raw), "maps": self._maps(calls[0])}
        return found

    def _in_context(
        self, ones: Sequence[tuple[str, int, Requirement]], raw: NarrowRun | None
    ) -> dict[str, Any]:
        made, wanted, error = [], [], 0.0
        for path, n, one in ones:
            (value,) = one.values
            layout = self._layout(value, one.wanted)
            if layout is None:
                return {}
            array = value.data if raw is None else raw.returned[path][n]
            made.append(self.attention.used(array))
            wanted.append(self.attention.used(layout.apply(one.wanted.data)))
            if raw is None and one.difference is not None and not one.difference.is_bug:
                error = max(error, one.difference.error)
        found = described(_joined(made), _joined(wanted))
        difference = found["in_context"]
        error = max(difference.error, error)
        return {**found, "in_context": dataclasses.replace(difference, error=error)}

    def _layout(self, value: Value, wanted: Value) -> Layout | None:
        """Returns the layout from a value of the reference to one of the candidate."""
        found = (m for m in self.walk.matches.get(value.index, ()) if m.value is wanted)
        return next((match.layout for match in found), None)

    def _maps(self, call: PairCall) -> AttentionMaps | None:
        """Returns the first attention weights of a call on both sides, where there are any."""
        own = call.own[0].weights.get(0)
        inside = self.attention.within(call.right[0].begin, call.right[0].end)
        if own is None or not inside or own.shape != inside[0].weights.shape:
            return None
        both = (value.data[0, :, :MAP_LENGTH, :MAP_LENGTH] for value in (own, inside[0].weights))
        candidate, reference = (
            tuple(tuple(map(tuple, head)) for head in one.astype(np.float32).tolist())
            for one in both
        )
        return AttentionMaps(candidate, reference)

    def outputs(self) -> Iterator[Output]:
        """Yields what the pairs return first, as far as it is known."""
        for key, calls in self.known.calls.items():
            parts = [*self._parts(calls[0])] if calls else []
            if not parts or len(parts) < len(key):
                continue
            first = next(iter(calls[0].entered.values()), None)
            before = None if first is None else calls[0].right[0].entered[first]
            yield Output(key, parts, before, self.attention.used)

    def _parts(self, call: PairCall) -> Iterator[OutputPart]:
        for place, path in enumerate(call.pair.candidate):
            n, other = min(call.returned[place].items())
            value = call.own[place].returned[n]
            values = [one.returned[other] for one in call.right]
            matches, size = self.walk.matches.get(value.index), values[0].size
            if matches and (len(call.own) > 1 or len(values) > 1 or size == value.size):
                places = dict.fromkeys(call.pair.reference, other)
                cut = self.known.cut(call, place)
                # What else matches may be a transposed copy of it.
                layout = self._layout(value, values[0]) or matches[0].layout
                yield OutputPart(path, n, values, places, cut, layout)


def described(made: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Returns the fields of a node on its output in the whole models, in a line on both sides."""
    return {"in_context": judge(made, right), "histogram": _make_histogram(made, right)}


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns one array of several; a single one as it is: it may be the model's largest."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _make_histogram(candidate: np.ndarray, reference: np.ndarray) -> Histogram | None:
    step = max(1, candidate.size // COUNTED)
    both = [a[np.isfinite(a)] for a in (candidate[::step], reference[::step])]
    if not all(a.size for a in both):
        return None
    low, high = min(float(a.min()) for a in both), max(float(a.max()) for a in both)
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    # Equal bins are counted at once; of given edges numpy sorts the values first, which takes long
    # and is left for values of so narrow a range that two edges are one number.
    is_wide = bool(np.all(np.diff(edges) > 0))
    bins, bounds = (BINS, (edges[0], edges[-1])) if is_wide else (edges, None)
    counts = [tuple(np.histogram(a, bins, bounds)[0].tolist()) for a in both]
    return Histogram(tuple(edges.tolist()), *counts)
