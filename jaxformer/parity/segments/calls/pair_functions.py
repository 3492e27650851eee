"""A pair of modules as two functions of the same arrays, which can be compared by their operators.

Both modules are given what entered the reference's, and their submodules return what the
reference's returned, so the operators that differ are their own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.matching.calls.calls import calls_inside
from jaxformer.parity.matching.calls.masks import (
    right_mask,
    scores_of_mask,
    scores_of_torch_mask,
    wrong_entries,
)
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.recording.calls.torch_isolated import Part, Ran, isolate
from jaxformer.parity.recording.calls.torch_recorder import TorchCall
from jaxformer.parity.recording.operators.sources import line_of_frames
from jaxformer.parity.recording.torch_values import require_torch
from jaxformer.parity.segments.calls.isolated_calls import IsolatedCall
from jaxformer.parity.segments.calls.reference_gradients import read_outputs

# Picks an array from what each of a pair's modules made.
Made = Sequence["_Made"]
Pick = Callable[[Made], Any]


@dataclasses.dataclass(frozen=True)
class Functions:
    """A segment of both sides, to be compared as if each were a model.

    Attributes:
        reference: a PyTorch module.
        candidate: a function and its parameters.
        inputs: of the reference.
        jax_inputs: of the candidate.
        line_that_reads: returns "path:line" of the code that a result of the candidate goes to,
            given its place.
    """

    reference: Any
    candidate: tuple[Callable[..., Any], Any]
    inputs: list[Any]
    jax_inputs: list[Any]
    line_that_reads: Callable[[int], str]


class PairFunctions:
    """One call of a pair of modules, as two functions of the same arrays.

    Args:
        reference: the whole model, whose parts are run again.
        pair: the modules.
        calls: of each of the candidate's modules.
    """

    def __init__(self, reference: Any, pair: Pair, calls: Sequence[IsolatedCall]):
        self._reference, self._calls = reference, calls
        self._parts = [
            Part(path, call, calls_inside(path, calls[0].given_calls))
            for path, call in zip(pair.reference, calls[0].matched_call.reference, strict=True)
        ]
        self._own: list[Pick] = []
        self._right: list[Pick] = []
        # Of each result of the candidate, which call of a submodule it enters.
        self._enters: list[tuple[str, int] | None] = []
        for number, call in enumerate(calls):
            self._compare_outputs(pair, number, call)
        (first, *others) = calls
        if not others:
            self._compare_entering(first)
            self._compare_masks(first)

    def _add(self, own: Pick, right: Pick, enters: tuple[str, int] | None = None) -> None:
        self._own.append(own)
        self._right.append(right)
        self._enters.append(enters)

    def _compare_outputs(self, pair: Pair, number: int, call: IsolatedCall) -> None:
        """Compares results of one of the candidate's modules with its share of the reference's."""
        matched = call.matched_call
        is_joined = len(pair.reference) > 1
        wide = [made.outputs[0].shape[-1] for made in matched.reference]
        shares = _shares(pair, wide, [made.outputs[0].shape[-1] for made in matched.candidate])
        for n, place in enumerate(matched.output_alignments[number].places):
            if place is None:
                continue
            share = None if shares is None else shares[number].tolist()

            def own(made: Made, n: int = n) -> Any:
                return made[number].outputs[n]

            def right(made: Made, place: int = place, share: Any = share) -> Any:
                output = _joined(made, place) if is_joined else made[0].outputs[place]
                return output if share is None else output[..., share]

            self._add(own, right)

    def _compare_entering(self, call: IsolatedCall) -> None:
        """Compares what enters the submodules."""
        for (path, n), calls in call.forced.items():
            for count, forced in enumerate(calls):
                inner = forced.matched_call
                within = self._place_of(inner.reference[0])
                if not forced.is_first or within is None:
                    continue
                for i, place in enumerate(inner.input_alignments[n].places):
                    if place is not None:
                        self._add(_entered(path, count, i), _entered(*within, place), (path, count))

    def _compare_masks(self, call: IsolatedCall) -> None:
        """Compares the first wrong one of the masks that enter submodules under one name."""
        seen: set[str] = set()
        for (path, _), calls in call.forced.items():
            entered = call.outcome.submodule_arguments.get(path, [])
            for count, (arguments, forced) in enumerate(zip(entered, calls, strict=False)):
                for name, state in forced.masks.items():
                    if name in seen or not wrong_entries(arguments[name], state).any():
                        continue
                    seen.add(name)
                    allowed = right_mask(arguments[name], state)

                    def own(
                        made: Made, path: str = path, n: int = count, name: str = name,
                        shape: tuple[int, ...] = state.shape,
                    ) -> Any:  # fmt: skip
                        return scores_of_mask(made[0].arguments[path][n][name], shape)

                    within = self._place_of(forced.matched_call.reference[0])

                    def right(made: Made, within: Any = within, allowed: Any = allowed) -> Any:
                        entered = [] if within is None else made[0].entered[within[0]][within[1]]
                        return scores_of_torch_mask(entered, allowed)

                    self._add(own, right, (path, count))

    def _place_of(self, call: TorchCall) -> tuple[str, int] | None:
        """Returns the path of an inner call, and which of the calls there it is."""
        for path, calls in self._parts[0].inner.items():
            for count, each in enumerate(calls):
                if each is call:
                    return path, count
        return None

    def make(self) -> "Functions":
        """Returns the two functions, and what both are given."""

        def pick(ran: list[Ran]) -> list[Any]:
            made = [_Made(outputs, entered) for outputs, entered in ran]
            return [right(made) for right in self._right]

        given_calls = self._calls[0].given_calls
        compared = {id(each): read_outputs(one) for one in given_calls for each in one.reference}
        module, tensors = isolate(
            self._reference, self._parts, pick, lambda call, place: place in compared[id(call)]
        )
        functions = [call.as_function() for call in self._calls]
        first = functions[0]
        if any(len(f.call.inputs) != len(first.call.inputs) for f in functions):
            raise ValueError("several modules do the work of one, and are called differently")

        def candidate(parameters: Any, inputs: Any, given: Any, integers: Any) -> Any:
            made = []
            of_each = parameters if len(functions) > 1 else [parameters]
            for function, own in zip(functions, of_each, strict=True):
                # All read the same arrays.
                outputs, entered = function(own, inputs, given, integers)
                made.append(_Made(outputs, entered, function.arguments))
            return [own(made) for own in self._own]

        arrays = first.cast(
            (first.call.inputs, first.given, [np.asarray(x) for x in first.call.integers])
        )
        parameters = [function.own for function in functions]

        def line_that_reads(place: int) -> str:
            enters = self._enters[place]
            return "" if enters is None else line_of_frames(first.callers[enters[0]][enters[1]])

        return Functions(
            module,
            (candidate, parameters if len(parameters) > 1 else parameters[0]),
            tensors,
            list(arrays),
            line_that_reads,
        )


@dataclasses.dataclass(frozen=True)
class _Made:
    """What one module gave: its results, and what entered its submodules.

    Attributes:
        outputs: the float arrays of its result.
        entered: of each submodule, call by call, the float arrays that entered it.
        arguments: of each submodule, call by call, all its arguments by name.
    """

    outputs: Sequence[Any]
    entered: Mapping[str, Sequence[Sequence[Any]]]
    arguments: Mapping[str, Sequence[Mapping[str, Any]]] = dataclasses.field(default_factory=dict)


def _entered(path: str, count: int, place: int) -> Pick:
    """Returns what picks an array that entered a submodule."""
    return lambda made: made[0].entered[path][count][place]


def _joined(made: Made, place: int) -> Any:
    """Returns the results of several modules of the reference, their features side by side."""
    return require_torch().cat([one.outputs[place] for one in made], -1)


def _shares(
    pair: Pair, reference: Sequence[int], candidate: Sequence[int]
) -> list[np.ndarray] | None:
    """Returns which features of the reference's results, side by side, each module has.

    Args:
        pair: the modules.
        reference: how many features the result of each module of the reference has.
        candidate: the same of the candidate.
    """
    if len(pair.candidate) == len(pair.reference) == 1:
        return None
    ends = np.cumsum(reference)
    features = [np.arange(end - width, end) for end, width in zip(ends, reference, strict=True)]
    return pair.unpack(features, [(width,) for width in candidate])
