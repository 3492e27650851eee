"""The lines of code behind a bug: one pair of modules, isolated, compared operator by operator.

Both modules are given what entered the reference's, and their submodules return what the
reference's returned, so the operators that differ are their own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxformer.parity.comparison.operators import compare_operators
from jaxformer.parity.findings import Node, RootCause, Stage
from jaxformer.parity.judging.verdicts import arithmetic_stage
from jaxformer.parity.matching.pairs import Pair, PairKey
from jaxformer.parity.recording.operators.tracing import narrow_casts
from jaxformer.parity.report.text import one_line
from jaxformer.parity.segments.calls.pair_functions import PairFunctions
from jaxformer.parity.segments.calls.teacher_forcing import TeacherForcedRunner

# Calls of a pair that are tried, from the first one on, until one of them shows the bug.
MOST_CALLS = 3


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
    gradients = runner.gradients
    if stage == "backward" and gradients is not None and pair.candidate in gradients.derived:
        # As an input of its own it would have a gradient that the candidate's has not.
        return "a submodule of the reference has a second result, made of the one that is compared"
    why = "it was not run by itself"
    for number in range(min(MOST_CALLS, len(runner.matched_calls[pair.candidate]))):
        calls = [runner.isolate(pair, number, place) for place in range(len(pair.candidate))]
        try:
            made = PairFunctions(reference.module, pair, calls).make()
            report = compare_operators(
                made.reference, made.candidate, made.inputs, made.jax_inputs,
                stage == "backward", made.line_that_reads,
            )  # fmt: skip
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
