"""Modules run by themselves: ours on their inputs, its parts answering as theirs did."""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls import MatchedCall, match_calls
from jaxformer.parity.matching.masks import Masks, mask_difference, reference_masks, with_masks
from jaxformer.parity.matching.modules import TIED_HEAD, Pair
from jaxformer.parity.report.model import Difference
from jaxformer.parity.tolerance import judge
from jaxformer.parity.trace import isolated_run as isolated_run
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.parity.trace.padding import idle_queries, of_tokens

Key = tuple[str, ...]
Named = Iterator[tuple[str, Difference]]
# A number of one run: given the run's outcome, in whatever precision.
Pick = Callable[[isolated_run.Outcome], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Result:
    """How a pair of modules compares by itself.

    Attributes:
        forward: what was compared on the way forward, in order: what enters its parts, its output.
        backward: each gradient, by name.
    """

    forward: list[tuple[str, Difference]]
    backward: dict[str, Difference]


class TeacherForcedRunner:
    """Runs pairs of modules by themselves.

    Args:
        module: ours, with their weights, in any dtype.
        calls: of our modules, with whatever weights.
        reference: their pass.
        pairs: all pairs.
        parents: the pair around each pair.
        backward: whether to compare gradients.
        gradient: their gradient of a parameter of ours, given its name, the pair whose share of it
            is wanted, and our own gradient; None where nobody can say.

    Attributes:
        matched_calls: the calls of each pair, where both sides called it alike.
        reasons: why the others were not compared.
        padding: tokens of which nothing is compared.
        shared: modules of theirs that are in several pairs.
        parts: the pairs within each pair that answer when it is run.
        masks: see ``their_masks``.
    """

    def __init__(
        self,
        module: Any,
        calls: Mapping[str, jax_trace.Call],
        reference: torch_trace.Trace,
        pairs: Sequence[Pair],
        parents: Mapping[Key, Key | None],
        backward: bool,
        gradient: Callable[[str, Pair, np.ndarray], np.ndarray | None],
    ):
        self.module = module
        self.backward = backward
        self.gradient = gradient
        self.padding = reference.padding
        self.matched_calls: dict[Key, list[MatchedCall]] = {}
        self.reasons: dict[Key, str] = {}
        for pair in pairs:
            self.matched_calls[pair.candidate], self.reasons[pair.candidate] = match_calls(
                pair, calls, reference
            )
        counts = Counter(path for pair in pairs for path in pair.reference)
        self.shared = {path for path, count in counts.items() if count > 1}
        self.parts: dict[Key, list[Pair]] = {}
        met = [pair for pair in pairs if self.matched_calls[pair.candidate]]
        for pair in sorted(
            met, key=lambda pair: self.matched_calls[pair.candidate][0].reference[0].order
        ):
            parent = parents[pair.candidate]
            while parent is not None and not self.matched_calls[parent]:
                parent = parents[parent]
            if parent is not None and self._is_part(pair.candidate, parent):
                self.parts.setdefault(parent, []).append(pair)
        self.masks: Masks = reference_masks(module, self.matched_calls, calls)

    def _is_part(self, key: Key, parent: Key) -> bool:
        """Whether it is known in which of its parent's calls a part is called how often."""
        return len(self.matched_calls[key]) % len(self.matched_calls[parent]) == 0

    def let_go(self, pair: Pair) -> None:
        """Forgets their gradients at a pair, once it and what is around it have been judged."""
        for matched_call in self.matched_calls[pair.candidate]:
            if not self.shared.intersection(pair.reference):
                for call in matched_call.reference:
                    call.input_gradients.clear()
                    call.output_gradients.clear()

    def run(self, pair: Pair) -> Result:
        """Judges a pair that has met."""
        forward: list[tuple[str, Difference]] = []
        found: list[tuple[str, Difference]] = []
        every: list[_Run] = []
        for number, matched_call in enumerate(self.matched_calls[pair.candidate]):
            runs = [_Run(self, matched_call, number, place) for place in range(len(pair.candidate))]
            every += runs
            for run in runs:
                forward += run.forward()
            if self.backward:
                found += _input_gradients(matched_call, runs)
                for run in runs:
                    found += run.answer_gradients()
        if self.backward:
            found += self._parameter_gradients(pair, every)
        backward: dict[str, Difference] = {}
        for name, difference in found:
            before = backward.get(name)
            if before is None or difference.excess > before.excess:
                backward[name] = difference
        return Result(forward, backward)

    def _parameter_gradients(self, pair: Pair, runs: Sequence["_Run"]) -> Named:
        """Of all that is not a part's own, summed over the calls."""
        users: dict[str, list[tuple[_Run, str]]] = {}
        for run in runs:
            owner = run.path.removesuffix(".attend") if run.path == TIED_HEAD else run.path
            for name in run.outcome.parameter_gradients:
                users.setdefault(f"{owner}.{name}".lstrip("."), []).append((run, name))
        for full, places in users.items():
            own = _sum(run.outcome.parameter_gradients[name] for run, name in places)
            expected = self.gradient(full, pair, own)
            if expected is None:
                continue

            def low(places: list[tuple["_Run", str]] = places) -> np.ndarray:
                return _sum(run.low.parameter_gradients[name] for run, name in places)

            short = full.removeprefix(f"{pair.candidate[0]}.") if len(pair.candidate) == 1 else full
            yield short, judge(own, expected, low)


class _Run:
    """One of our modules run once, and what came of it beside what came of theirs."""

    def __init__(
        self, alone: TeacherForcedRunner, matched_call: MatchedCall, number: int, place: int
    ):
        self.alone = alone
        self.matched_call = matched_call
        self.place = place
        self.path = matched_call.pair.candidate[place]
        self.masks = alone.masks
        self.number = number
        self.owner, self.method = jax_trace.resolve(alone.module, self.path)
        # The calls of each part within this one: its meeting, and whether it is the first of
        # several that are one of theirs.
        self.inner: dict[tuple[str, int], list[tuple[MatchedCall, int, bool]]] = {}
        parts = (
            alone.parts.get(matched_call.pair.candidate, [])
            if len(matched_call.pair.candidate) == 1
            else []
        )
        for part in parts:
            met = alone.matched_calls[part.candidate]
            share = len(met) // len(alone.matched_calls[matched_call.pair.candidate])
            calls = [
                (met[n], n, again == 0)
                for n in range(number * share, (number + 1) * share)
                for again in range(max(1, met[n].repeats // matched_call.repeats))
            ]
            for n, path in enumerate(part.candidate):
                self.inner[self._within(path), n] = calls

    def _within(self, path: str) -> str:
        return path.removeprefix(f"{self.path}.") if self.path else path

    @functools.cached_property
    def outcome(self) -> isolated_run.Outcome:
        """In float64."""
        return self._run("float64")

    @functools.cached_property
    def low(self) -> isolated_run.Outcome:
        """In float32."""
        return self._run("float32")

    def _run(self, dtype: str) -> isolated_run.Outcome:
        matched_call, place = self.matched_call, self.place
        call = matched_call.candidate[place]
        args, kwargs = jax_trace.refill((call.args, call.kwargs), matched_call.inputs(place))
        args, kwargs = jax_trace.refill_integers((args, kwargs), matched_call.integers(place))
        call = dataclasses.replace(call, args=args, kwargs=kwargs)
        states = self.masks.get(matched_call.pair.candidate)
        if states:
            call = with_masks(self.owner, call, states[self.number])
        answers = {
            here: [
                isolated_run.ForcedOutput(m.candidate[n].output, m.answers(n)) for m, _, _ in calls
            ]
            for (here, n), calls in self.inner.items()
        }
        if not self.alone.backward:
            return isolated_run.run_isolated(self.owner, self.method, call, answers, dtype=dtype)
        asked = {
            # Where one of theirs stands for several of ours, its gradient goes to the first.
            here: [m.input_gradients() if n == 0 and first else [] for m, _, first in calls]
            for (here, n), calls in self.inner.items()
        }
        return isolated_run.run_isolated(
            self.owner, self.method, call, answers, cotangents=matched_call.output_gradients(place),
            asked_cotangents=asked, dtype=dtype,
        )  # fmt: skip

    def _judge(self, pick: Pick, expected: np.ndarray) -> Difference:
        used = self._used
        return judge(used(pick(self.outcome)), used(expected), lambda: used(pick(self.low)))

    def _used(self, array: np.ndarray) -> np.ndarray:
        return of_tokens(array, self.alone.padding, idle_queries(self.matched_call.reference[0]))

    def forward(self) -> Named:
        """What enters its parts, and its output."""
        for (here, n), calls in self.inner.items():
            asked = self.outcome.asked.get(here, [])
            for place, (matched_call, number, _) in zip(range(len(asked)), calls, strict=False):
                yield from self._asked(here, n, place, matched_call, number)
        for n, expected in enumerate(self.matched_call.answers(self.place)):
            if expected is not None:
                pick: Pick = lambda o, n=n: o.output[n]  # type: ignore[misc]  # noqa: E731
                yield "output", self._judge(pick, expected)

    def _asked(
        self, here: str, n: int, place: int, matched_call: MatchedCall, number: int
    ) -> Named:
        """What enters one part in one call."""
        for i, expected in enumerate(matched_call.inputs(n)):
            if expected is not None:
                pick: Pick = lambda o, i=i: o.asked[here][place][i]  # type: ignore[misc]  # noqa: E731
                yield f"what enters {here}", self._judge(pick, expected)
        arguments = self.outcome.arguments[here][place]
        for mine, reference in zip(
            jax_trace.integers(arguments), matched_call.integers(n), strict=False
        ):
            error = float(np.max(np.abs(self._used(np.asarray(mine) - reference)), initial=0))
            yield f"what enters {here}", Difference(error, float(np.max(np.abs(reference))), 0.0)
        states = self.masks.get(matched_call.pair.candidate)
        for name, state in states[number].items() if states else ():
            yield f"the mask that enters {here}", mask_difference(arguments[name], state)

    def answer_gradients(self) -> Named:
        """The gradients of what its parts gave."""
        for (here, n), calls in self.inner.items():
            for start, (matched_call, _, first) in enumerate(calls):
                if not first or here not in self.outcome.answer_gradients:
                    continue
                places = range(
                    start, start + max(1, matched_call.repeats // self.matched_call.repeats)
                )
                for i, expected in enumerate(matched_call.output_gradients(n)):
                    if expected is None:
                        continue

                    def pick(
                        o: isolated_run.Outcome,
                        i: int = i,
                        here: str = here,
                        places: range = places,
                    ) -> np.ndarray:
                        return _sum(o.answer_gradients[here][place][i] for place in places)

                    yield f"what {here} gave", self._judge(pick, expected)


def _input_gradients(matched_call: MatchedCall, runs: Sequence[_Run]) -> Named:
    """The gradients that a pair of modules pulls back to its inputs."""
    expected = matched_call.input_gradients()
    for group in matched_call.groups():
        wanted = expected[group[0]]
        if wanted is None:
            continue

        def total(outcomes: Iterator[isolated_run.Outcome], group: list[int] = group) -> np.ndarray:
            return _sum(o.input_gradients[n] for o in outcomes for n in group)

        yield (
            f"input {group[0]}",
            judge(
                total(run.outcome for run in runs), wanted, lambda: total(run.low for run in runs)
            ),
        )


def _sum(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """The sum; of one array that array, as it may be the largest of the model."""
    first, *others = arrays
    return sum(others, first)
