"""Compares two models module by module: every pair isolated, on equal inputs, in float64.

It is the comparison by operators, and the rules that port the weights say which modules of the two
sides are the same. So it is known what must enter each module and leave it, and a module answers
for its own code alone: an early error hides no later one, and a bug shows in the module that has it
and in none around it. Weights are compared separately; both sides compute with the reference's.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.query_blocks import large_query_blocks
from jaxformer.parity.comparison.reference_run import Caller, ReferenceRun
from jaxformer.parity.diagnosis.causes import find_causes
from jaxformer.parity.diagnosis.settings import compare_settings, name_causes, precision_flags
from jaxformer.parity.findings import Difference, Node, RootCause
from jaxformer.parity.judging.divergences import Judged
from jaxformer.parity.judging.module_nodes import ModuleNodes
from jaxformer.parity.judging.pair_coverage import (
    Called,
    find_unreached,
    linked_parameters,
    measure_pair_coverage,
)
from jaxformer.parity.judging.pair_nodes import in_context
from jaxformer.parity.judging.verdicts import arithmetic_stage, judge_node
from jaxformer.parity.judging.weights import (
    compare_weights,
    describe_wrong_weights,
    find_swapped_layers,
)
from jaxformer.parity.matching.operators.known_modules import (
    KnownModules,
    Requirement,
    calls_of,
)
from jaxformer.parity.matching.operators.known_values import (
    required_gradients,
    required_integers,
    required_masks,
)
from jaxformer.parity.matching.operators.reference_attention import (
    ReferenceAttention,
    used_rows,
)
from jaxformer.parity.matching.operators.values import Index
from jaxformer.parity.matching.pairs import Pair, PairKey, in_call_order, parents_of
from jaxformer.parity.matching.positions import (
    Made,
    computes_tables,
    match_alibi_slopes,
    position_ids_from_mask,
    share_tables,
)
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.calls.whole_models import call_candidate
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.operators.candidates import Candidate, as_candidate
from jaxformer.parity.recording.operators.failures import naming_failures
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.module_marks import marked_nnx
from jaxformer.parity.recording.operators.narrow_runs import run_candidate_in, run_reference_in
from jaxformer.parity.recording.operators.signatures import UNKNOWN_NUMBERS
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.report.report import Report
from jaxformer.parity.segments.operators.gradients import run_backward
from jaxformer.parity.segments.operators.requirements import Requirements
from jaxformer.parity.segments.operators.results import compare_results
from jaxformer.parity.segments.operators.walk import Walk


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
        with (
            match_alibi_slopes(self.reference.module),
            large_query_blocks(),
            # Whatever the length: another kernel has no weights.
            attention_kernel("plain"),
        ):
            return self._report(about)

    def _report(self, about: Mapping[str, Any]) -> Report:
        reference = self.reference
        settings = precision_flags()
        if not reference.unsupported_settings:
            settings = compare_settings(self.module, self.plan.module) + settings
        index = Index()
        ran = reference.record({p for pair in self.pairs for p in pair.reference}, index.note)
        self.attention = attention = ReferenceAttention(ran.softmaxes)
        candidate = jax_trace.in_dtype(self.module, None)
        tables = share_tables(
            candidate,
            reference.module,
            {
                path: Made(calls[0].begin, [[v.data for v in call.returned] for call in calls])
                for path, calls in ran.calls.items()
                if computes_tables(reference.modules[path])
            },
        )
        if self.call is None:
            given = {
                path: calls[0].positions.data
                for path, calls in ran.calls.items()
                if calls[0].positions is not None
            }
            self.positions = position_ids_from_mask(
                self.module, self.pairs, given, attention.padding
            )
        release(reference.size)
        model = dataclasses.replace(
            as_candidate(candidate, self._call), marked=partial(marked_nnx, with_inputs=True)
        )
        walk = Walk(ran.tape, index=index)
        walk.index.add(ran.tape.values)
        known_numbers = {
            name: partial(_in_float64, tensor) for name, tensor in self.plan.tensors.items()
        }
        run = JaxRun(
            model, self.inputs, {}, walk.candidate, known_numbers, reference.backward, True
        )
        known = KnownModules(
            self.pairs, self.parents, run.marks, ran.calls, walk.matches,
            (walk.candidate, ran.tape),
        )  # fmt: skip
        if ("",) in known.unmatched:
            raise UsageError(
                f"the models cannot be compared: {known.unmatched[('',)].message}; torch_call= "
                "and jax_call= say how each is called, given it and its inputs"
            )
        walk.owners = {
            path: pair.path
            for pair in self.pairs
            if known.calls[pair.candidate]
            for path in pair.candidate
        }
        forward = Requirements(walk, partial(self._used_rows, known))
        forward.add(known.forward())
        forward.add(required_integers(known, walk.candidate, ran.tape))
        forward.add(required_masks(known, self.module, attention, walk.candidate, ran.tape))
        walk.after = forward.settle
        walk.advance()
        forward.settle_rest()
        results = compare_results(walk)
        own_calls = calls_of(run.marks)
        ordered = in_call_order(
            self.pairs,
            self.parents,
            {mark.path: n for n, (mark, _) in reversed([*enumerate(run.marks)])},
            {path: calls[0].begin for path, calls in ran.calls.items() if calls},
        )
        maker = ModuleNodes(
            ordered, self.parents, known, self._kinds(), ran.kinds_of_all, walk, attention,
            self._used,
        )  # fmt: skip
        contexts = maker.contexts(forward.all)
        causes = find_causes([Judged(d) for d in walk.divergences], walk)
        backward = Requirements(walk, partial(self._used_rows, known))
        remarks: list[str] = []
        if reference.backward:
            walk.keep_corrections()
            gradients = run_backward(ran, run, walk, results, self._without_unused)
            if isinstance(gradients, str):
                remarks.append(f"gradients were not compared: {gradients}")
            else:
                cotangents = [one for one in run.cotangents if one[0].is_cotangent]
                backward.add(known.backward(cotangents, run.differentiated))
                backward.add(
                    required_gradients(known, self.plan.links, ran, walk.candidate, *gradients)
                )
                walk.after = backward.settle
                walk.advance_backward()
                backward.settle_rest()
        nodes = in_context(maker.make(forward.all, backward.all, self.weights), contexts)
        if self.dtype != "float64":
            with jax.enable_x64(False):
                own = run_candidate_in(self.dtype, self._low_model(), self.inputs, {})
            low = run_reference_in(
                self.dtype, reference.module, reference.inputs, {}, reference.call
            )
            nodes = maker.with_rounding(nodes, self.dtype, (own, low))
        for table in tables:
            key = (table.path.rpartition(".")[0],)
            nodes = _with_table(nodes, key, table)
        own_parameters = {pair.candidate: pair.parameters for pair in self.pairs}
        judged = {
            key: judge_node(
                node,
                describe_wrong_weights(self.wrong_weights, own_parameters.get(key, ()), node.path),
            )
            for key, node in nodes.items()
        }
        passed = {d.value.index for d in walk.divergences}
        later = [d for d in walk.divergences if d.is_backward]
        wrong = {walk.owner(d) for d in walk.divergences if not d.is_backward}
        causes += find_causes([Judged(d) for d in later if walk.owner(d) not in wrong], walk)
        called = Called(ran.returned, own_calls)
        parameters = jax_trace.parameters_of(self.module)
        return Report(
            "grad" if reference.backward else "forward",
            self.dtype,
            tuple(name_causes(list(judged.values()), settings)),
            tuple(settings),
            about=dict(about),
            remarks=(*remarks, *self._remarks()),
            causes=tuple(self._of_nodes(causes, judged)),
            incomplete=tuple(find_unreached(self.pairs, called, parameters, self.module)),
            coverage=measure_pair_coverage(
                self.pairs, judged, called, parameters, (len(self.weights), len(parameters)),
                linked_parameters(reference.module, self.plan.links), reference.backward,
            ),
        )  # fmt: skip

    def _kinds(self) -> dict[str, str]:
        """Returns the classes of the candidate's modules, by path."""
        paths = {path for pair in self.pairs for path in pair.candidate}
        return {path: type(jax_trace.resolve(self.module, path)[0]).__name__ for path in paths}

    def _low_model(self) -> Candidate:
        candidate = jax_trace.in_dtype(self.module, None)
        return dataclasses.replace(
            as_candidate(candidate, self._call), marked=partial(marked_nnx, with_inputs=True)
        )

    def _unused(self) -> list[np.ndarray]:
        return [*self.attention.padding.values()]

    def _used_rows(
        self, known: KnownModules, array: np.ndarray, one: Requirement
    ) -> Iterator[np.ndarray]:
        calls = known.calls[one.owner]
        idle = [] if not calls else [self.attention.idle(calls[0].right[0].begin, calls[0].right[0].end)]
        yield from used_rows(array, [*self._unused(), *(i for i in idle if i is not None)])

    def _used(self, array: np.ndarray) -> np.ndarray:
        """Returns the numbers of an array that belong to tokens that are used, in a line."""
        return next(used_rows(array, self._unused()), array).reshape(-1)

    def _without_unused(self, cotangent: np.ndarray) -> np.ndarray:
        """Returns a cotangent after it got zeros where nobody uses a result."""
        for rows in self._unused():
            if cotangent.shape[:2] == rows.shape:
                cotangent[rows] = 0.0
        return cotangent

    def _of_nodes(
        self, causes: Iterable[RootCause], judged: Mapping[PairKey, Node]
    ) -> Iterator[RootCause]:
        """Yields the first cause of each pair with a bug of its own, with the pair's paths."""
        nodes = {node.path: node for node in judged.values()}
        seen = set()
        for cause in causes:
            node = nodes.get(cause.candidate_path)
            if cause.candidate_path in seen:
                continue
            if node is not None and arithmetic_stage(node) != cause.stage and node.is_root_cause:
                continue
            seen.add(cause.candidate_path)
            yield dataclasses.replace(
                cause,
                jax_module=cause.candidate_path,
                torch_module=cause.torch_module if node is None else node.reference_path,
                candidate_path="",
                effect=None,
            )

    def _remarks(self) -> Iterable[str]:
        if self.reference.unsupported_settings:
            yield (
                f"the reference's settings make no JAX model: {self.reference.unsupported_settings}"
            )
        if self.positions:
            yield (
                "the reference counts positions by its mask: the candidate was called with the "
                "same positions, and needs them wherever there is padding before a token"
            )
        yield from find_swapped_layers(self.wrong_weights)

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


def _in_float64(tensor: Any) -> np.ndarray:
    return np.asarray(tensor.read()).astype(np.float64)


def _with_table(
    nodes: Mapping[PairKey, Node], key: PairKey, table: Node
) -> dict[PairKey, Node]:
    """Returns nodes with that of a table after its user."""
    found: dict[PairKey, Node] = {}
    for each, node in nodes.items():
        found[each] = node
        if each == key:
            found[(table.path,)] = table
    return found
