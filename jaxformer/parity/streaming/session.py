"""A whole comparison block by block, from two open checkpoints to the report."""

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.query_blocks import large_query_blocks
from jaxformer.parity.comparison.parts import Found
from jaxformer.parity.diagnosis.settings import compare_settings, name_causes, precision_flags
from jaxformer.parity.findings import Node
from jaxformer.parity.judging.coverage import CountedOperators
from jaxformer.parity.judging.pair_coverage import (
    Called,
    find_unreached,
    linked_parameters,
    measure_pair_coverage,
)
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.judging.weights import (
    describe_places,
    describe_wrong_weights,
    find_swapped_layers,
)
from jaxformer.parity.matching.pairs import PairKey
from jaxformer.parity.matching.positions import match_alibi_slopes, share_tables
from jaxformer.parity.report.report import Report
from jaxformer.parity.sources.checkpoints import Source
from jaxformer.parity.streaming.around import Around
from jaxformer.parity.streaming.blocks import BlockResult, Sides, compare_block
from jaxformer.parity.streaming.candidate_side import EmptyCandidate
from jaxformer.parity.streaming.empty_reference import EmptyReference
from jaxformer.parity.streaming.layout import Layout
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
        with (
            match_alibi_slopes(self.empty.module),
            large_query_blocks(),
            attention_kernel("plain"),
        ):
            return self._report()

    def _report(self) -> Report:
        settings = precision_flags()
        plans = [source.plan for source in self.sources]
        settings = compare_settings(plans[1].module, plans[0].module) + settings
        sides = self._run_forward()
        results = self._compare_blocks(sides)
        around = Around(sides, self.inputs, self.calls, {p: r.found for p, r in results.items()})
        outer, looks = around.compare()
        heads = {}
        for path in self.layout.heads:
            heads[path], more = around.compare_head(path)
            looks |= more
        for result in results.values():
            looks |= result.looks
        wrong = describe_places(looks, sides.own, sides.wanted)
        parameters = {pair.candidate: pair.parameters for pair in self.layout.pairs}
        ordered = self._in_order(outer.nodes, results, heads)
        judged = {
            key: judge_node(
                dataclasses.replace(node, order=place),
                describe_wrong_weights(wrong, parameters.get(key, ()), node.path),
            )
            for place, (key, node) in enumerate(ordered.items())
        }
        parts = [outer, *(result.found for result in results.values()), *heads.values()]
        called = Called()
        for part in parts:
            called |= part.called
        self._advance()
        return Report(
            "grad" if self.backward else "forward",
            self.dtype,
            tuple(name_causes(list(judged.values()), settings)),
            tuple(settings),
            remarks=(
                *dict.fromkeys(remark for part in parts for remark in part.remarks),
                *find_swapped_layers(wrong),
            ),
            causes=tuple(cause for part in parts for cause in part.causes),
            incomplete=(
                *find_unreached(self.layout.pairs, called, sides.own, plans[1].module),
                *(sentence for part in parts for sentence in part.incomplete),
            ),
            coverage=measure_pair_coverage(
                self.layout.pairs,
                judged,
                called,
                sides.own,
                (sum(map(len, parameters.values())),) * 2,
                linked_parameters(self.empty.module, sides.links),
                sum((part.operators for part in parts), CountedOperators()),
                self.backward,
            ),
        )

    def _run_forward(self) -> Sides:
        """Runs both models forward; what blocks were given is kept."""
        rows = np.unique(np.concatenate([x.reshape(-1) for x in self.inputs]))
        plans = [source.plan for source in self.sources]
        skeleton, own = plans[1].module, plans[1].tensors

        def run_reference(dtype: str) -> ReferencePass:
            made = ReferencePass(
                self.empty, self.layout, rows, dtype, state=self.state, progress=self._advance
            )
            made.run(self.inputs, self.calls[0])
            return made

        def run_candidate(candidate: EmptyCandidate, dtype: str) -> EmptyCandidate:
            candidate.run(
                self.inputs, self.calls[1], own, dtype, state=self.state, progress=self._advance
            )
            return candidate

        reference = run_reference("float64")
        candidate = EmptyCandidate(skeleton, self.layout, rows)
        tables = share_tables(candidate.module, reference.module, reference.tables)
        run_candidate(candidate, "float64")
        low = None
        if self.dtype != "float64":
            reference_low = run_reference(self.dtype)
            with jax.enable_x64(False):
                candidate_low = EmptyCandidate(skeleton, self.layout, rows)
                low = reference_low, run_candidate(candidate_low, self.dtype)
        return Sides(
            self.layout, plans[0].links, skeleton, own, plans[0].tensors, reference, candidate,
            low, self.dtype, self.backward, tables,
        )  # fmt: skip

    def _compare_blocks(self, sides: Sides) -> dict[str, BlockResult]:
        """Compares the blocks, from the last one to the first."""
        called = [*sides.reference.given]
        paths = [self.layout.unit_references[u] for u in called if u in self.layout.unit_references]
        uncalled = sorted(set(self.layout.units) - set(paths))
        if uncalled:
            raise UsageError(f"the reference does not call {', '.join(uncalled)}")
        results = {}
        for path in reversed(paths):
            name = f"{path}.found"
            result = BlockResult.load(self.state, name) if self.state else None
            if result is None:
                result = compare_block(sides, path)
                # Operators and values, which refer to each other.
                gc.collect()
                if self.state:
                    result.save(self.state, name)
            results[path] = result
            self._advance()
        return results

    def _in_order(
        self,
        outer: Mapping[PairKey, Node],
        results: Mapping[str, BlockResult],
        heads: Mapping[str, Found],
    ) -> dict[PairKey, Node]:
        """Returns all nodes in the order of calls, as if the models had run whole."""
        nodes: dict[PairKey, Node] = {}
        for key, node in outer.items():
            if node.path in results:
                nodes |= results[node.path].found.nodes
            elif node.path in heads:
                nodes |= heads[node.path].nodes
            else:
                nodes[key] = node
        return nodes
