"""Runs every pair of modules isolated, with teacher forcing.

Each candidate module gets the reference's inputs, and each of its submodules returns the
reference's output. So a pair is judged by its own arithmetic alone.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import Difference
from jaxformer.parity.matching.calls.calls import MatchedCall, Unmatched, match_calls
from jaxformer.parity.matching.calls.masks import Masks, MaskState, reference_masks
from jaxformer.parity.matching.pairs import TIED_HEAD, Pair, PairKey
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.jax_programs import Programs
from jaxformer.parity.segments.calls.isolated_calls import (
    ForcedCall,
    IsolatedCall,
    NamedDifferences,
    add_arrays,
    compare_input_gradients,
)
from jaxformer.parity.segments.calls.reference_gradients import ReferenceGradients
from jaxformer.parity.tolerance import judge


@dataclasses.dataclass(frozen=True)
class PairDifferences:
    """How an isolated pair of modules compares.

    Attributes:
        forward: what was compared, in order: what enters its submodules, its output.
        backward: each gradient, by name.
    """

    forward: list[tuple[str, Difference]]
    backward: dict[str, Difference]


class TeacherForcedRunner:
    """Runs pairs of modules isolated and compares them.

    Args:
        module: the candidate, with the reference's weights, in any dtype.
        calls: of the candidate's modules, with whatever weights.
        reference: the pass of the reference.
        pairs: all pairs.
        parents: the pair around each pair.
        gradients: of the reference; None to compare none.

    Attributes:
        matched_calls: the calls of each pair; none where they could not be matched.
        unmatched: of the other pairs, why not.
        inner_pairs: of each pair, the pairs in it whose outputs are forced when it is run.
        padding: tokens that are not compared.
        masks: the reference's masks, by pair.
    """

    def __init__(
        self,
        module: Any,
        calls: Mapping[str, jax_trace.JaxCall],
        reference: torch_trace.Trace,
        pairs: Sequence[Pair],
        parents: Mapping[PairKey, PairKey | None],
        gradients: ReferenceGradients | None,
    ):
        self.module = module
        self.gradients = gradients
        self.padding = reference.padding
        self._programs = Programs()
        self.matched_calls: dict[PairKey, list[MatchedCall]] = {}
        self.unmatched: dict[PairKey, Unmatched] = {}
        for pair in pairs:
            matched = match_calls(pair, calls, reference)
            if isinstance(matched, Unmatched):
                self.unmatched[pair.candidate] = matched
            self.matched_calls[pair.candidate] = [] if isinstance(matched, Unmatched) else matched
        self.inner_pairs = self._find_inner_pairs(pairs, parents)
        counts = Counter(path for pair in pairs for path in pair.reference)
        self._shared = {path for path, count in counts.items() if count > 1}
        self._kept: set[PairKey] = set()
        self.masks: Masks = reference_masks(module, self.matched_calls, calls)

    def _find_inner_pairs(
        self, pairs: Sequence[Pair], parents: Mapping[PairKey, PairKey | None]
    ) -> dict[PairKey, list[Pair]]:
        found: dict[PairKey, list[Pair]] = {}
        matched = [pair for pair in pairs if self.matched_calls[pair.candidate]]
        for pair in sorted(
            matched, key=lambda pair: self.matched_calls[pair.candidate][0].reference[0].order
        ):
            parent = parents[pair.candidate]
            while parent is not None and not self.matched_calls[parent]:
                parent = parents[parent]
            # Only then is it known which of its calls belong to which call of the parent.
            if parent is not None and not (
                len(self.matched_calls[pair.candidate]) % len(self.matched_calls[parent])
            ):
                found.setdefault(parent, []).append(pair)
        return found

    def run(self, pair: Pair) -> PairDifferences:
        """Runs and compares a pair whose calls are matched."""
        with self.with_gradients(pair) as known:
            return self._compare(pair, backward=known)

    @contextlib.contextmanager
    def with_gradients(self, pair: Pair) -> Iterator[bool]:
        """Knows the reference's gradients of a pair inside the ``with`` block.

        Yields:
            Whether they are known.
        """
        if self.gradients is None or self.writes(pair):
            yield False
            return
        matched = self.matched_calls[pair.candidate]
        inner = []
        for number, outer in enumerate(matched):
            calls = self.isolate(pair, number, 0).given_calls
            # What is called beside the candidate's module is no part of its gradients.
            place = outer.candidate[0].order
            inner.append([call for call in calls if place in call.candidate[0].around])
        with self.gradients.of(pair, matched, inner) as known:
            yield known

    def _compare(self, pair: Pair, *, backward: bool) -> PairDifferences:
        forward: list[tuple[str, Difference]] = []
        gradients: list[tuple[str, Difference]] = []
        all_runs: list[IsolatedCall] = []
        for number, matched_call in enumerate(self.matched_calls[pair.candidate]):
            places = range(len(pair.candidate))
            runs = [self.isolate(pair, number, place, backward=backward) for place in places]
            all_runs += runs
            for run in runs:
                forward += run.compare_forward()
            if backward:
                gradients += compare_input_gradients(matched_call, runs)
                for run in runs:
                    gradients += run.compare_forced_output_gradients()
        if backward:
            gradients += self._compare_parameter_gradients(pair, all_runs)
        worst: dict[str, Difference] = {}
        for name, difference in gradients:
            before = worst.get(name)
            if before is None or difference.excess > before.excess:
                worst[name] = difference
        return PairDifferences(forward, worst)

    def writes(self, pair: Pair) -> bool:
        """Returns whether calls of a pair write to what they are given, or to their state.

        Gradients come back through that, too, and are no gradients of the call alone.
        """
        calls = self.matched_calls[pair.candidate]
        return any(candidate.writes for call in calls for candidate in call.candidate)

    def free(self, pair: Pair, *, is_wrong: bool) -> None:
        """Frees what was recorded of a pair, once it is judged and all pairs around it are.

        A pair with a bug is looked into later, with the pairs inside it.
        """
        if is_wrong:
            inside = self.inner_pairs.get(pair.candidate, ())
            self._kept |= {pair.candidate, *(each.candidate for each in inside)}
        if pair.candidate in self._kept or self._shared.intersection(pair.reference):
            return
        for matched in self.matched_calls[pair.candidate]:
            for made in matched.candidate:
                made.free()
            for recorded in matched.reference:
                recorded.free()

    def free_unmatched(self, calls: Mapping[str, jax_trace.JaxCall]) -> None:
        """Frees what was recorded of the candidate's modules that are in no matched pair.

        Args:
            calls: of the candidate's modules, which nothing else will read.
        """
        read = {
            id(call)
            for calls_of_pair in self.matched_calls.values()
            for matched in calls_of_pair
            for call in matched.candidate
        }
        for first in calls.values():
            for call in first.all:
                if id(call) not in read:
                    call.free()

    def isolate(
        self, pair: Pair, number: int, place: int, *, backward: bool = False
    ) -> IsolatedCall:
        """Returns one call of one of a pair's modules, ready to be run."""
        path = pair.candidate[place]
        owner, method = jax_modules.resolve(self.module, path)
        matched_call = self.matched_calls[pair.candidate][number]
        forced: dict[tuple[str, int], list[ForcedCall]] = {}
        if len(pair.candidate) == 1:
            for inner in self.inner_pairs.get(pair.candidate, []):
                calls = self._forced_calls(inner, matched_call, number)
                for n, inner_path in enumerate(inner.candidate):
                    forced[inner_path.removeprefix(f"{path}.") if path else inner_path, n] = calls
        return IsolatedCall(
            path, owner, method, matched_call, place,
            masks=self._masks_of(pair, number), forced=forced, padding=self.padding,
            programs=self._programs, backward=backward,
        )  # fmt: skip

    def _forced_calls(self, inner: Pair, outer_call: MatchedCall, number: int) -> list[ForcedCall]:
        """Returns the calls of an inner pair within call ``number`` of the outer one."""
        matched = self.matched_calls[inner.candidate]
        share = len(matched) // len(self.matched_calls[outer_call.pair.candidate])
        return [
            ForcedCall(matched[n], self._masks_of(inner, n), is_first=repeat == 0)
            for n in range(number * share, (number + 1) * share)
            for repeat in range(max(1, matched[n].repeats // outer_call.repeats))
        ]

    def _masks_of(self, pair: Pair, number: int) -> Mapping[str, MaskState]:
        states = self.masks.get(pair.candidate)
        return states[number] if states else {}

    def _compare_parameter_gradients(
        self, pair: Pair, runs: Sequence[IsolatedCall]
    ) -> NamedDifferences:
        """Yields the differences of the gradients of a pair's own parameters, over all calls."""
        users: dict[str, list[tuple[IsolatedCall, str]]] = {}
        for run in runs:
            owner = run.path.removesuffix(".attend") if run.path == TIED_HEAD else run.path
            for name in run.outcome.parameter_gradients:
                users.setdefault(f"{owner}.{name}".lstrip("."), []).append((run, name))
        for full, places in users.items():
            own = add_arrays(run.outcome.parameter_gradients[name] for run, name in places)
            expected = self.gradients.find(full, pair, own) if self.gradients else None
            if expected is None:
                continue

            def low(places: list[tuple[IsolatedCall, str]] = places) -> np.ndarray:
                return add_arrays(run.low.parameter_gradients[name] for run, name in places)

            short = full.removeprefix(f"{pair.candidate[0]}.") if len(pair.candidate) == 1 else full
            yield short, judge(own, expected, low)
