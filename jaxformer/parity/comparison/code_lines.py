"""The lines of code behind a bug: one pair of modules, isolated, compared operator by operator.

Both modules are given what entered the reference's, and their submodules return what the
reference's returned, so the operators that differ are their own.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxformer.parity.comparison.isolated_calls import IsolatedCall
from jaxformer.parity.comparison.teacher_forcing import TeacherForcedRunner
from jaxformer.parity.graphs.compare import compare_graphs
from jaxformer.parity.graphs.recording.tracing import narrow_casts
from jaxformer.parity.matching.calls import calls_inside
from jaxformer.parity.matching.modules import Pair, PairKey
from jaxformer.parity.report.model import Node, RootCause, Stage
from jaxformer.parity.report.report import Report
from jaxformer.parity.trace.torch_isolated import isolate
from jaxformer.parity.trace.torch_recorder import TorchCall

# Calls of a pair that are tried, from the first one on, until one of them shows the bug.
MOST_CALLS = 3
# One array among the float arrays of a result; or a path, a call, and one of what entered it.
Place = tuple[int] | tuple[str, int, int]


class RanReference(Protocol):
    """A reference, or a part of one with its weights in memory, whose calls were recorded."""

    @property
    def module(self) -> Any:
        """The whole model, whose parts are run again."""


def find_causes(
    reference: RanReference,
    runner: TeacherForcedRunner,
    pairs: Sequence[Pair],
    nodes: Mapping[PairKey, Node],
) -> Iterator[RootCause]:
    """Yields for pairs with a bug of their own what differs in their code, where it is found.

    Args:
        reference: after its pass.
        runner: of the candidate.
        pairs: all of them.
        nodes: of the pairs, judged.
    """
    wrong = {pair: stage for pair in pairs if (stage := _stage(pair, runner, nodes))}
    known: dict[tuple[str, ...], RootCause] = {}
    for pair, stage in wrong.items():
        node = nodes[pair.candidate]
        # The same module of another layer.
        alike = node.kind, node.reference_kind, stage, node.message
        if alike in known:
            yield _of_pair(pair, known[alike])
            continue
        found = _find_cause(reference, runner, pair, stage)
        if found is not None:
            known[alike] = _of_pair(pair, found)
            yield known[alike]


def _find_cause(
    reference: RanReference,
    runner: TeacherForcedRunner,
    pair: Pair,
    stage: Stage,
) -> RootCause | None:
    """Returns the first cause that a call of a pair shows, None if none does."""
    for number in range(min(MOST_CALLS, len(runner.matched_calls[pair.candidate]))):
        call = runner.isolate(pair, number, 0)
        try:
            report = _Isolated(reference, pair, call).compare(stage)
        except Exception:
            # Whatever an operator cannot do by itself: the verdict stands without its line.
            continue
        for cause in report.root_causes:
            if cause.is_backward == (stage == "backward"):
                return cause
        if report.weights:
            return RootCause(diagnosis=report.weights[0])
        # Operators are compared as if all of them computed in float64.
        for source, dtype in narrow_casts(call.as_function().jaxpr):
            text = f"the candidate rounds to {dtype}; the reference does not"
            return RootCause(source, diagnosis=text, jax_operators=("convert_element_type",))
    return None


def _stage(pair: Pair, runner: TeacherForcedRunner, nodes: Mapping[PairKey, Node]) -> Stage:
    """Returns where the arithmetic of a pair is wrong; "" if it is not, or has no lines."""
    node = nodes.get(pair.candidate)
    is_one = len(pair.candidate) == len(pair.reference) == 1
    if node is None or not node.is_root_cause or not is_one:
        return ""
    if not runner.matched_calls[pair.candidate]:
        return ""
    if node.forward is not None and node.forward.is_bug:
        return "forward"
    return "backward" if any(d.is_bug for d in node.backward.values()) else ""


def _of_pair(pair: Pair, cause: RootCause) -> RootCause:
    """Returns a cause that an isolated pair shows, with the paths that the pair has."""
    return dataclasses.replace(
        cause, jax_module=pair.path, torch_module=pair.reference_path, effect=None
    )


class _Isolated:
    """One call of a pair of modules, as two functions of the same arrays."""

    def __init__(self, reference: RanReference, pair: Pair, call: IsolatedCall):
        self._reference, self._path, self._call = reference, pair.reference[0], call
        self._inner = calls_inside(self._path, call.given_calls)
        self._own: list[Place] = []
        self._right: list[Place] = []
        alignment = call.matched_call.output_alignments[0]
        for n, place in enumerate(alignment.places):
            if place is not None:
                self._own.append((n,))
                self._right.append((place,))
        for (path, n), calls in call.forced.items():
            for count, forced in enumerate(calls):
                inner = forced.matched_call
                within = self._place_of(inner.reference[0])
                if not forced.is_first or within is None:
                    continue
                for i, place in enumerate(inner.input_alignments[n].places):
                    if place is not None:
                        self._own.append((path, count, i))
                        self._right.append((*within, place))

    def _place_of(self, call: TorchCall) -> tuple[str, int] | None:
        """Returns the path of an inner call, and which of the calls there it is."""
        for path, calls in self._inner.items():
            for count, each in enumerate(calls):
                if each is call:
                    return path, count
        return None

    def compare(self, stage: Stage) -> Report:
        """Compares the two functions operator by operator."""
        call = self._call.matched_call.reference[0]
        module, tensors = isolate(
            self._reference.module, self._path, call, self._inner, _picker(self._right)
        )
        function = self._call.as_function()
        pick = _picker(self._own)

        def candidate(parameters: Any, inputs: Any, given: Any, integers: Any) -> Any:
            return pick(*function(parameters, inputs, given, integers))

        arrays = function.cast(
            (function.call.inputs, function.given, [np.asarray(x) for x in function.call.integers])
        )
        return compare_graphs(
            module, (candidate, function.own), tensors, list(arrays), stage == "backward"
        )


def _picker(places: Sequence[Place]) -> Any:
    """Returns what picks results from outputs and from what entered submodules."""

    def pick(outputs: Sequence[Any], entered: Mapping[str, Sequence[Sequence[Any]]]) -> list[Any]:
        return [
            outputs[place[0]] if len(place) == 1 else entered[place[0]][place[1]][place[2]]
            for place in places
        ]

    return pick
