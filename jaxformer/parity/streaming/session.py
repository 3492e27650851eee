"""A whole comparison block by block, from two open checkpoints to the report."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.execution.query_blocks import large_query_blocks
from jaxformer.parity.diagnosis.settings import compare_settings, name_causes, precision_flags
from jaxformer.parity.findings import Node
from jaxformer.parity.judging.pair_coverage import (
    Called,
    find_unreached,
    linked_parameters,
    measure_pair_coverage,
)
from jaxformer.parity.judging.pair_nodes import in_context
from jaxformer.parity.judging.verdicts import arithmetic_stage, judge_node
from jaxformer.parity.judging.weights import (
    describe_places,
    describe_wrong_weights,
    find_swapped_layers,
)
from jaxformer.parity.matching.pairs import Pair, PairKey, in_call_order
from jaxformer.parity.matching.positions import made_in, match_alibi_slopes, share_tables
from jaxformer.parity.recording.calls import jax_trace
from jaxformer.parity.report.report import Report
from jaxformer.parity.segments.calls.products import compare_product
from jaxformer.parity.segments.calls.teacher_forcing import PairDifferences, TeacherForcedRunner
from jaxformer.parity.sources.checkpoints import Source
from jaxformer.parity.streaming.blocks import BlockResult, Sides, compare_block, orders_of
from jaxformer.parity.streaming.candidate_side import EmptyCandidate
from jaxformer.parity.streaming.empty_reference import EmptyReference
from jaxformer.parity.streaming.layout import Layout
from jaxformer.parity.streaming.products import arrays_of
from jaxformer.parity.streaming.reference_side import ReferencePass
from jaxformer.parity.streaming.state import State

# Called with the number of finished parts, and of all.
Progress = Callable[[int, int], None]
Call = Callable[[Any, Any], Any]


class StreamedComparison:
    """Two checkpoints and their inputs, to be compared block by block.

    Args:
        empty: the reference without its weights.
        reference: its checkpoint.
        candidate: the candidate's checkpoint.
        layout: the parts of both.
        inputs: token ids.
        torch_call: how to call the reference.
        jax_call: how to call the candidate.
        backward: whether to compare gradients too.
        dtype: whose rounding is reported.
        state: keeps what was found, so that the comparison can be resumed.
        progress: called after each part.
    """

    def __init__(
        self,
        empty: EmptyReference,
        reference: Source,
        candidate: Source,
        layout: Layout,
        inputs: Sequence[np.ndarray],
        *,
        torch_call: Call,
        jax_call: Call,
        backward: bool,
        dtype: str,
        state: State | None = None,
        progress: Progress = lambda done, total: None,
    ):
        self.empty, self.sources, self.layout = empty, (reference, candidate), layout
        self.inputs, self.calls = inputs, (torch_call, jax_call)
        self.backward, self.dtype, self.state = backward, dtype, state
        self.progress = progress
        self.done = 0

    def _advance(self) -> None:
        self.done += 1
        passes = 2 if self.dtype == "float64" else 4
        self.progress(self.done, len(self.layout.units) * (passes + 1) + 1)

    def report(self) -> Report:
        """Runs both sides and returns what was found."""
        with match_alibi_slopes(self.empty.module), large_query_blocks():
            return self._report()

    def _report(self) -> Report:
        settings = precision_flags()
        plans = [source.plan for source in self.sources]
        settings = compare_settings(plans[1].module, plans[0].module) + settings
        sides = self._run_forward()
        results = self._compare_blocks(sides)
        outer, looks, said = self._compare_outside(sides, results)
        for result in results.values():
            looks |= result.looks
        wrong = describe_places(looks, sides.own, sides.wanted)
        parameters = {pair.candidate: pair.parameters for pair in self.layout.pairs}
        ordered = self._in_order(sides, results, outer)
        judged = [
            judge_node(
                node, describe_wrong_weights(wrong, parameters.get(key, ()), node.path)
            )
            for key, node in ordered.items()
        ]  # fmt: skip
        around = [
            node.path or "the model"
            for key, node in zip(ordered, judged, strict=True)
            if key in outer and node.is_root_cause and arithmetic_stage(node)
        ]
        if around:
            said.append(
                f"no lines of code of {', '.join(around)}: only blocks are compared operator by "
                "operator where models are read block by block"
            )
        said += [remark for result in results.values() for remark in result.remarks]
        remarks = [*said, *find_swapped_layers(wrong)]
        called = Called(sides.reference.trace.called, sides.calls)
        for result in results.values():
            called |= result.called
        self._advance()
        return Report(
            "grad" if self.backward else "forward",
            self.dtype,
            tuple(name_causes(judged, settings)),
            tuple(settings),
            remarks=tuple(remarks),
            causes=tuple(cause for result in results.values() for cause in result.causes),
            incomplete=tuple(find_unreached(self.layout.pairs, called, sides.own, plans[1].module)),
            coverage=measure_pair_coverage(
                self.layout.pairs,
                dict(zip(ordered, judged, strict=True)),
                called,
                sides.own,
                (sum(map(len, parameters.values())),) * 2,
                linked_parameters(self.empty.module, sides.links),
                self.backward,
            ),
        )

    def _run_forward(self) -> Sides:
        """Runs both models forward, and keeps what is around the blocks."""
        rows = np.unique(np.concatenate([x.reshape(-1) for x in self.inputs]))
        plans = [source.plan for source in self.sources]
        skeleton, own = plans[1].module, plans[1].tensors

        def run_reference(dtype: str) -> ReferencePass:
            made = ReferencePass(
                self.empty, self.layout, rows, dtype, state=self.state, progress=self._advance
            )
            made.run(self.inputs, self.calls[0])
            return made

        def run_candidate(candidate: EmptyCandidate, dtype: str) -> Mapping[str, jax_trace.JaxCall]:
            return candidate.run(
                self.inputs, self.calls[1], own, dtype, state=self.state, progress=self._advance
            )

        reference = run_reference("float64")
        candidate = EmptyCandidate(skeleton, self.layout, rows)
        tables = share_tables(candidate.module, reference.module, made_in(reference.trace))
        calls = run_candidate(candidate, "float64")
        low = None
        if self.dtype != "float64":
            reference_low = run_reference(self.dtype)
            with jax.enable_x64(False):
                candidate_low = EmptyCandidate(skeleton, self.layout, rows)
                low = reference_low, candidate_low, run_candidate(candidate_low, self.dtype)
        return Sides(
            self.layout, plans[0].links, skeleton, own, plans[0].tensors, reference, candidate,
            calls, low, self.dtype, self.backward, tables,
        )  # fmt: skip

    def _compare_blocks(self, sides: Sides) -> dict[str, BlockResult]:
        """Compares the blocks, from the last one to the first."""
        calls = sides.reference.trace.calls
        called = [path for unit, path in self.layout.unit_references.items() if unit in calls]
        uncalled = sorted(set(self.layout.units) - set(called))
        if uncalled:
            raise UsageError(f"the reference does not call {', '.join(uncalled)}")
        results = {}
        for path in sorted(
            called, key=lambda path: -calls[self.layout.units[path].reference[0]].order
        ):
            name = f"{path}.found"
            result = BlockResult.load(self.state, name) if self.state else None
            if result is None:
                result = compare_block(sides, path)
                if self.state:
                    result.save(self.state, name)
            results[path] = result
            self._advance()
        return results

    def _compare_outside(
        self, sides: Sides, results: Mapping[str, BlockResult]
    ) -> tuple[dict[PairKey, Node], dict[str, str], list[str]]:
        """Compares what is around the blocks, which return what the reference's returned."""
        trace = sides.reference.trace
        pairs = self.layout.outer_pairs()
        judged = [pair for pair in pairs if pair.path not in self.layout.units]
        weights, looks = sides.compare_weights(judged)
        sides.candidate.load_around(sides.wanted, "float64")
        runner = TeacherForcedRunner(
            sides.candidate.module, sides.calls, trace, pairs, self.layout.inner_parents(pairs),
            sides.gradients_of(trace),
        )  # fmt: skip
        runner.masks |= {(path,): [dict(m) for m in r.masks] for path, r in results.items()}
        whole = ("",)
        if whole in runner.unmatched:
            raise UsageError(f"the models cannot be compared: {runner.unmatched[whole].message}")

        def run(pair: Pair) -> PairDifferences:
            if pair.candidate[0] not in self.layout.heads:
                return runner.run(pair)
            reference = sides.reference
            path = pair.reference[0]
            arrays = arrays_of(pair.candidate[0].removesuffix(".attend"), sides.wanted)
            return compare_product(
                pair, runner, arrays, reference.modules[path],
                reference.read_head(path.removesuffix(".attend")), reference.to_tensor,
            )  # fmt: skip

        maker = sides.nodes_of(weights)
        tables = [table for table in sides.tables if not self.layout.is_inner(table.path)]
        ordered = in_call_order(
            judged, self.layout.parents, *map(orders_of, (sides.calls, trace.calls))
        )
        low = sides.low
        contexts = maker.contexts(
            runner,
            lambda: {} if low is None else low[2],
            lambda: {} if low is None else low[0].trace.calls,
        )
        nodes = in_context(maker.compare(runner, ordered, trace, tables, run=run), contexts)
        remarks = [*runner.gradients.remarks()] if runner.gradients is not None else []
        return nodes, looks, remarks

    def _in_order(
        self,
        sides: Sides,
        results: Mapping[str, BlockResult],
        outer: Mapping[PairKey, Node],
    ) -> dict[PairKey, Node]:
        """Returns all nodes in the order of calls, as if the models had run whole."""
        calls = sides.reference.trace.calls
        counts = {
            calls[self.layout.units[path].reference[0]].order: result.count
            for path, result in results.items()
        }

        def place(order: int) -> int:
            return order + sum(count for start, count in counts.items() if start < order)

        tables = {table.path for table in sides.tables}
        pairs = self.layout.outer_pairs()
        nodes: dict[PairKey, Node] = {}
        rest = dict(outer)
        for pair in in_call_order(
            pairs, self.layout.parents, *map(orders_of, (sides.calls, calls))
        ):
            if pair.path in results:
                start = place(calls[pair.reference[0]].order)
                for key, node in results[pair.path].nodes.items():
                    order = place(node.order) if node.path in tables else start + node.order
                    nodes[key] = dataclasses.replace(node, order=order)
            elif pair.candidate in rest:
                # Tables of positions follow the module that uses them.
                for key in _with_tables(pair.candidate, rest, tables):
                    node = rest.pop(key)
                    nodes[key] = dataclasses.replace(node, order=place(node.order))
        return nodes


def _with_tables(first: PairKey, nodes: Mapping[PairKey, Node], tables: set[str]) -> list[PairKey]:
    """Returns a key, and those of the tables that come right after it."""
    keys = list(nodes)
    found = [first]
    for key in keys[keys.index(first) + 1 :]:
        if nodes[key].path not in tables:
            break
        found.append(key)
    return found
