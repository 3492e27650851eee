"""One matched call, run isolated: its numbers beside those of the reference."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.findings import INPUT_OF, Difference
from jaxformer.parity.matching.calls.calls import MatchedCall
from jaxformer.parity.matching.calls.masks import MaskState, mask_difference, with_masks
from jaxformer.parity.recording.calls.jax_isolated import (
    ForcedOutput,
    IsolatedModule,
    IsolatedOutcome,
)
from jaxformer.parity.recording.calls.jax_programs import Programs
from jaxformer.parity.recording.calls.padding import Padding, drop_unused_tokens, idle_queries
from jaxformer.parity.recording.jax_values import integer_arrays, refill, refill_integers
from jaxformer.parity.tolerance import judge

NamedDifferences = Iterator[tuple[str, Difference]]


@dataclasses.dataclass(frozen=True)
class ForcedCall:
    """One call of a submodule during an isolated run, whose output is forced.

    Attributes:
        matched_call: the call in both whole models.
        masks: the reference's masks in it, by parameter name.
        is_first: whether it is the first of several candidate calls that match one reference call.
    """

    matched_call: MatchedCall
    masks: Mapping[str, MaskState]
    is_first: bool


@dataclasses.dataclass(frozen=True)
class IsolatedCall:
    """One call of one candidate module, run isolated on the reference's inputs.

    Attributes:
        path: of the module in the candidate.
        owner: the module, with the reference's weights.
        method: which of its methods is called.
        matched_call: the call in both whole models.
        place: which of the pair's candidate modules it is.
        masks: the reference's masks in it, by parameter name.
        forced: by path of a submodule within the module, and its place in its pair, its calls.
        padding: tokens that are not compared.
        programs: of modules that were run before.
        backward: whether to compare gradients.
    """

    path: str
    owner: Any
    method: str
    matched_call: MatchedCall
    place: int
    masks: Mapping[str, MaskState]
    forced: Mapping[tuple[str, int], Sequence[ForcedCall]]
    padding: Padding
    programs: Programs
    backward: bool

    @property
    def given_calls(self) -> list[MatchedCall]:
        """The calls of pairs inside it whose outputs are forced, each once."""
        return [
            each.matched_call
            for (_, n), calls in self.forced.items()
            for each in calls
            if n == 0 and each.is_first
        ]

    @functools.cached_property
    def outcome(self) -> IsolatedOutcome:
        """The run in float64."""
        return self._run("float64")

    @functools.cached_property
    def low(self) -> IsolatedOutcome:
        """The run in float32."""
        return self._run("float32")

    def as_function(self, dtype: str = "float64") -> IsolatedModule:
        """Returns the module as a function, called on the reference's inputs."""
        matched_call, place = self.matched_call, self.place
        call = matched_call.candidate[place]
        args, kwargs = refill((call.args, call.kwargs), matched_call.inputs(place))
        args, kwargs = refill_integers((args, kwargs), matched_call.integers(place))
        call = dataclasses.replace(call, args=args, kwargs=kwargs)
        if self.masks:
            call = with_masks(self.owner, call, self.masks)
        forced_outputs = {
            path: [
                ForcedOutput(
                    each.matched_call.candidate[n].output,
                    each.matched_call.outputs(n),
                    each.matched_call.integer_outputs(n),
                )
                for each in calls
            ]
            for (path, n), calls in self.forced.items()
        }
        return IsolatedModule(self.owner, self.method, call, forced_outputs, dtype, self.programs)

    def _run(self, dtype: str) -> IsolatedOutcome:
        function = self.as_function(dtype)
        if not self.backward:
            return function.run()
        submodule_cotangents = {
            # Where one reference call matches several calls, its gradient goes to the first.
            path: [
                each.matched_call.input_gradients() if n == 0 and each.is_first else []
                for each in calls
            ]
            for (path, n), calls in self.forced.items()
        }
        return function.run(self.matched_call.output_gradients(self.place), submodule_cotangents)

    def compare_forward(self) -> NamedDifferences:
        """Yields the differences of what enters the submodules, in order, and of the output."""
        for (path, n), calls in self.forced.items():
            entered = self.outcome.submodule_inputs.get(path, [])
            for number, forced_call in zip(range(len(entered)), calls, strict=False):
                yield from self._compare_submodule_inputs(path, n, number, forced_call)
        for n, expected in enumerate(self.matched_call.outputs(self.place)):
            if expected is None:
                continue

            def pick(outcome: IsolatedOutcome, n: int = n) -> np.ndarray:
                return outcome.outputs[n]

            yield "its output", self._judge(pick, expected)
        chosen = self.matched_call.integer_outputs(self.place)
        for found, expected in zip(self.outcome.integers, chosen, strict=False):
            wrong = float(np.max(np.abs(found - expected), initial=0))
            yield "its choice", Difference(wrong, float(np.max(expected, initial=1)), 0.0)

    def _compare_submodule_inputs(
        self, path: str, n: int, number: int, forced_call: ForcedCall
    ) -> NamedDifferences:
        """Yields the differences of what enters one submodule in one call."""
        name = f"{INPUT_OF}{path}"
        matched_call = forced_call.matched_call
        names = matched_call.candidate[n].input_names
        # A cache stays empty where the submodule that fills it does not run.
        count = len(self.outcome.submodule_inputs[path][number])
        for i, expected in enumerate(matched_call.inputs(n)[:count]):
            if expected is None:
                continue
            # It comes from outside of the blocks: a wrong bucket of distances shows here alone.
            is_bias = names[i : i + 1] == ["position_bias"]
            called = f"the position_bias of {path}" if is_bias else name

            def pick(outcome: IsolatedOutcome, i: int = i) -> np.ndarray:
                return outcome.submodule_inputs[path][number][i]

            yield called, self._judge(pick, expected)
        arguments = self.outcome.submodule_arguments[path][number]
        for candidate, reference in zip(
            integer_arrays(arguments), matched_call.integers(n), strict=False
        ):
            error = np.abs(self._drop_unused(np.asarray(candidate) - reference))
            scale = float(np.max(np.abs(reference)))
            yield name, Difference(float(np.max(error, initial=0)), scale, 0.0)
        for parameter, state in forced_call.masks.items():
            yield f"the mask of {path}", mask_difference(arguments[parameter], state)

    def compare_forced_output_gradients(self) -> NamedDifferences:
        """Yields the differences of the gradients of what the submodules returned."""
        for (path, n), calls in self.forced.items():
            for start, forced_call in enumerate(calls):
                if not forced_call.is_first or path not in self.outcome.forced_output_gradients:
                    continue
                repeats = forced_call.matched_call.repeats // self.matched_call.repeats
                numbers = range(start, start + max(1, repeats))
                for i, expected in enumerate(forced_call.matched_call.output_gradients(n)):
                    if expected is None:
                        continue

                    def pick(
                        outcome: IsolatedOutcome,
                        i: int = i,
                        path: str = path,
                        numbers: range = numbers,
                    ) -> np.ndarray:
                        gradients = outcome.forced_output_gradients[path]
                        return add_arrays(gradients[number][i] for number in numbers)

                    yield f"output of {path}", self._judge(pick, expected)

    def _judge(
        self, pick: Callable[[IsolatedOutcome], np.ndarray], expected: np.ndarray
    ) -> Difference:
        """Judges one array of the outcome, whose float32 run is made only where it may decide."""
        used = self._drop_unused
        return judge(used(pick(self.outcome)), used(expected), lambda: used(pick(self.low)))

    def _drop_unused(self, array: np.ndarray) -> np.ndarray:
        idle = idle_queries(self.matched_call.reference[0])
        return drop_unused_tokens(array, self.padding, idle)


def compare_input_gradients(
    matched_call: MatchedCall, runs: Sequence[IsolatedCall]
) -> NamedDifferences:
    """Yields the differences of the gradients that a pair of modules pulls back to its inputs.

    Args:
        matched_call: the call.
        runs: the same call, of each of the pair's candidate modules.
    """
    expected = matched_call.input_gradients()
    for group in matched_call.groups() if expected else ():
        wanted = expected[group[0]]
        if wanted is None:
            continue

        def total(outcomes: Iterator[IsolatedOutcome], group: list[int] = group) -> np.ndarray:
            return add_arrays(o.input_gradients[n] for o in outcomes for n in group)

        yield (
            f"input {group[0]}",
            judge(
                total(run.outcome for run in runs), wanted, lambda: total(run.low for run in runs)
            ),
        )


def add_arrays(arrays: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the sum; of a single array that array itself, as it may be the model's largest."""
    first, *others = arrays
    return sum(others, first)
