"""Makes the node of each pair of modules from what was recorded of both sides."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxformer.parity.findings import Difference, Node
from jaxformer.parity.judging.context import (
    measure_candidate_rounding,
    measure_in_context,
    measure_reference_rounding,
)
from jaxformer.parity.judging.verdicts import explain, last_right_input, worst_difference
from jaxformer.parity.matching.pairs import Pair, PairKey, depth_of
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.memory import LARGE
from jaxformer.parity.segments.calls.teacher_forcing import PairDifferences, TeacherForcedRunner
from jaxformer.porting.mapping.abstract_modules import parameter_shapes


@dataclasses.dataclass(frozen=True)
class PairNodes:
    """Makes nodes of pairs whose calls were recorded: of the whole models, or of a part.

    Attributes:
        module: the candidate; only its classes and the sizes of its parameters are read.
        reference_modules: all modules of the reference, by path.
        parents: the pair around each pair, in the whole models.
        weights: differences of parameters, by name.
        dtype: under test.
    """

    module: Any
    reference_modules: Mapping[str, Any]
    parents: Mapping[PairKey, PairKey | None]
    weights: Mapping[str, Difference]
    dtype: str

    def compare(
        self,
        runner: TeacherForcedRunner,
        pairs: Sequence[Pair],
        reference: torch_trace.Trace,
        tables: Iterable[Node] = (),
        *,
        run: Callable[[Pair], PairDifferences] | None = None,
        after: Callable[[Pair, Node | None], None] = lambda pair, node: None,
    ) -> dict[PairKey, Node]:
        """Returns a node for every pair, in the given order, and each table after its user.

        Args:
            runner: runs pairs isolated.
            pairs: in the order of calls.
            reference: the pass of the reference.
            tables: nodes of tables of positions.
            run: in place of the runner's own ``run``.
            after: called once a pair is compared, with its node if it has one.
        """
        sizes = {n: math.prod(shape) for n, shape in parameter_shapes(self.module).items()}

        def is_heavy(pair: Pair) -> bool:
            size = sum(sizes[name] for name in pair.parameters)
            return size > LARGE and not runner.inner_pairs.get(pair.candidate)

        found = {}
        # The heaviest last, when what was recorded of all others has been freed.
        for pair in sorted(pairs, key=is_heavy):
            unmatched = runner.unmatched.get(pair.candidate)
            if unmatched is None or not unmatched.is_uncalled or pair.parameters:
                found[pair.candidate] = self._compare_pair(
                    pair, runner, reference.calls, run or runner.run
                )
            after(pair, found.get(pair.candidate))
        nodes = {}
        for pair in pairs:
            if pair.candidate in found:
                nodes[pair.candidate] = found[pair.candidate]
                for table in tables:
                    if (table.path.rpartition(".")[0],) == pair.candidate:
                        nodes[(table.path,)] = table
        return nodes

    def _compare_pair(
        self,
        pair: Pair,
        runner: TeacherForcedRunner,
        calls: Mapping[str, torch_trace.TorchCall],
        run: Callable[[Pair], PairDifferences],
    ) -> Node:
        kind = type(jax_modules.resolve(self.module, pair.candidate[0])[0]).__name__
        node = Node(
            pair.path,
            pair.reference_path,
            kind if len(pair.candidate) == 1 else f"{len(pair.candidate)} {kind}",
            type(self.reference_modules[pair.reference[0]]).__name__,
            depth_of(pair, self.parents),
            min((calls[path].order for path in pair.reference if path in calls), default=0),
            parameters={n: self.weights[n] for n in pair.parameters if n in self.weights},
        )
        unmatched = runner.unmatched.get(pair.candidate)
        if unmatched is not None:
            return dataclasses.replace(node, message=unmatched.message)
        differences = run(pair)
        return dataclasses.replace(
            node,
            forward=worst_difference(difference for _, difference in differences.forward),
            message=explain(differences.forward, list(differences.backward.items())),
            backward=differences.backward,
            wrong_after=last_right_input(differences.forward),
        )

    def contexts(
        self,
        runner: TeacherForcedRunner,
        run_low: Callable[[], Mapping[str, jax_trace.JaxCall]],
        run_reference_low: Callable[[], Mapping[str, torch_trace.TorchCall]],
    ) -> dict[PairKey, dict[str, Any]]:
        """Returns the fields of nodes that were measured inside the whole models.

        Args:
            runner: knows the calls in float64.
            run_low: returns the candidate's calls in the dtype under test, if that is another.
            run_reference_low: returns the reference's. One side is in memory at a time.
        """
        first = {key: matched[0] for key, matched in runner.matched_calls.items() if matched}
        padding = runner.padding
        found = {key: measure_in_context(call, padding) for key, call in first.items()}
        if self.dtype == "float64":
            return found
        low = run_low()
        rounded = {
            key: measure_candidate_rounding(
                call, [low[path] for path in key], self.dtype, padding
            )
            for key, call in first.items()
            if all(path in low and low[path].outputs for path in key)
        }  # fmt: skip
        del low
        reference_low = run_reference_low()
        for key, each in rounded.items():
            paths = first[key].pair.reference
            if not all(path in reference_low for path in paths):
                continue
            reference = [reference_low[path] for path in paths]
            found[key]["in_context"] = dataclasses.replace(
                found[key]["in_context"],
                candidate_rounding=each["rounding"],
                reference_rounding=measure_reference_rounding(first[key], reference, padding),
                ulps=each["ulps"],
            )
            found[key]["condition"] = each.get("condition")
        return found


def in_context(
    nodes: Mapping[PairKey, Node], contexts: Mapping[PairKey, Mapping[str, Any]]
) -> dict[PairKey, Node]:
    """Returns the nodes with what was measured inside the whole models."""
    return {key: dataclasses.replace(node, **contexts.get(key, {})) for key, node in nodes.items()}
