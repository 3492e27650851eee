"""The lines of code behind a bug: one pair of modules, isolated, compared operator by operator.

Both modules are given what entered the reference's, and their submodules return what the
reference's returned, so the operators that differ are their own.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxformer.parity.comparison.isolated_calls import IsolatedCall
from jaxformer.parity.comparison.reference_gradients import read_outputs
from jaxformer.parity.comparison.teacher_forcing import TeacherForcedRunner
from jaxformer.parity.comparison.verdicts import arithmetic_stage
from jaxformer.parity.graphs.compare import compare_graphs
from jaxformer.parity.graphs.recording.sources import line_of_frames
from jaxformer.parity.graphs.recording.tracing import narrow_casts
from jaxformer.parity.matching.calls import calls_inside
from jaxformer.parity.matching.masks import (
    right_mask,
    scores_of_mask,
    scores_of_torch_mask,
    wrong_entries,
)
from jaxformer.parity.matching.modules import Pair, PairKey
from jaxformer.parity.report.model import Node, RootCause, Stage
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import one_line
from jaxformer.parity.trace.torch_isolated import isolate
from jaxformer.parity.trace.torch_recorder import TorchCall

# Calls of a pair that are tried, from the first one on, until one of them shows the bug.
MOST_CALLS = 3
# Picks an array from what each of a pair's modules made.
Made = Sequence["_Made"]
Pick = Callable[[Made], Any]


class RanReference(Protocol):
    """A reference, or a part of one with its weights in memory, whose calls were recorded."""

    @property
    def module(self) -> Any:
        """The whole model, whose parts are run again."""


@dataclasses.dataclass(frozen=True)
class Lines:
    """What differs in the code of pairs with a bug of their own.

    Attributes:
        causes: where that was found.
        remarks: of the other pairs, why not.
    """

    causes: tuple[RootCause, ...] = ()
    remarks: tuple[str, ...] = ()


def find_lines(
    reference: RanReference,
    runner: TeacherForcedRunner,
    pairs: Sequence[Pair],
    nodes: Mapping[PairKey, Node],
) -> Lines:
    """Looks into the pairs with a bug of their own, operator by operator.

    Args:
        reference: after its pass.
        runner: of the candidate.
        pairs: all of them.
        nodes: of the pairs, judged.
    """
    known: dict[tuple[str, ...], RootCause | str] = {}
    causes: list[RootCause] = []
    without: dict[str, list[str]] = {}
    for pair in pairs:
        node = nodes.get(pair.candidate)
        stage = arithmetic_stage(node) if node is not None and node.is_root_cause else ""
        if node is None or not stage:
            continue
        # The same module of another layer has the same cause.
        alike = node.kind, node.reference_kind, stage, node.message
        if alike not in known:
            known[alike] = _find_cause(reference, runner, pair, stage)
        found = known[alike]
        if isinstance(found, RootCause):
            # With the paths that the pair has in the whole models.
            causes.append(
                dataclasses.replace(
                    found, jax_module=pair.path, torch_module=pair.reference_path, effect=None
                )
            )
        else:
            without.setdefault(found, []).append(pair.path or "the model")
    remarks = [f"no lines of code of {', '.join(names)}: {why}" for why, names in without.items()]
    return Lines(tuple(causes), tuple(remarks))


def _find_cause(
    reference: RanReference, runner: TeacherForcedRunner, pair: Pair, stage: Stage
) -> RootCause | str:
    """Returns the first cause that a call of a pair shows, or why there is none."""
    if len(pair.reference) > 1:
        return "several modules of the reference do the work of one"
    gradients = runner.gradients
    if stage == "backward" and gradients is not None and pair.candidate in gradients.derived:
        # As an input of its own it would have a gradient that the candidate's has not.
        return "a submodule of the reference has a second result, made of the one that is compared"
    why = "it was not run by itself"
    for number in range(min(MOST_CALLS, len(runner.matched_calls[pair.candidate]))):
        calls = [runner.isolate(pair, number, place) for place in range(len(pair.candidate))]
        try:
            report = _Isolated(reference, pair, calls).compare(stage)
        except Exception as error:
            # Whatever an operator cannot do by itself: the verdict stands without its line.
            why = f"{type(error).__name__}: {one_line(str(error))}"
            continue
        for cause in report.root_causes:
            if cause.is_backward == (stage == "backward"):
                return cause
        if report.weights:
            return RootCause(diagnosis=report.weights[0])
        # Operators are compared as if all of them computed in float64.
        for source, dtype in (c for call in calls for c in narrow_casts(call.as_function().jaxpr)):
            text = f"the candidate rounds to {dtype}; the reference does not"
            return RootCause(source, diagnosis=text, jax_operators=("convert_element_type",))
        why = "its operators give what the reference's give, on the same inputs"
    return why


class _Isolated:
    """One call of a pair of modules, as two functions of the same arrays.

    Args:
        reference: after its pass.
        pair: the modules.
        calls: of each of the candidate's modules.
    """

    def __init__(self, reference: RanReference, pair: Pair, calls: Sequence[IsolatedCall]):
        self._reference, self._path, self._calls = reference, pair.reference[0], calls
        self._inner = calls_inside(self._path, calls[0].given_calls)
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
        """Compares results of one of the candidate's modules, or its share of the reference's."""
        matched = call.matched_call
        shares = _shares(pair, [made.outputs[0].shape[-1] for made in matched.candidate])
        for n, place in enumerate(matched.output_alignments[number].places):
            if place is None:
                continue
            share = None if shares is None else shares[number].tolist()

            def own(made: Made, n: int = n) -> Any:
                return made[number].outputs[n]

            def right(made: Made, place: int = place, share: Any = share) -> Any:
                output = made[0].outputs[place]
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
        for path, calls in self._inner.items():
            for count, each in enumerate(calls):
                if each is call:
                    return path, count
        return None

    def compare(self, stage: Stage) -> Report:
        """Compares the two functions operator by operator."""
        matched = self._calls[0].matched_call

        def pick(outputs: list[Any], entered: Mapping[str, list[list[Any]]]) -> list[Any]:
            made = [_Made(outputs, entered)]
            return [right(made) for right in self._right]

        given_calls = self._calls[0].given_calls
        compared = {id(each): read_outputs(one) for one in given_calls for each in one.reference}
        module, tensors = isolate(
            self._reference.module, self._path, matched.reference[0], self._inner, pick,
            lambda call, place: place in compared[id(call)],
        )  # fmt: skip
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

        return compare_graphs(
            module,
            (candidate, parameters if len(parameters) > 1 else parameters[0]),
            tensors,
            list(arrays),
            stage == "backward",
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


def _shares(pair: Pair, widths: Sequence[int]) -> list[np.ndarray] | None:
    """Returns which features of the reference's result each of several modules has."""
    if len(pair.candidate) == 1:
        return None
    features = np.arange(sum(widths))
    return pair.unpack([features], [(width,) for width in widths])
