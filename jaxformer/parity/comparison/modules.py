"""Compares two models module by module: every pair isolated, on equal inputs, in float64.

Each candidate module is run on the reference's inputs, with the reference's weights, and its
submodules return the reference's outputs. So only the module's own arithmetic is judged: an early
error hides no later one, and a bug shows in the module that has it and in none around it. Weights
are compared separately.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.execution.query_blocks import large_query_blocks
from jaxformer.parity.comparison.code_lines import find_lines
from jaxformer.parity.comparison.reference_run import Caller, ReferenceRun
from jaxformer.parity.diagnosis.settings import compare_settings, name_causes, precision_flags
from jaxformer.parity.findings import Node
from jaxformer.parity.judging.pair_coverage import (
    Called,
    find_unreached,
    linked_parameters,
    measure_pair_coverage,
)
from jaxformer.parity.judging.pair_nodes import PairNodes, in_context
from jaxformer.parity.judging.verdicts import arithmetic_stage, judge_node
from jaxformer.parity.judging.weights import (
    compare_weights,
    describe_wrong_weights,
    find_swapped_layers,
)
from jaxformer.parity.matching.calls.pairs import Pair, in_call_order, parents_of
from jaxformer.parity.matching.calls.positions import (
    match_alibi_slopes,
    position_ids_from_mask,
    share_tables,
)
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.whole_models import call_candidate
from jaxformer.parity.recording.memory import LARGE, release
from jaxformer.parity.recording.operators.evaluation import evaluator_of
from jaxformer.parity.recording.operators.failures import naming_failures
from jaxformer.parity.recording.operators.signatures import UNKNOWN_NUMBERS
from jaxformer.parity.report.report import Report
from jaxformer.parity.segments.calls.products import compare_held_product, is_large_product
from jaxformer.parity.segments.calls.reference_gradients import ReferenceGradients
from jaxformer.parity.segments.calls.teacher_forcing import PairDifferences, TeacherForcedRunner


def compare(
    torch_module: Any,
    jax_module: Any = None,
    inputs: Sequence[Any] = (),
    *,
    jax_inputs: Sequence[Any] | None = None,
    dialect: str | None = None,
    force: bool = False,
    backward: bool = True,
    dtype: str | None = None,
    torch_call: Caller | None = None,
    jax_call: Caller | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Runs two models on the same inputs and judges every pair of modules separately.

    Args:
        torch_module: the reference; it is not changed.
        jax_module: the candidate, one of jaxformer's own modules; it is not changed. Default: what
            ``from_torch`` makes of the reference.
        inputs: positional arguments of the reference: numpy arrays, tensors, None.
        jax_inputs: those of the candidate, where they differ (masks of another convention);
            default the same.
        dialect: the name of the reference's dialect; default found by its class.
        force: whether the dialect may contradict the reference's config.
        backward: whether to compare gradients too.
        dtype: the dtype whose rounding is reported; default that of the candidate's weights.
        torch_call: how to call the reference, given it and its inputs.
        jax_call: how to call the candidate.
        about: notes for the report.

    Raises:
        UsageError: torch is missing, the models do not fit one another, or no dialect knows the
            reference.
        CheckpointError: the reference's arrays are not those of the dialect; all are listed.
    """
    with jax.enable_x64(True):
        reference = ReferenceRun(
            torch_module, inputs, dialect=dialect, backward=backward,
            call=torch_call, config=jax_module, is_single_use=True, force=force,
        )  # fmt: skip
        if jax_module is None:
            jax_module = reference.port()
        return compare_with(
            reference, jax_module, inputs if jax_inputs is None else jax_inputs,
            dtype=dtype, call=jax_call, about=about,
        )  # fmt: skip


def compare_with(
    reference: ReferenceRun,
    jax_module: Any,
    inputs: Sequence[Any] | None = None,
    *,
    dtype: str | None = None,
    call: Caller | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Compares a candidate with a reference that may have been run already.

    Use it under ``jax.enable_x64(True)``. For the other arguments see ``compare``.

    Args:
        reference: the reference.
        jax_module: the candidate.
        inputs: of the candidate; default those of the reference.
        dtype: the dtype whose rounding is reported.
        call: how to call the candidate.
        about: notes for the report.
    """
    return ModuleComparison(
        reference,
        jax_module,
        reference.inputs if inputs is None else inputs,
        dtype or jax_trace.dtype_of(jax_module),
        call,
    ).report(about or {})


class ModuleComparison:
    """One candidate beside the reference. Arguments as in ``compare_with``."""

    def __init__(
        self,
        reference: ReferenceRun,
        jax_module: Any,
        inputs: Sequence[Any],
        dtype: str,
        call: Caller | None,
    ):
        self.reference, self.module = reference, jax_module
        self.inputs = [torch_trace.as_numpy(x) for x in inputs]
        self.dtype, self.call = dtype, call
        # The argument ``positions``, where padding changes the reference's position ids.
        self.positions: dict[str, np.ndarray] = {}
        self.pairs = reference.pairs_with(jax_module)
        self.parents = parents_of(self.pairs)
        # A reference with names has none, and is compared by its operators.
        assert reference.plan is not None
        self.plan = reference.plan
        self.weights, self.wrong_weights = compare_weights(
            jax_trace.parameters_of(jax_module), self.plan.tensors
        )

    def report(self, about: Mapping[str, Any]) -> Report:
        """Runs both sides and returns what was found."""
        with match_alibi_slopes(self.reference.module), large_query_blocks():
            return self._report(about)

    def _report(self, about: Mapping[str, Any]) -> Report:
        reference = self.reference
        settings = precision_flags()
        if not reference.unsupported_settings:
            settings = compare_settings(self.module, self.plan.module) + settings
        # All weights of a large model in float64 would be the largest thing in memory, so they are
        # cast when they are needed.
        working_dtype = None if reference.size > LARGE else "float64"
        candidate = jax_trace.in_dtype(self.module, working_dtype)
        calls: dict[str, jax_trace.JaxCall] | None = None
        if reference.size > LARGE:
            # Before the reference's values are in memory.
            calls = self._trace(candidate, "float64")
        trace = reference.trace
        tables = share_tables(candidate, reference.module, trace)
        if self.call is None:
            self.positions = position_ids_from_mask(self.module, self.pairs, trace)
        if tables or self.positions:
            # What was recorded without them goes before the next pass.
            calls = None
        if calls is None:
            calls = self._trace(candidate, "float64")
        called_paths = set(calls)
        different = {name for name, difference in self.weights.items() if difference.error}
        if different:
            tensors = self.plan.tensors
            candidate = jax_trace.with_parameters(
                candidate, {n: tensors[n].read() for n in different}
            )
            candidate = jax_trace.in_dtype(candidate, working_dtype)
        links = self.plan.links
        gradients = None
        if reference.backward:
            gradients = ReferenceGradients(reference.wide, reference.modules, trace, links)
        runner = TeacherForcedRunner(candidate, calls, trace, self.pairs, self.parents, gradients)
        whole = ("",)
        if whole in runner.unmatched:
            raise UsageError(
                f"the models cannot be compared: {runner.unmatched[whole].message}; torch_call= "
                "and jax_call= say how each is called, given it and its inputs"
            )
        runner.free_unmatched(calls)
        if reference.is_single_use:
            # The calls have the outputs too, as long as they are needed.
            trace.outputs.clear()
        ordered = in_call_order(self.pairs, self.parents, calls, trace.calls)

        def free(pair: Pair, node: Node | None) -> None:
            if reference.is_single_use:
                runner.free(pair, is_wrong=node is not None and bool(arithmetic_stage(node)))
            # Asking the system each time takes longer than some pairs.
            if pair.candidate in runner.inner_pairs:
                release(reference.size)

        def run(pair: Pair) -> PairDifferences:
            module = reference.modules[pair.reference[0]]
            if is_large_product(pair, runner, module):
                found = compare_held_product(pair, runner, module)
                release(reference.size)
                return found
            return runner.run(pair)

        maker = PairNodes(self.module, reference.modules, self.parents, self.weights, self.dtype)
        contexts = maker.contexts(
            runner, self._low_pass, lambda: reference.low_trace(self.dtype).calls
        )
        release(reference.size)
        nodes = in_context(
            maker.compare(runner, ordered, trace, tables, run=run, after=free), contexts
        )
        own_parameters = {pair.candidate: pair.parameters for pair in self.pairs}
        judged = {
            key: judge_node(
                node,
                describe_wrong_weights(self.wrong_weights, own_parameters.get(key, ()), node.path),
            )
            for key, node in nodes.items()
        }
        lines = find_lines(reference, runner, self.pairs, judged)
        called = Called(trace.called, called_paths)
        own = jax_trace.parameters_of(self.module)
        parameters = (len(self.weights), len(own))
        linked = linked_parameters(reference.module, links)
        return Report(
            "grad" if reference.backward else "forward",
            self.dtype,
            tuple(name_causes(list(judged.values()), settings)),
            tuple(settings),
            about=dict(about),
            remarks=(*self._remarks(runner), *lines.remarks),
            causes=lines.causes,
            incomplete=tuple(find_unreached(self.pairs, called, own, self.module)),
            coverage=measure_pair_coverage(
                self.pairs, judged, called, own, parameters, linked, reference.backward
            ),
        )

    def _remarks(self, runner: TeacherForcedRunner) -> Iterable[str]:
        writers = [pair.path or "the model" for pair in self.pairs if runner.writes(pair)]
        if writers and self.reference.backward:
            yield (
                f"calls of {', '.join(writers)} write to what they are given or to their state: "
                "their own gradients were not compared"
            )
        if self.reference.unsupported_settings:
            yield (
                f"the reference's settings make no JAX model: {self.reference.unsupported_settings}"
            )
        if runner.gradients is not None:
            yield from runner.gradients.remarks()
        if self.positions:
            yield (
                "the reference counts positions by its mask: the candidate was called with the "
                "same positions, and needs them wherever there is padding before a token"
            )
        yield from find_swapped_layers(self.wrong_weights)

    def _trace(self, module: Any, dtype: str) -> dict[str, jax_trace.JaxCall]:
        """Returns the calls of one pass of the candidate."""
        inputs = torch_trace.in_dtype(self.inputs, dtype)
        cast = jax_trace.in_dtype(module, dtype)
        found, _ = jax_trace.trace(
            cast, lambda module: self._call(module, inputs), evaluate=evaluator_of(dtype)
        )
        del cast
        release(self.reference.size)
        return found

    def _call(self, module: Any, inputs: Sequence[Any]) -> Any:
        # What reads numbers of what is traced is named further out.
        with naming_failures(
            "candidate",
            inputs,
            {},
            lambda error: None if isinstance(error, UNKNOWN_NUMBERS) else error,
        ):
            if self.call is not None:
                return self.call(module, inputs)
            return call_candidate(module, inputs, **self.positions)

    def _low_pass(self) -> dict[str, jax_trace.JaxCall]:
        """Returns the pass of the candidate in the dtype under test."""
        with jax.enable_x64(False):
            return self._trace(self.module, self.dtype)
