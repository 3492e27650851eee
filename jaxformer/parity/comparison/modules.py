"""Compares two of jaxformer's own models: every module on equal inputs, in float64.

It is the comparison by operators, and the rules that port the weights say which modules of the two
sides are the same. So it is known what must enter each module and leave it, and a module answers
for its own code alone: an early error hides no later one, and a bug shows in the module that has it
and in none around it. Weights are compared separately; both sides compute with the reference's.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxformer.attention import MultiHeadAttention
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.query_blocks import large_query_blocks
from jaxformer.hardware.memory import without_collection
from jaxformer.parity.comparison.parts import Part, compare_part
from jaxformer.parity.comparison.reference_run import Caller, ReferenceRun
from jaxformer.parity.diagnosis.settings import compare_settings, name_causes, precision_flags
from jaxformer.parity.findings import Node
from jaxformer.parity.judging.module_rounding import with_rounding
from jaxformer.parity.judging.pair_coverage import (
    find_unreached,
    linked_parameters,
    measure_pair_coverage,
)
from jaxformer.parity.judging.verdicts import judge_node
from jaxformer.parity.judging.weights import (
    compare_weights,
    describe_wrong_weights,
    find_swapped_layers,
)
from jaxformer.parity.matching.pairs import Pair, PairKey, parents_of
from jaxformer.parity.matching.positions import (
    Made,
    computes_tables,
    match_alibi_slopes,
    position_ids_from_mask,
    share_tables,
)
from jaxformer.parity.matching.reference_attention import ReferenceAttention
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.memory import free_records, release
from jaxformer.parity.recording.operators.candidates import Candidate, as_candidate
from jaxformer.parity.recording.operators.failures import naming_failures
from jaxformer.parity.recording.operators.module_marks import marked_nnx
from jaxformer.parity.recording.operators.narrow_runs import (
    NarrowRun,
    run_candidate_in,
    run_reference_in,
)
from jaxformer.parity.recording.operators.signatures import UNKNOWN_NUMBERS
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.recording.torch_values import as_numpy
from jaxformer.parity.recording.whole_models import call_candidate
from jaxformer.parity.report.report import Report


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
            call=torch_call, config=jax_module, force=force,
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
    """Compares a candidate with a reference whose port is known.

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
        dtype or jax_modules.dtype_of(jax_module),
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
        self.inputs = [as_numpy(x) for x in inputs]
        self.dtype, self.call = dtype, call
        # The argument ``positions``, where padding changes the reference's position ids.
        self.positions: dict[str, np.ndarray] = {}
        self.pairs = reference.pairs_with(jax_module)
        self.parents = parents_of(self.pairs)
        # A reference with names has none, and is compared by its operators.
        assert reference.plan is not None
        self.plan = reference.plan
        self.weights, self.wrong_weights = compare_weights(
            jax_modules.parameters_of(jax_module), self.plan.tensors
        )

    def report(self, about: Mapping[str, Any]) -> Report:
        """Runs both sides and returns what was found."""
        with (
            without_collection(),
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
        candidate = jax_modules.in_dtype(self.module, None)
        tables = share_tables(candidate, reference.module, _made_tables(reference, ran))
        if self.call is None:
            given = {
                path: calls[0].positions.data
                for path, calls in ran.calls.items()
                if calls[0].positions is not None
            }
            padding = ReferenceAttention(ran.softmaxes).padding
            self.positions = position_ids_from_mask(self.module, self.pairs, given, padding)
        release(reference.size)
        kinds, attentions = describe_modules(self.module, self.pairs)
        raw = None
        if any(difference.error for difference in self.weights.values()):
            # Both sides compute with the reference's weights.
            own = marked_candidate(candidate, self._call)
            raw = run_candidate_in("float64", own, self.inputs, {})
        found = compare_part(
            Part(
                ran, index, marked_candidate(candidate, self._call), self.inputs, self.pairs,
                self.parents, self.plan.links, self.plan.tensors, self.weights, kinds, attentions,
                reference.backward, raw=raw,
            )
        )  # fmt: skip
        del ran, index
        nodes = found.nodes
        if self.dtype != "float64":
            free_records(reference.size)
            nodes = with_rounding(
                nodes, found.outputs, self.dtype, self._candidate_low, self._reference_low
            )
        for table in tables:
            nodes = with_table(nodes, table)
        own_parameters = {pair.candidate: pair.parameters for pair in self.pairs}
        judged = {
            key: judge_node(
                dataclasses.replace(node, order=place),
                describe_wrong_weights(self.wrong_weights, own_parameters.get(key, ()), node.path),
            )
            for place, (key, node) in enumerate(nodes.items())
        }
        parameters = jax_modules.parameters_of(self.module)
        return Report(
            "grad" if reference.backward else "forward",
            self.dtype,
            tuple(name_causes(list(judged.values()), settings)),
            tuple(settings),
            about=dict(about),
            remarks=(*found.remarks, *self._remarks()),
            causes=found.causes,
            incomplete=(
                *find_unreached(self.pairs, found.called, parameters, self.module),
                *found.incomplete,
            ),
            coverage=measure_pair_coverage(
                self.pairs, judged, found.called, parameters, (len(self.weights), len(parameters)),
                linked_parameters(reference.module, self.plan.links), found.operators,
                reference.backward,
            ),
        )  # fmt: skip

    def _candidate_low(self) -> NarrowRun:
        """Returns what the candidate makes in the dtype under test."""
        with jax.enable_x64(False):
            model = marked_candidate(jax_modules.in_dtype(self.module, None), self._call)
            return run_candidate_in(self.dtype, model, self.inputs, {})

    def _reference_low(self, paths: Collection[str]) -> NarrowRun:
        """Returns what modules of the reference make in the dtype under test."""
        release(self.reference.size)
        reference = self.reference
        return run_reference_in(
            self.dtype, reference.module, reference.inputs, {}, reference.call, paths
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
            dtype = jax.dtypes.canonicalize_dtype(np.int64)
            positions = {name: array.astype(dtype) for name, array in self.positions.items()}
            return call_candidate(module, inputs, **positions)


def marked_candidate(module: Any, call: Caller) -> Candidate:
    """Returns one of jaxformer's own models, which marks what enters and leaves its modules."""
    return dataclasses.replace(
        as_candidate(module, call), marked=partial(marked_nnx, with_inputs=True)
    )


def describe_modules(module: Any, pairs: Sequence[Pair]) -> tuple[dict[str, str], set[str]]:
    """Returns the classes of the modules in pairs, by path, and which of them are attentions."""
    paths = {path for pair in pairs for path in pair.candidate}
    found = {path: jax_modules.resolve(module, path)[0] for path in paths}
    attentions = {path for path, inner in found.items() if isinstance(inner, MultiHeadAttention)}
    return {path: type(inner).__name__ for path, inner in found.items()}, attentions


def _made_tables(reference: ReferenceRun, ran: TorchRun) -> dict[str, Made]:
    """Returns what the modules of the reference returned that compute tables of positions."""
    return {
        path: Made(calls[0].begin, [[v.data for v in call.returned] for call in calls])
        for path, calls in ran.calls.items()
        if computes_tables(reference.modules[path])
    }


def with_table(nodes: Mapping[PairKey, Node], table: Node) -> dict[PairKey, Node]:
    """Returns nodes with that of a table after its user."""
    found: dict[PairKey, Node] = {}
    for key, node in nodes.items():
        found[key] = node
        if key == (table.path.rpartition(".")[0],):
            found[(table.path,)] = table
    return found
