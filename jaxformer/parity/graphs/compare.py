"""Compares a PyTorch module with a candidate of any framework, with no names given."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.parity.graphs.candidates import Candidate, as_candidate
from jaxformer.parity.graphs.diagnosis import diagnose
from jaxformer.parity.graphs.divergences import Divergence, Table
from jaxformer.parity.graphs.effects import NO_EFFECT, effect_of
from jaxformer.parity.graphs.jax_tape import record_jax
from jaxformer.parity.graphs.parameters import ParameterMatches, match_parameters
from jaxformer.parity.graphs.report import Coverage, GraphReport, RootCause, shorten
from jaxformer.parity.graphs.segments import Walk
from jaxformer.parity.graphs.tape import Tape, Value
from jaxformer.parity.graphs.torch_tape import record_torch

# Differences above this share of scale are listed first, in the order of the run.
SEVERE = 1e-3


def compare_graphs(
    torch_module: Any, candidate: Any, inputs: Any, jax_inputs: Any = None
) -> GraphReport:
    """Runs both models once, in float64, and compares them operator by operator.

    Args:
        torch_module: the reference; it is not changed, and is run in evaluation mode.
        candidate: an NNX or Equinox module, (Linen module, variables), what Haiku's ``transform``
            gives with its parameters, or (function, parameters).
        inputs: of the reference: an array, a list of positional arguments, or a dict of named ones.
            Arrays of numpy, PyTorch and JAX are taken.
        jax_inputs: of the candidate; default the same.

    Raises:
        UsageError: the candidate is of no known kind, or torch is missing.
    """
    model = as_candidate(candidate)
    args, kwargs = arguments(inputs)
    reference, returned = record_torch(torch_module, args, kwargs)
    jax_args, jax_kwargs = (args, kwargs) if jax_inputs is None else arguments(jax_inputs)
    tape = record_jax(model, jax_args, jax_kwargs)
    with jax.enable_x64(True):
        return judge_tapes(model, reference, returned, tape)


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


def judge_tapes(
    model: Candidate, reference: Tape, returned: Mapping[str, Sequence[Value]], tape: Tape
) -> GraphReport:
    """Compares two runs that were recorded; call it under ``jax.enable_x64(True)``."""
    parameters = match_parameters(reference, tape)
    by_name = {**{v.name: v for v in reference.values if v.name}, **reference.parameters}
    corrected = {
        tape.parameters[w.candidate].index: w.layout.apply(by_name[w.reference].data)
        for w in parameters.wrong
    }
    walk = Walk(reference, tape, corrected).run()
    effects = [effect_of(divergence, reference) for divergence in walk.divergences]
    is_seen = [effect is None or effect > NO_EFFECT for effect in effects]
    causes = _merge(
        _cause(divergence, walk, effect)
        for divergence, effect, seen in zip(walk.divergences, effects, is_seen, strict=True)
        if seen
    )
    causes.sort(key=lambda c: (c.error if c.effect is None else c.effect) < SEVERE)
    remarks = [*walk.remarks, *_without_effect(walk.divergences, is_seen)]
    reached, missing = _modules(returned, walk)
    floats = [v for v in tape.values if v.is_activation]
    return GraphReport(
        model.kind,
        tuple(causes),
        tuple(
            f"{w.candidate} is not {w.reference}: {w.message}" for w in parameters.wrong
        ),
        tuple(dict.fromkeys(map(_describe_table, walk.tables))),
        tuple(_incomplete(walk, parameters, tape)),
        Coverage(
            (len(reached), len(reached) + len(missing)),
            (len(walk.checked & walk.expected), len(walk.expected)),
            (len(parameters.matched), len(tape.parameters)),
            (sum(v.index in walk.matches for v in floats), len(floats)),
        ),
        walk.largest_error,
        tuple(missing),
        tuple(remarks),
    )  # fmt: skip


def _describe_table(table: Table) -> str:
    producer = table.value.producer
    where = shorten(producer.source) if producer is not None else "a constant of the function"
    shape = tuple(table.value.data.shape)
    return f"{where}, of shape {shape}: {table.error:.1e} from the reference's"


def _without_effect(divergences: Sequence[Divergence], is_seen: Sequence[bool]) -> Iterator[str]:
    """Yields what differs and changes no result, as masks do at padding."""
    hidden = [d for d, seen in zip(divergences, is_seen, strict=True) if not seen]
    if hidden:
        first = next((op for op in reversed(hidden[0].operators) if op.source), None)
        count = "1 value differs" if len(hidden) == 1 else f"{len(hidden)} values differ"
        place = shorten(first.source) if first else "a source unknown"
        yield f"{count}, the first at {place}; the results that are read stay the same"


def _cause(divergence: Divergence, walk: Walk, effect: float | None) -> RootCause:
    found = diagnose(divergence, walk)
    named = [op for op in divergence.operators if op.source]
    operator = found.operator or (named[-1] if named else divergence.value.producer)
    other = divergence.reference_value.producer
    reference = next((op for op in reversed(divergence.reference_operators) if op.source), other)
    return RootCause(
        operator.source if operator else "",
        reference.source if reference else "",
        found.text,
        divergence.error,
        tuple(op.name for op in divergence.operators),
        tuple(op.name for op in divergence.reference_operators),
        operator.module if operator else "",
        reference.module if reference else "",
        effect=effect,
    )


def _merge(causes: Iterable[RootCause]) -> list[RootCause]:
    """Returns each cause once, with the number of its places and its largest error."""
    found: dict[tuple[str, str, str], RootCause] = {}
    for cause in causes:
        key = cause.jax_source, cause.torch_source, cause.diagnosis
        first = found.get(key, cause)
        places = first.places + 1 if key in found else 1
        error = max(first.error, cause.error)
        known = [e for e in (first.effect, cause.effect) if e is not None]
        effect = max(known) if known else None
        found[key] = dataclasses.replace(first, places=places, error=error, effect=effect)
    return list(found.values())


def _modules(returned: Mapping[str, Sequence[Value]], walk: Walk) -> tuple[list[str], list[str]]:
    """Returns the modules of which an output was reached, and the others."""
    reached: list[str] = []
    missing: list[str] = []
    for path, values in returned.items():
        is_reached = any(value.index in walk.reached for value in values)
        (reached if is_reached else missing).append(path)
    return reached, missing


def _incomplete(walk: Walk, parameters: ParameterMatches, tape: Tape) -> list[str]:
    lines = list(walk.uncompared)
    if not tape.outputs:
        lines.append("the candidate returns no floats")
    needed = {v.index for v in tape.outputs}
    for operator in reversed(tape.operators):
        if any(value.index in needed for value in operator.outputs):
            needed |= {value.index for value in operator.inputs}
    lines += [
        f"the parameter {name} of the candidate has no effect on its results"
        for name, value in tape.parameters.items()
        if value.index not in needed and getattr(value.data, "dtype", np.dtype(int)).kind == "f"
    ]
    lines += [f"{name} computes in a dtype of its own" for name in sorted(tape.opaque)]
    return lines
