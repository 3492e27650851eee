"""The lines of code behind a bug: one pair of modules, isolated, compared operator by operator.

Both modules are given what entered the reference's, and their submodules return what the
reference's returned, so the operators that differ are their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxformer.parity.comparison.isolated_calls import IsolatedCall
from jaxformer.parity.comparison.teacher_forcing import TeacherForcedRunner
from jaxformer.parity.comparison.verdicts import arithmetic_stage
from jaxformer.parity.graphs.compare import compare_graphs
from jaxformer.parity.graphs.recording.tracing import narrow_casts
from jaxformer.parity.matching.calls import calls_inside
from jaxformer.parity.matching.modules import Pair, PairKey
from jaxformer.parity.report.model import Node, RootCause, Stage
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import one_line
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
    if len(pair.candidate) + len(pair.reference) > 2:
        return "several modules do the work of one"
    why = "it was not run by itself"
    for number in range(min(MOST_CALLS, len(runner.matched_calls[pair.candidate]))):
        call = runner.isolate(pair, number, 0)
        try:
            report = _Isolated(reference, pair, call).compare(stage)
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
        for source, dtype in narrow_casts(call.as_function().jaxpr):
            text = f"the candidate rounds to {dtype}; the reference does not"
            return RootCause(source, diagnosis=text, jax_operators=("convert_element_type",))
        why = "its operators give what the reference's give, on the same inputs"
    return why


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
