"""Compares a PyTorch module with a candidate of any framework, with no names given."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.parity.graphs.diagnosis import diagnose
from jaxformer.parity.graphs.matching.anchors import Table
from jaxformer.parity.graphs.matching.layouts import find_layout
from jaxformer.parity.graphs.matching.parameters import ParameterMatches, match_parameters
from jaxformer.parity.graphs.matching.values import largest, rounding_allowed
from jaxformer.parity.graphs.recording.candidates import Candidate, as_candidate
from jaxformer.parity.graphs.recording.jax_run import JaxRun
from jaxformer.parity.graphs.recording.tape import Operator, Tape, Value
from jaxformer.parity.graphs.recording.torch_run import TorchRun
from jaxformer.parity.graphs.recording.tracing import candidate_arrays
from jaxformer.parity.graphs.segments.divergences import Divergence
from jaxformer.parity.graphs.segments.effects import NO_EFFECT, effect_of
from jaxformer.parity.graphs.segments.gradients import (
    Gradients,
    buffers_with_gradients,
    compare_gradients,
)
from jaxformer.parity.graphs.segments.walk import Walk
from jaxformer.parity.report.model import Coverage, Difference, Node, RootCause
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import shorten
from jaxformer.parity.tolerance import ROUNDOFF


def compare_graphs(
    torch_module: Any,
    candidate: Any,
    inputs: Any,
    jax_inputs: Any = None,
    backward: bool = True,
    line_that_reads: Callable[[int], str] = lambda place: "",
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

    Raises:
        UsageError: the candidate is of no known kind, or torch is missing.
    """
    model = as_candidate(candidate)
    args, kwargs = arguments(inputs)
    targets = candidate_arrays(model)
    asked = buffers_with_gradients(torch_module, targets) if backward else []
    reference = _run_torch(torch_module, args, kwargs, backward, asked)
    tape = reference.tape
    jax_args, jax_kwargs = (args, kwargs) if jax_inputs is None else arguments(jax_inputs)
    buffers = {name: value.data for name, value in tape.buffers.items()}
    sources = {name: value.data for name, value in tape.parameters.items()} | buffers
    parameters = match_parameters(sources, targets, buffers)
    walk = Walk(tape, line_that_reads)
    walk.unknown, walk.missing = set(parameters.unmatched), set(parameters.missing)
    walk.index.add(tape.values)
    run = JaxRun(
        model, jax_args, jax_kwargs, walk.candidate,
        _in_reference_numbers(parameters, sources, targets), backward,
    )  # fmt: skip
    with jax.enable_x64(True):
        walk.advance()
        walk.require_results()
        causes = _forward_causes(walk)
        gradients = Gradients()
        if backward:
            walk.keep_corrections()
            gradients = compare_gradients(reference, run, walk, parameters)
            causes = _with_backward(causes, walk, run)
        found = _report(model, reference, walk, parameters, causes, gradients, backward)
        return dataclasses.replace(found, casts=tuple(_describe_casts(run)))


def _run_torch(
    module: Any, args: Any, kwargs: Any, backward: bool, buffers: Sequence[str]
) -> TorchRun:
    """Runs the reference; without a backward pass if it writes over what that would read.

    PyTorch does not differentiate by every buffer: the means of a batch norm have no gradients.
    """
    reason = ""
    for asked in dict.fromkeys([tuple(buffers), ()]) if backward else ():
        try:
            return TorchRun(module, args, kwargs, buffers=asked)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
    run = TorchRun(module, args, kwargs, backward=False)
    if reason:
        run.no_gradients = f"the reference cannot be differentiated: {reason}"
    return run


def _in_reference_numbers(
    parameters: ParameterMatches,
    sources: Mapping[str, np.ndarray],
    targets: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Returns the parameters that are equal to the reference's, or should be, as it has them."""
    found = {w.candidate: w.layout.apply(sources[w.reference]) for w in parameters.wrong}
    for name, twins in parameters.whole.items():
        source = sources[twins[0]]
        layout = find_layout(source, targets[name], ROUNDOFF["float32"] * largest(source))
        if layout is not None:
            found[name] = layout[0].apply(source)
    return found


def arguments(inputs: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns positional and named arguments, with every array as a numpy array.

    Args:
        inputs: an array, a list or tuple of arguments, or a dict of named ones.
    """
    if isinstance(inputs, Mapping):
        return [], {str(name): _as_numpy(value) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        if inputs and all(isinstance(x, int | float) for x in inputs):
            raise UsageError("inputs must be an array, a list of arrays, or a dict of arrays")
        return [_as_numpy(value) for value in inputs], {}
    return [_as_numpy(inputs)], {}


def _as_numpy(value: Any) -> Any:
    if hasattr(value, "untyped_storage"):
        return value.detach().cpu().double().numpy() if value.is_floating_point() else (
            value.detach().cpu().numpy()
        )  # fmt: skip
    return np.asarray(value) if isinstance(value, jax.Array) else value


def _forward_causes(walk: Walk) -> list[RootCause]:
    """Returns the causes of what differs in the results, one for each divergence that they see."""
    effects = [effect_of(divergence, walk.reference) for divergence in walk.divergences]
    is_seen = [effect is None or effect > NO_EFFECT for effect in effects]
    walk.remarks += _without_effect(walk.divergences, is_seen)
    return [
        _cause(divergence, walk, effect)
        for divergence, effect, seen in zip(walk.divergences, effects, is_seen, strict=True)
        if seen
    ]


def _without_effect(divergences: Sequence[Divergence], is_seen: Sequence[bool]) -> Iterator[str]:
    """Yields what differs and changes no result, as masks do at padding."""
    hidden = [d for d, seen in zip(divergences, is_seen, strict=True) if not seen]
    if hidden:
        first = next((op for op in reversed(hidden[0].operators) if op.source), None)
        count = "1 value differs" if len(hidden) == 1 else f"{len(hidden)} values differ"
        place = shorten(first.source) if first else "a source unknown"
        yield f"{count}, the first at {place}; the results that are read stay the same"


def _report(
    model: Candidate,
    reference: TorchRun,
    walk: Walk,
    parameters: ParameterMatches,
    causes: Sequence[RootCause],
    gradients: Gradients,
    backward: bool,
) -> Report:
    tape = walk.candidate
    merged = _merge(causes)
    nodes = list(_nodes(model.kind, reference, walk, merged))
    missing = sum(node.verdict == "incomplete" for node in nodes)
    floats = [v for v in tape.values if v.is_activation]
    return Report(
        "grad" if backward else "forward",
        "float64",
        tuple(nodes),
        remarks=(*walk.remarks, *gradients.remarks),
        causes=tuple(merged),
        weights=tuple(map(str, parameters.wrong)),
        tables=tuple(dict.fromkeys(map(_describe_table, walk.tables))),
        incomplete=tuple(_incomplete(walk, parameters, tape)),
        coverage=Coverage(
            (len(nodes) - missing, len(nodes)),
            (len(walk.checked & walk.expected), len(walk.expected)),
            (len(parameters.whole) + len(parameters.in_parts), len(tape.parameters)),
            (sum(v.index in walk.matches for v in floats), len(floats)),
            (gradients.compared, gradients.expected),
            walk.largest_error,
        ),
    )  # fmt: skip


def _nodes(
    kind: str, reference: TorchRun, walk: Walk, causes: Sequence[RootCause]
) -> Iterator[Node]:
    """Yields a node for each module of the reference that was called.

    Its paths on both sides are those of the reference, whose modules a candidate need not have.
    """
    wrong = {cause.torch_module for cause in causes}
    errors: dict[int, float] = {}
    for match in (match for found in walk.matches.values() for match in found):
        errors[match.value.index] = max(errors.get(match.value.index, 0.0), match.error)
    paths = [path for path in reference.kinds if path in reference.returned]
    for order, path in enumerate(paths):
        values = [v for v in reference.returned[path] if v.index in walk.reached]
        found = [
            Difference(errors.get(v.index, 0.0), largest(v.data), rounding_allowed(v.data))
            for v in values
        ]
        worst = max(found, key=lambda d: d.excess, default=None)
        parts = path.split(".") if path else []
        node = Node(
            path,
            path,
            reference.kinds[path] if path else kind,
            reference.kinds[path],
            sum(".".join(parts[:n]) in reference.returned for n in range(len(parts))),
            order,
            in_context=worst,
        )
        if path in wrong:
            first = next(cause for cause in causes if cause.torch_module == path)
            yield dataclasses.replace(
                node, verdict="bug", stage=first.stage, message=first.message,
                is_root_cause=True, in_context=None,
            )  # fmt: skip
        elif worst is None:
            message = "not compared: no value of the candidate equals what it returns"
            yield dataclasses.replace(node, verdict="incomplete", message=message)
        else:
            yield dataclasses.replace(node, verdict="rounding" if worst.error else "exact")


def _with_backward(causes: Sequence[RootCause], walk: Walk, run: JaxRun) -> list[RootCause]:
    """Returns the causes, and those of the backward pass that no cause of the forward one explains.

    A wrong formula has a wrong derivative, which has the same line in JAX. A wrong input sends the
    gradient elsewhere, in the same block.
    """
    forward = [d for d in walk.divergences if not d.is_backward]
    backward = [d for d in walk.divergences if d.is_backward]
    lines = {op.source for d in forward for op in d.operators}
    blocks = [cause.torch_module.rpartition(".")[0] for cause in causes]
    found = list(causes)
    for divergence in backward:
        path = _reference_operator(divergence).module
        is_near = any(not block or f"{path}.".startswith(f"{block}.") for block in blocks)
        if not is_near and not any(op.source in lines for op in divergence.operators if op.source):
            found.append(_cause(divergence, walk))
    explained = len(backward) - (len(found) - len(causes))
    if explained:
        walk.remarks.append(f"gradients differ in {explained} places beside the causes above")
    stops = run.stops() if len(found) > len(causes) else ()
    if stops:
        walk.remarks.append(f"the candidate stops gradients at {', '.join(map(shorten, stops))}")
    if len(stops) == 1:
        found = [c if c.jax_source else dataclasses.replace(c, jax_source=stops[0]) for c in found]
    return found


def _describe_table(table: Table) -> str:
    producer = table.value.producer
    where = shorten(producer.source) if producer is not None else "a constant of the function"
    shape = tuple(table.value.data.shape)
    return f"{where}, of shape {shape}: {table.error:.1e} from the reference's"


def _describe_casts(run: JaxRun) -> Iterator[str]:
    for (source, dtype), count in run.narrow_casts().items():
        where = shorten(source) if source else "a line unknown"
        yield f"{where}, to {dtype}" + (f" in {count} places" if count > 1 else "")


def _cause(divergence: Divergence, walk: Walk, effect: float | None = None) -> RootCause:
    found = diagnose(divergence, walk)
    named = [op for op in divergence.operators if op.source]
    operator = found.operator or (named[-1] if named else divergence.value.producer)
    reference = _reference_operator(divergence)
    source = _source(operator, found.is_operand, walk) if operator else ""
    return RootCause(
        source or _line_that_reads(divergence, walk),
        reference.source,
        found.text,
        divergence.error,
        "backward" if divergence.is_backward else "forward",
        tuple(op.name for op in divergence.operators),
        tuple(op.name for op in divergence.reference_operators),
        operator.module if operator else "",
        reference.module,
        effect=effect,
        jax_after=_source_before(divergence, found.read),
    )


def _line_that_reads(divergence: Divergence, walk: Walk) -> str:
    """Returns the line that reads a wrong result, if it is one; see ``compare_graphs``."""
    pairs = zip(walk.candidate.outputs, walk.reference.outputs, strict=False)
    required, wanted = divergence.required, divergence.required_reference
    places = (n for n, (own, right) in enumerate(pairs) if own is required and right is wanted)
    return next((walk.line_that_reads(place) for place in places), "")


def _source_before(divergence: Divergence, read: Value | None) -> str:
    """Returns the line that made what enters a segment: the last activation, if none is named."""
    entering = [value for value in divergence.boundary if value.is_activation]
    value = read or (entering[-1] if entering else None)
    while value is not None and value.producer is not None and not value.producer.source:
        value = next((v for v in value.producer.inputs if v.is_activation), None)
    return "" if value is None or value.producer is None else value.producer.source


def _source(operator: Operator, is_operand: bool, walk: Walk) -> str:
    """Returns the line to blame: of the caller, if its argument is wrong and the function right.

    The function is right if the same line, called from elsewhere, gives what the reference has.
    """
    if not is_operand or not operator.caller:
        return operator.source
    wrong = {op.index for d in walk.divergences for op in d.operators}
    is_right = any(
        other.index not in wrong
        and (other.name, other.source) == (operator.name, operator.source)
        and other.caller != operator.caller
        and all(made.index in walk.matches for made in other.outputs)
        for other in walk.candidate.operators
    )
    return operator.caller if is_right else operator.source


def _reference_operator(divergence: Divergence) -> Operator:
    """Returns the last operator of the reference's segment whose source is known."""
    own = divergence.reference_value.producer
    named = (op for op in reversed(divergence.reference_operators) if op.source)
    return next(named, own or Operator(0, "", [], [], list))


def _merge(causes: Iterable[RootCause]) -> list[RootCause]:
    """Returns each cause once, with the number of its places and its largest error."""
    found: dict[tuple[str, str, str, str], RootCause] = {}
    for cause in causes:
        key = cause.jax_source, cause.torch_source, cause.diagnosis, cause.stage
        first = found.get(key, cause)
        places = first.places + 1 if key in found else 1
        error = max(first.error, cause.error)
        known = [e for e in (first.effect, cause.effect) if e is not None]
        effect = max(known) if known else None
        found[key] = dataclasses.replace(first, places=places, error=error, effect=effect)
    return list(found.values())


def _incomplete(walk: Walk, parameters: ParameterMatches, tape: Tape) -> list[str]:
    lines = list(walk.uncompared)
    if not tape.outputs:
        lines.append("the candidate returns no floats")
    needed = tape.ancestors(tape.outputs)
    wanted = walk.reference.ancestors(walk.reference.outputs)
    for name, value in tape.parameters.items():
        if value.index in needed or getattr(value.data, "dtype", np.dtype(int)).kind != "f":
            continue
        named = [walk.reference.parameters.get(twin) for twin in parameters.whole.get(name, ())]
        twins = [match.value for match in walk.matches.get(value.index, ())]
        twins += [twin for twin in named if twin is not None]
        # What has no effect on either side is no part of the comparison.
        if not any(twin.kind == "parameter" and twin.index not in wanted for twin in twins):
            lines.append(f"the parameter {name} of the candidate has no effect on its results")
    lines += [f"{name} computes in a dtype of its own" for name in sorted(tape.opaque)]
    return lines
