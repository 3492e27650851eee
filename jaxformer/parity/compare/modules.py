"""Two models side by side: every pair of modules alone, on the same inputs, in float64.

Each module is run on *their* inputs, with *their* weights, and its parts answer with *their*
outputs. So what is judged is a module's own arithmetic: an early error hides no later one, and a
bug shows in the module that has it and in none around it. Weights are compared by themselves.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.errors import UsageError
from jaxformer.parity.compare.context import in_context
from jaxformer.parity.compare.parameter_gradients import ReferenceGradients
from jaxformer.parity.compare.settings import compare_settings, flags, name_causes
from jaxformer.parity.compare.teacher_forcing import Key, TeacherForcedRunner
from jaxformer.parity.compare.verdicts import explain, judged, worst
from jaxformer.parity.compare.weights import compare_weights, swapped_layers
from jaxformer.parity.matching.alibi_slopes import match_alibi_slopes
from jaxformer.parity.matching.calls import UNCALLED
from jaxformer.parity.matching.modules import Pair, in_order, parents_of
from jaxformer.parity.matching.position_ids import position_ids_from_mask
from jaxformer.parity.matching.rotary_tables import share_tables
from jaxformer.parity.report.model import Difference, Node, Report
from jaxformer.parity.trace import jax_trace as jax_trace
from jaxformer.parity.trace import torch_trace as torch_trace
from jaxformer.parity.trace.memory import LARGE, release
from jaxformer.parity.trace.reference_run import Caller, ReferenceRun
from jaxformer.porting.mapping.plans import Plan


def compare(
    torch_module: Any,
    jax_module: Any = None,
    inputs: Sequence[Any] = (),
    *,
    jax_inputs: Sequence[Any] | None = None,
    dialect: str | None = None,
    names: Mapping[str, str] | None = None,
    backward: bool = True,
    dtype: str | None = None,
    torch_call: Caller | None = None,
    jax_call: Caller | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """Runs two models on the same inputs and judges every pair of modules by itself.

    Args:
        torch_module: theirs; it is not changed.
        jax_module: ours, or any NNX module; it is not changed. Default what ``from_torch`` makes
            of theirs.
        inputs: positional arguments of theirs: numpy arrays, tensors, None.
        jax_inputs: of ours, where they differ (masks of another convention); default the same.
        dialect: whose classes theirs are; by default the class tells.
        names: paths of modules of ours to paths of theirs, instead of a dialect: for modules that
            are nobody's dialect. Weights are then not compared: ours are run with their own, so
            that a wrong one shows in what its module gives.
        backward: whether to compare gradients too.
        dtype: the dtype whose rounding is reported; default that of our weights.
        torch_call: how theirs is called, given it and its inputs.
        jax_call: how ours is called.
        about: what to note in the report.

    Raises:
        UsageError: torch is missing, the models do not fit one another, or no dialect is theirs.
        CheckpointError: their arrays are not those of the dialect; all that is wrong is listed.
    """
    with jax.enable_x64(True):
        reference = ReferenceRun(
            torch_module, inputs, dialect=dialect, names=names, backward=backward,
            call=torch_call, config=jax_module, once=True,
        )  # fmt: skip
        if jax_module is None:
            jax_module = reference.ported()
        return compare_with(
            reference, jax_module, inputs if jax_inputs is None else jax_inputs,
            dtype=dtype, call=jax_call, about=about,
        )  # fmt: skip


def assert_parity(torch_module: Any, jax_module: Any = None, *args: Any, **kwargs: Any) -> Report:
    """``compare``, for a test: the report if all is exact or rounding.

    Raises:
        AssertionError: there is a bug; the message names every module that has one.
    """
    report = compare(torch_module, jax_module, *args, **kwargs)
    if report.verdict == "bug":
        found = "; ".join(f"{n.path or 'the model'}: {n.message}" for n in report.root_causes)
        raise AssertionError(found)
    return report


def compare_with(
    reference: ReferenceRun,
    jax_module: Any,
    inputs: Sequence[Any] | None = None,
    *,
    dtype: str | None = None,
    call: Caller | None = None,
    about: Mapping[str, Any] | None = None,
) -> Report:
    """``compare``, with a side of theirs that may have been run already.

    To be used under ``jax.enable_x64(True)``. Arguments as in ``compare``.
    """
    return _Comparison(
        reference,
        jax_module,
        reference.inputs if inputs is None else inputs,
        dtype or jax_trace.dtype_of(jax_module),
        call,
    ).report(about or {})


class _Comparison:
    """One module of ours beside theirs."""

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
        # Positions of tokens, where theirs counts them otherwise than by their places.
        self.counted: dict[str, np.ndarray] = {}
        self.pairs = reference.pairs_with(jax_module)
        self.parents = parents_of(self.pairs)
        self.weights: dict[str, Difference] = {}
        self.told: dict[str, str] = {}
        if reference.plan is not None:
            self.weights, self.told = self._compare_weights(reference.plan)

    def report(self, about: Mapping[str, Any]) -> Report:
        """Runs everything."""
        with match_alibi_slopes(self.reference.module):
            return self._report(about)

    def _report(self, about: Mapping[str, Any]) -> Report:
        reference = self.reference
        settings = flags()
        if reference.plan is not None and not reference.source_settings:
            settings = compare_settings(self.module, reference.plan.module) + settings
        # Of a large model weights are cast as they are needed: all of them in float64 would be the
        # largest thing here.
        working = None if reference.size > LARGE else "float64"
        candidate = jax_trace.in_dtype(self.module, working)
        first = functools.cache(lambda: self._trace(candidate, "float64"))
        reference.count_outputs = lambda: len(jax_trace.floats(first()[1]))
        if reference.size > LARGE:
            # The pass of theirs leaves little memory for this.
            first()
        trace = reference.trace
        tables = share_tables(candidate, reference.module, trace)
        if self.call is None:
            self.counted = position_ids_from_mask(self.module, self.pairs, trace)
        calls = (self._trace(candidate, "float64") if tables or self.counted else first())[0]
        different = {name for name, difference in self.weights.items() if difference.error}
        if different and reference.plan is not None:
            tensors = reference.plan.tensors
            candidate = jax_trace.with_parameters(
                candidate, {n: tensors[n].read() for n in different}
            )
            candidate = jax_trace.in_dtype(candidate, working)
        gradients = ReferenceGradients(reference)
        alone = TeacherForcedRunner(
            candidate, calls, trace, self.pairs, self.parents, reference.backward, gradients.of
        )
        if not alone.matched_calls[("",)]:
            raise UsageError(f"the models cannot be compared: {alone.reasons[('',)]}")
        nodes = self._nodes(alone, in_order(self.pairs, self.parents, calls, trace.calls), tables)
        nodes |= self._contexts(nodes, alone)
        judged_nodes = [judged(node, self._look_of_weights(key)) for key, node in nodes.items()]
        return Report(
            "grad" if reference.backward else "forward",
            self.dtype,
            tuple(name_causes(judged_nodes, settings)),
            tuple(settings),
            about=dict(about),
            remarks=tuple(self._remarks(gradients.untrained)),
        )

    def _remarks(self, untrained: Sequence[str]) -> Iterable[str]:
        if self.reference.source_settings:
            yield f"their settings make no model of ours: {self.reference.source_settings}"
        if untrained:
            yield f"theirs gives padding tokens no gradient, ours does: {', '.join(untrained)}"
        if self.counted:
            yield (
                "theirs counts positions by its mask: ours was called with the same positions, "
                "and needs them wherever there is padding before a token"
            )
        yield from swapped_layers([n for n, d in self.weights.items() if d.is_bug], self.told)

    def _compare_weights(self, plan: Plan) -> tuple[dict[str, Difference], dict[str, str]]:
        candidate = {n: np.asarray(a) for n, a in jax_trace.parameters_of(self.module).items()}
        problems = [f"missing {name}" for name in sorted(plan.tensors.keys() - candidate.keys())]
        problems += [
            f"unexpected {name}" for name in sorted(candidate.keys() - plan.tensors.keys())
        ]
        problems += [
            f"{name} has shape {candidate[name].shape}, theirs gives {tensor.shape}"
            for name, tensor in plan.tensors.items()
            if name in candidate and candidate[name].shape != tensor.shape
        ]
        if problems:
            raise UsageError("the JAX module is not of their architecture: " + "; ".join(problems))
        return compare_weights(candidate, plan.tensors)

    def _trace(self, module: Any, dtype: str) -> tuple[dict[str, jax_trace.Call], Any]:
        """One pass of ours."""
        inputs = torch_trace.in_dtype(self.inputs, dtype)
        cast = jax_trace.in_dtype(module, dtype)
        found = jax_trace.trace(cast, lambda module: self._call(module, inputs))
        del cast
        release(self.reference.size)
        return found

    def _call(self, module: Any, inputs: Sequence[Any]) -> Any:
        if self.call is not None:
            return self.call(module, inputs)
        return module(*inputs, **self.counted)

    def _contexts(self, nodes: Mapping[Key, Node], alone: TeacherForcedRunner) -> dict[Key, Node]:
        """The nodes with what they did in the whole models, as these are used."""
        low: dict[str, jax_trace.Call] = {}
        reference_low = None
        if self.dtype != "float64":
            reference_low = self.reference.low_trace(self.dtype)
            with jax.enable_x64(False):
                low = self._trace(self.module, self.dtype)[0]
        return {
            key: dataclasses.replace(
                nodes[key],
                **in_context(matched_calls[0], low, reference_low, self.dtype, alone.padding),
            )
            for key, matched_calls in alone.matched_calls.items()
            if matched_calls
        }

    def _nodes(
        self, alone: TeacherForcedRunner, pairs: Sequence[Pair], tables: Iterable[Node]
    ) -> dict[Key, Node]:
        """Every pair judged, in their order, and each table after what uses it."""
        sizes = {name: a.size for name, a in jax_trace.parameters_of(self.module).items()}

        def is_heavy(pair: Pair) -> bool:
            size = sum(sizes[name] for name in pair.parameters)
            return size > LARGE and not alone.parts.get(pair.candidate)

        found = {}
        # The heaviest last, when the gradients of all others have been let go.
        for pair in sorted(pairs, key=is_heavy):
            if alone.reasons[pair.candidate] != UNCALLED or pair.parameters:
                found[pair.candidate] = self._node(pair, alone)
            if self.reference.once:
                alone.let_go(pair)
                release(self.reference.size)
        nodes = {}
        for pair in pairs:
            if pair.candidate in found:
                nodes[pair.candidate] = found[pair.candidate]
                for table in tables:
                    if (table.path.rpartition(".")[0],) == pair.candidate:
                        nodes[(table.path,)] = table
        return nodes

    def _node(self, pair: Pair, alone: TeacherForcedRunner) -> Node:
        kind = type(jax_trace.resolve(self.module, pair.candidate[0])[0]).__name__
        trace = self.reference.trace
        found = [trace.calls[path].order for path in pair.reference if path in trace.calls]
        node = Node(
            pair.path,
            pair.reference_path,
            kind if len(pair.candidate) == 1 else f"{len(pair.candidate)} {kind}",
            type(self.reference.modules[pair.reference[0]]).__name__,
            self._depth(pair),
            min(found, default=0),
            parameters={n: self.weights[n] for n in pair.parameters if n in self.weights},
        )
        matched_calls = alone.matched_calls[pair.candidate]
        if not matched_calls:
            return dataclasses.replace(node, message=alone.reasons[pair.candidate])
        result = alone.run(pair)
        return dataclasses.replace(
            node,
            forward=worst(result.forward),
            message=explain(result.forward, list(result.backward.items())),
            backward=result.backward,
        )

    def _look_of_weights(self, key: Key) -> str:
        """What is said of those of its weights that differ."""
        parameters = next((pair.parameters for pair in self.pairs if pair.candidate == key), ())
        off = [n for n in parameters if n in self.weights and self.weights[n].is_bug]
        shown = [
            (n.removeprefix(f"{key[0]}.") if len(key) == 1 else n, self.told.get(n)) for n in off
        ]
        listed = ", ".join(f"{name} ({look})" if look else name for name, look in shown)
        return f"its weights differ: {listed}" if off else ""

    def _depth(self, pair: Pair) -> int:
        depth, parent = 0, self.parents[pair.candidate]
        while parent is not None:
            depth, parent = depth + 1, self.parents[parent]
        return depth
