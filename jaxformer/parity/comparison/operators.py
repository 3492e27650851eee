"""Compares two functions operator by operator, with no names given: any models, or parts of them.

The stages, each a package: both sides are recorded on tapes, equal parameters and values are
matched, the segments between them are walked through, and what differs is judged and diagnosed.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax

from jaxformer.errors import UsageError, is_out_of_memory
from jaxformer.hardware.memory import without_collection
from jaxformer.parity.diagnosis.causes import (
    causes_of_results,
    find_causes,
    merge_causes,
    with_causes,
    with_stops,
)
from jaxformer.parity.findings import RootCause
from jaxformer.parity.judging.coverage import (
    describe_casts,
    describe_table,
    find_incomplete,
    judge_modules,
    measure_coverage,
)
from jaxformer.parity.judging.divergences import judge_backward, judge_forward
from jaxformer.parity.judging.labels import Labels, arrays_held
from jaxformer.parity.judging.no_effect import find_without_effect
from jaxformer.parity.judging.rounding import Rounding
from jaxformer.parity.matching.computed_parameters import describe_scaled, find_computed
from jaxformer.parity.matching.module_pairs import pair_by_numbers
from jaxformer.parity.matching.parameters import buffers_with_gradients
from jaxformer.parity.matching.rounded_parameters import match_parameters_in_full
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording.memory import release
from jaxformer.parity.recording.operators.candidates import (
    Caller,
    Candidate,
    arguments,
    as_candidate,
    unwrapped,
)
from jaxformer.parity.recording.operators.failures import naming_failures, raised_by_candidate
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.narrow_runs import (
    NarrowRun,
    run_candidate_in,
    run_reference_in,
)
from jaxformer.parity.recording.operators.signatures import naming_misfits
from jaxformer.parity.recording.operators.torch_run import TorchRun, raised_alone, run_torch
from jaxformer.parity.recording.operators.torch_weights import remarks_on_training
from jaxformer.parity.recording.operators.tracing import candidate_arrays
from jaxformer.parity.recording.torch_values import experts_one_by_one
from jaxformer.parity.report.report import Report
from jaxformer.parity.segments.gradients import Gradients, compare_gradients
from jaxformer.parity.segments.lacking import describe_hidden, describe_lacking
from jaxformer.parity.segments.result_checks import check_results
from jaxformer.parity.segments.results import Results, compare_results
from jaxformer.parity.segments.unverified import find_unverified
from jaxformer.parity.segments.walk import Walk
from jaxformer.parity.tolerance import ROUNDOFF
from jaxformer.parity.words import name_error


def compare_operators(
    torch_module: Any,
    candidate: Any,
    inputs: Any,
    jax_inputs: Any = None,
    backward: bool = True,
    line_that_reads: Callable[[int], str] = lambda place: "",
    *,
    names: Mapping[str, str] | None = None,
    torch_call: Caller | None = None,
    jax_call: Caller | None = None,
    about: Mapping[str, Any] | None = None,
    dtype: str | None = None,
) -> Report:
    """Runs both models once, in float64, and compares them operator by operator.

    Args:
        torch_module: the reference; it is not changed, and is run in evaluation mode.
        candidate: an NNX or Equinox module, (Linen module, variables), what Haiku's ``transform``
            gives with its parameters, or (function, parameters).
        inputs: of the reference: an array, a list of positional arguments, or a dict of named ones.
            Arrays of numpy, PyTorch and JAX are taken.
        jax_inputs: of the candidate; default the same.
        backward: whether to compare the backward pass too.
        line_that_reads: returns "path:line" of the code that a result of the candidate, given its
            place, goes to; known of parts of a model. It is the source of a result that no operator
            of the candidate makes.
        names: of an NNX module: paths of the candidate to paths of the reference, which the report
            shows. What is compared does not depend on them. Default: those of the modules of
            NNX, Linen, Equinox and Haiku that return the same numbers and hold the same parameters.
        torch_call: how to call the reference, given it and its inputs.
        jax_call: how to call the candidate.
        about: notes for the report.
        dtype: whose rounding is measured too, of the results and of modules that both sides have;
            default none. Both sides are run once more in it, forward.

    Raises:
        UsageError: the dtype or the kind of the candidate is unknown, a model fails on its inputs,
            nothing would be compared, or torch is missing.
        ValueError: names has a path that does not exist; all such paths are listed.
    """
    if dtype is not None and dtype not in ROUNDOFF:
        raise UsageError(f"dtype must be one of {', '.join(ROUNDOFF)}: got {dtype!r}")
    candidate = unwrapped(candidate)
    labels = None if names is None else Labels.of_user(names, candidate, torch_module)
    model = as_candidate(candidate, jax_call)
    args, kwargs = arguments(inputs)
    jax_arguments = (args, kwargs) if jax_inputs is None else arguments(jax_inputs)
    asked = buffers_with_gradients(torch_module, candidate_arrays(model)) if backward else []
    called = None if torch_call else torch_module.forward
    index = Index()
    with (
        experts_one_by_one(torch_module),
        naming_failures(
            "reference",
            args,
            kwargs,
            lambda _: raised_alone(torch_module, args, kwargs, torch_call),
        ),
        naming_misfits("reference", called, args, kwargs),
    ):
        reference = run_torch(torch_module, args, kwargs, backward, asked, torch_call, index.note)
    results = reference.tape.outputs
    if results and not any(math.prod(result.shape) for result in results):
        raise UsageError(
            f"the reference's results are empty, of shape {results[0].shape}: give inputs that are "
            "not empty"
        )
    with without_collection():
        comparison = _Comparison(model, jax_arguments, reference, backward, line_that_reads, index)
        with jax.enable_x64(True):
            report = comparison.report()
    wrong = [] if labels is None else [*labels.wrong(comparison.parameters)]
    labels = labels or comparison.labels(arrays_held(torch_module))
    report = dataclasses.replace(
        report,
        nodes=tuple(labels.nodes(report.nodes)),
        causes=tuple(labels.causes(report.causes)),
        weights=(*report.weights, *wrong),
        remarks=(*report.remarks, *remarks_on_training(torch_module)),
        about=dict(about or {}),
    )
    if dtype in (None, "float64"):
        return report

    def run_in(dtype: str) -> tuple[NarrowRun, NarrowRun]:
        return (
            run_candidate_in(dtype, model, *jax_arguments),
            run_reference_in(dtype, torch_module, args, kwargs, torch_call),
        )

    return comparison.with_rounding(report, dtype, run_in, labels)


class _Comparison:
    """One candidate beside the recorded reference. Arguments as in ``compare_operators``."""

    def __init__(
        self,
        model: Candidate,
        given: tuple[list[Any], Mapping[str, Any]],
        reference: TorchRun,
        backward: bool,
        line_that_reads: Callable[[int], str],
        index: Index,
    ):
        self.model, self.reference, self.backward = model, reference, backward
        tape, targets = reference.tape, candidate_arrays(model)
        buffers = {name: value.data for name, value in tape.buffers.items()}
        sources = reference.stored | buffers
        self._size = sum(array.size for array in targets.values())
        matches, known = match_parameters_in_full(sources, targets, buffers)
        self.parameters, self.computed = find_computed(matches, targets, tape)
        unknown = [n for n in matches.unmatched if all(n != one.name for one in self.computed)]
        self.scaled = [*describe_scaled(unknown, targets, matches.missing, sources)]
        known = {**known, **{one.name: one.read for one in self.computed}}
        release(self._size)
        self.walk = Walk(tape, line_that_reads, index)
        self.walk.unknown = set(unknown)
        self.walk.missing = set(self.parameters.missing)
        self.walk.partly = self.parameters.partly
        self.walk.index.add(tape.values)
        called = None if model.caller else model.bind(model.parameters)
        with (
            naming_failures("candidate", *given, raised_by_candidate),
            naming_misfits("candidate", called, *given),
        ):
            self.run = JaxRun(model, *given, self.walk.candidate, known, backward)

    def report(self) -> Report:
        """Walks through both passes and returns what was found."""
        walk = self.walk
        release(self._size)
        walk.advance()
        self._results = results = compare_results(walk)
        wrong = judge_forward(walk)
        causes = find_causes(wrong, walk) + causes_of_results(check_results(walk, results))
        unverified = find_unverified(walk, results, self.parameters)
        lacking = [] if self.backward else [describe_hidden(walk)]
        gradients = Gradients()
        if self.backward:
            walk.keep_corrections()
            gradients = compare_gradients(self.reference, self.run, walk, results, self.parameters)
            later = find_causes(judge_backward(walk, wrong), walk)
            stops = self.run.stops() if later else []
            others = {
                "the reference stops gradients": self.reference.stops(),
                "the candidate has rules for gradients": self.run.rules() if later else [],
            }
            causes = with_stops(causes, later, stops, others, walk)
        lacking.append(describe_lacking(walk, self.parameters, gradients))
        return self._report(merge_causes(causes), results, unverified, lacking, gradients)

    def with_rounding(
        self,
        report: Report,
        dtype: str,
        run_in: Callable[[str], tuple[NarrowRun, NarrowRun]],
        labels: Labels,
    ) -> Report:
        """Returns the report with what a dtype rounds, or with why that is not known.

        Args:
            report: of ``report``.
            dtype: to run in.
            run_in: runs the candidate and the reference in it.
            labels: the candidate's modules.
        """
        try:
            runs = run_in(dtype)
        except Exception as error:  # Whatever a model cannot do in the dtype.
            if is_out_of_memory(error):
                raise
            remark = f"what {dtype} rounds was not measured: {name_error(error)}"
            return dataclasses.replace(report, remarks=(*report.remarks, remark))
        rounding = Rounding(
            dtype, runs, self.run, self.reference, self.walk, self._results
        )  # fmt: skip
        nodes = tuple(rounding.nodes(report.nodes, labels.names))
        remarks = (*report.remarks, *rounding.remarks(nodes))
        return dataclasses.replace(report, dtype=dtype, nodes=nodes, remarks=remarks)

    def labels(self, held: Mapping[str, Collection[str]]) -> Labels:
        """Returns the candidate's own names of its modules, where its framework has any.

        Args:
            held: the names of the parameters in each module of the reference.
        """
        marks, tape = self.run.marks, self.reference.tape
        sources = {one.name: one.sources(tape) for one in self.computed}
        kinds = {mark.path: mark.class_name for mark, _ in marks}
        returned = {path: [v for mark, v in marks if mark.path == path] for path in kinds}
        names = pair_by_numbers(
            returned,
            self.reference.returned,
            self.walk.matches,
            held,
            dataclasses.replace(self.parameters, in_parts={**self.parameters.in_parts, **sources}),
            tape.buffers,
            self.model.collections,
        )
        return Labels(names, kinds, held)

    def _report(
        self,
        causes: list[RootCause],
        results: Results,
        unverified: Sequence[str],
        lacking: Sequence[str],
        gradients: Gradients,
    ) -> Report:
        walk, parameters = self.walk, self.parameters
        unused, surplus = find_without_effect(walk, parameters)
        nodes = with_causes(judge_modules(self.model.kind, self.reference, walk), causes)
        return Report(
            "grad" if self.backward else "forward",
            "float64",
            tuple(nodes),
            remarks=(*walk.remarks, *gradients.remarks, *filter(None, [surplus])),
            causes=tuple(causes),
            weights=(
                *map(str, parameters.wrong),
                *(one.wrong for one in self.computed if one.wrong),
                *self.scaled,
            ),
            tables=tuple(dict.fromkeys(map(describe_table, walk.tables))),
            casts=tuple(describe_casts(self.run, parameters)),
            incomplete=tuple(find_incomplete(walk, results, unused, unverified, lacking)),
            coverage=measure_coverage(nodes, walk, parameters, gradients),
        )
