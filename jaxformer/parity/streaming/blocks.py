"""What is found of one block: its nodes, its masks, and the lines of code of its bugs."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.parity.comparison.code_lines import find_lines
from jaxformer.parity.findings import Difference, Node, RootCause
from jaxformer.parity.judging.pair_coverage import Called
from jaxformer.parity.judging.pair_nodes import PairNodes, in_context
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.judging.weights import compare_weight, weight_difference
from jaxformer.parity.matching.calls.masks import MaskState
from jaxformer.parity.matching.pairs import Pair, PairKey, in_call_order
from jaxformer.parity.recording.calls import jax_trace
from jaxformer.parity.recording.calls.torch_trace import TorchCall, Trace
from jaxformer.parity.report.report import Report
from jaxformer.parity.segments.calls.reference_gradients import ReferenceGradients
from jaxformer.parity.segments.calls.teacher_forcing import TeacherForcedRunner
from jaxformer.parity.streaming.candidate_side import EmptyCandidate, Tensors
from jaxformer.parity.streaming.layout import Layout, is_within
from jaxformer.parity.streaming.reference_side import ReferencePass
from jaxformer.parity.streaming.state import State
from jaxformer.porting.mapping.rules import Link
from jaxformer.porting.mapping.transfer import read_view


@dataclasses.dataclass(frozen=True)
class Sides:
    """Both models, after their forward passes.

    Attributes:
        layout: their parts.
        links: which arrays of both sides hold the same numbers.
        skeleton: the candidate, with shapes in place of weights.
        own: the candidate's arrays, by name.
        wanted: the reference's arrays, by the same names and in the same layout.
        reference: its pass in float64.
        candidate: the model in float64.
        calls: the candidate's, around the blocks.
        low: the same three in the dtype under test; None if that is float64.
        dtype: under test.
        backward: whether gradients are compared.
        tables: nodes of tables of positions.
    """

    layout: Layout
    links: Sequence[Link]
    skeleton: Any
    own: Tensors
    wanted: Tensors
    reference: ReferencePass
    candidate: EmptyCandidate
    calls: Mapping[str, jax_trace.JaxCall]
    low: tuple[ReferencePass, EmptyCandidate, Mapping[str, jax_trace.JaxCall]] | None
    dtype: str
    backward: bool
    tables: Sequence[Node]

    def nodes_of(self, weights: Mapping[str, Difference]) -> PairNodes:
        """Returns what makes nodes, given the differences of their weights."""
        modules = self.reference.modules
        return PairNodes(self.skeleton, modules, self.layout.parents, weights, self.dtype)

    def gradients_of(self, trace: Trace) -> ReferenceGradients | None:
        """Returns the reference's gradients of recorded calls, if they are compared."""
        reference = self.reference
        if not self.backward:
            return None
        return ReferenceGradients(reference.module, reference.modules, trace, self.links)

    def compare_weights(
        self, pairs: Sequence[Pair]
    ) -> tuple[dict[str, Difference], dict[str, str]]:
        """Returns the differences of the weights of pairs, and what the wrong ones look like."""
        differences: dict[str, Difference] = {}
        looks: dict[str, str] = {}
        for name in dict.fromkeys(name for pair in pairs for name in pair.parameters):
            own, wanted = read_view(self.own[name]), read_view(self.wanted[name])
            if own.flags.f_contiguous and wanted.flags.f_contiguous:
                # Both are transposed views: as they lie in memory they are compared faster.
                difference = weight_difference(own.T, wanted.T)
                if not difference.is_bug:
                    differences[name] = difference
                    continue
            own, wanted = np.ascontiguousarray(own), np.ascontiguousarray(wanted)
            differences[name], look = compare_weight(name, own, wanted)
            if look is not None:
                looks[name] = look
        return differences, looks


@dataclasses.dataclass(frozen=True)
class BlockResult:
    """What was found of one block.

    Attributes:
        nodes: not judged yet, in the order of calls.
        looks: what its wrong weights look like, by name.
        masks: the reference's, of each call of the block.
        count: how many calls of the reference are inside it.
        causes: the lines of code of its bugs.
        remarks: what else is to be said of it.
        called: which modules in it were called.
    """

    nodes: dict[PairKey, Node]
    looks: dict[str, str]
    masks: list[Mapping[str, MaskState]]
    count: int
    causes: tuple[RootCause, ...] = ()
    remarks: tuple[str, ...] = ()
    called: Called = dataclasses.field(default_factory=Called)

    def save(self, state: State, name: str) -> None:
        """Keeps what was found."""
        arrays: list[np.ndarray] = []

        def place(array: np.ndarray) -> int:
            arrays.append(np.ascontiguousarray(array))
            return len(arrays) - 1

        notes = {
            "report": Report("", "", tuple(self.nodes.values()), causes=self.causes).to_json(),
            "keys": list(self.nodes),
            "looks": self.looks,
            "masks": [{name: place(a) for name, a in states.items()} for states in self.masks],
            "count": self.count,
            "remarks": self.remarks,
            "called": [sorted(self.called.reference), sorted(self.called.candidate)],
        }
        state.save(name, arrays, notes)

    @classmethod
    def load(cls, state: State, name: str) -> "BlockResult | None":
        """Returns what was found before; None if there is nothing."""
        known = state.load(name)
        if known is None:
            return None
        arrays, notes = known
        report = Report.from_dict(json.loads(notes["report"]))
        return cls(
            dict(zip(map(tuple, notes["keys"]), report.nodes, strict=True)),
            notes["looks"],
            [{name: arrays[n] for name, n in states.items()} for states in notes["masks"]],
            notes["count"],
            report.causes,
            tuple(notes["remarks"]),
            Called(*notes["called"]),
        )


def orders_of(calls: Mapping[str, Any]) -> dict[str, int]:
    """Returns the place of the first call of each module, by path."""
    return {path: call.order for path, call in calls.items()}


def compare_block(sides: Sides, path: str) -> BlockResult:
    """Compares one block.

    Args:
        sides: both models.
        path: of the block in the candidate.
    """
    pairs = sides.layout.pairs_of(path)
    unit = sides.layout.units[path].reference[0]
    weights, looks = sides.compare_weights(pairs)
    low_calls: dict[str, jax_trace.JaxCall] = {}
    reference_low: dict[str, TorchCall] = {}
    if sides.low is not None:
        reference, candidate, calls = sides.low
        reference_low = reference.run_unit(unit).calls
        with jax.enable_x64(False), candidate.loaded(path, sides.own, sides.dtype):
            low_calls = candidate.run_unit(path, calls[path], sides.dtype)
    trace = sides.reference.run_unit(unit)
    count = sum(len(call.all) for call in trace.calls.values()) - 1
    parents = sides.layout.inner_parents(pairs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(sides.candidate.loaded(path, sides.own, "float64"))
        inner = sides.candidate.run_unit(path, sides.calls[path], "float64")
        if any(difference.error for difference in weights.values()):
            stack.close()
            stack.enter_context(sides.candidate.loaded(path, sides.wanted, "float64"))
        stack.enter_context(sides.reference.loaded(unit))
        runner = TeacherForcedRunner(
            sides.candidate.module, inner, trace, pairs, parents, sides.gradients_of(trace)
        )
        tables = [table for table in sides.tables if is_within(table.path, path)]
        maker = sides.nodes_of(weights)
        contexts = maker.contexts(runner, lambda: low_calls, lambda: reference_low)
        ordered = in_call_order(pairs, parents, *map(orders_of, (inner, trace.calls)))
        nodes = in_context(maker.compare(runner, ordered, trace, tables), contexts)
        judged = {key: judge_node(node) for key, node in nodes.items()}
        lines = find_lines(sides.reference, runner, pairs, judged)
    masks: list[Mapping[str, MaskState]] = [*runner.masks.get((path,), [])]
    remarks = [*lines.remarks]
    if runner.gradients is not None:
        remarks += runner.gradients.remarks()
    called = Called(trace.called, inner.keys())
    return BlockResult(nodes, looks, masks, count, lines.causes, tuple(remarks), called)
