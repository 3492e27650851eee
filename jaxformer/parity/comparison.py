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
from jaxformer.parity import jax_side, torch_side
from jaxformer.parity.alone import Alone, Key
from jaxformer.parity.context import in_context
from jaxformer.parity.meetings import UNCALLED
from jaxformer.parity.memory import LARGE, release
from jaxformer.parity.pairing import TIED_HEAD, Pair, parents_of
from jaxformer.parity.report import Difference, Node, Report
from jaxformer.parity.settings import compare_settings, flags, name_causes
from jaxformer.parity.slopes import same_slopes
from jaxformer.parity.tables import share_tables
from jaxformer.parity.theirs import Caller, Theirs
from jaxformer.parity.verdicts import explain, judged, worst
from jaxformer.parity.weights import compare_weights, swapped_layers
from jaxformer.porting.plans import Plan
from jaxformer.porting.rules import Link


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
        theirs = Theirs(
            torch_module, inputs, dialect=dialect, names=names, backward=backward,
            call=torch_call, config=jax_module, once=True,
        )  # fmt: skip
        if jax_module is None:
            jax_module = theirs.ported()
        return compare_with(
            theirs, jax_module, inputs if jax_inputs is None else jax_inputs,
            dtype=dtype, call=jax_call, about=about,
        )  # fmt: skip


def assert_parity(torch_module: Any, jax_module: Any = None, *args: Any, **kwargs: Any) -> Report:
    """``compare``, for a test: the report if all is exact or rounding.

    Raises:
        AssertionError: there is a bug; the message names every module that has one.
    """
    report = compare(torch_module, jax_module, *args, **kwargs)
    if report.verdict == "bug":
        found = "; ".join(f"{n.path or 'the model'}: {n.message}" for n in report.culprits)
        raise AssertionError(found)
    return report


def compare_with(
    theirs: Theirs,
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
        theirs,
        jax_module,
        theirs.inputs if inputs is None else inputs,
        dtype or jax_side.dtype_of(jax_module),
        call or (lambda module, given: module(*given)),
    ).report(about or {})


class _Comparison:
    """One module of ours beside theirs."""

    def __init__(
        self, theirs: Theirs, jax_module: Any, inputs: Sequence[Any], dtype: str, call: Caller
    ):
        self.theirs, self.module = theirs, jax_module
        self.inputs = [torch_side.as_numpy(x) for x in inputs]
        self.dtype, self.call = dtype, call
        self.pairs = theirs.pairs_with(jax_module)
        self.parents = parents_of(self.pairs)
        self.weights: dict[str, Difference] = {}
        self.told: dict[str, str] = {}
        self.untrained: list[str] = []
        # Gradients of theirs in our layout, where some of one array were not yet asked for.
        self.converted: dict[tuple[str, ...], dict[str, np.ndarray]] = {}
        if theirs.plan is not None:
            self.weights, self.told = self._compare_weights(theirs.plan)

    def report(self, about: Mapping[str, Any]) -> Report:
        """Runs everything."""
        with same_slopes(self.theirs.module):
            return self._report(about)

    def _report(self, about: Mapping[str, Any]) -> Report:
        theirs = self.theirs
        settings = flags()
        if theirs.plan is not None and not theirs.foreign_settings:
            settings = compare_settings(self.module, theirs.plan.module) + settings
        # Of a large model weights are cast as they are needed: all of them in float64 would be the
        # largest thing here.
        working = None if theirs.size > LARGE else "float64"
        ours = jax_side.in_dtype(self.module, working)
        theirs.count_outputs = lambda: len(jax_side.floats(self._trace(ours, "float64")[1]))
        trace = theirs.trace
        tables = share_tables(ours, theirs.module, trace)
        calls = self._trace(ours, "float64")[0]
        different = {name for name, difference in self.weights.items() if difference.error}
        if different and theirs.plan is not None:
            tensors = theirs.plan.tensors
            ours = jax_side.with_parameters(ours, {n: tensors[n].read() for n in different})
            ours = jax_side.in_dtype(ours, working)
        alone = Alone(ours, calls, trace, self.pairs, self.parents, theirs.backward, self._gradient)
        if not alone.meetings[("",)]:
            raise UsageError(f"the models cannot be compared: {alone.reasons[('',)]}")
        nodes = {}
        for pair in self._in_order(calls):
            if alone.reasons[pair.ours] != UNCALLED or pair.parameters:
                nodes[pair.ours] = self._node(pair, alone)
                for table in tables:
                    if (table.path.rpartition(".")[0],) == pair.ours:
                        nodes[(table.path,)] = table
        nodes |= self._contexts(nodes, alone)
        judged_nodes = [judged(node, self._look_of_weights(key)) for key, node in nodes.items()]
        return Report(
            "grad" if theirs.backward else "forward",
            self.dtype,
            tuple(name_causes(judged_nodes, settings)),
            tuple(settings),
            about=dict(about),
            remarks=tuple(self._remarks()),
        )

    def _remarks(self) -> Iterable[str]:
        if self.theirs.foreign_settings:
            yield f"their settings make no model of ours: {self.theirs.foreign_settings}"
        if self.untrained:
            yield f"theirs gives padding tokens no gradient, ours does: {', '.join(self.untrained)}"
        yield from swapped_layers([n for n, d in self.weights.items() if d.is_bug], self.told)

    def _compare_weights(self, plan: Plan) -> tuple[dict[str, Difference], dict[str, str]]:
        ours = {n: np.asarray(a) for n, a in jax_side.parameters_of(self.module).items()}
        problems = [f"missing {name}" for name in sorted(plan.tensors.keys() - ours.keys())]
        problems += [f"unexpected {name}" for name in sorted(ours.keys() - plan.tensors.keys())]
        problems += [
            f"{name} has shape {ours[name].shape}, theirs gives {tensor.shape}"
            for name, tensor in plan.tensors.items()
            if name in ours and ours[name].shape != tensor.shape
        ]
        if problems:
            raise UsageError("the JAX module is not of their architecture: " + "; ".join(problems))
        return compare_weights(ours, plan.tensors)

    def _trace(self, module: Any, dtype: str) -> tuple[dict[str, jax_side.Call], Any]:
        """One pass of ours."""
        inputs = torch_side.in_dtype(self.inputs, dtype)
        cast = jax_side.in_dtype(module, dtype)
        found = jax_side.trace(cast, lambda module: self.call(module, inputs))
        del cast
        release(self.theirs.size)
        return found

    def _contexts(self, nodes: Mapping[Key, Node], alone: Alone) -> dict[Key, Node]:
        """The nodes with what they did in the whole models, as these are used."""
        low: dict[str, jax_side.Call] = {}
        their_low = None
        if self.dtype != "float64":
            their_low = self.theirs.low_trace(self.dtype)
            with jax.enable_x64(False):
                low = self._trace(self.module, self.dtype)[0]
        return {
            key: dataclasses.replace(
                nodes[key], **in_context(meetings[0], low, their_low, self.dtype)
            )
            for key, meetings in alone.meetings.items()
            if meetings
        }

    def _node(self, pair: Pair, alone: Alone) -> Node:
        kind = type(jax_side.resolve(self.module, pair.ours[0])[0]).__name__
        trace = self.theirs.trace
        found = [trace.calls[path].order for path in pair.theirs if path in trace.calls]
        node = Node(
            pair.path,
            pair.their_path,
            kind if len(pair.ours) == 1 else f"{len(pair.ours)} {kind}",
            type(self.theirs.modules[pair.theirs[0]]).__name__,
            self._depth(pair),
            min(found, default=0),
            parameters={n: self.weights[n] for n in pair.parameters if n in self.weights},
        )
        meetings = alone.meetings[pair.ours]
        if not meetings:
            return dataclasses.replace(node, message=alone.reasons[pair.ours])
        result = alone.run(pair)
        return dataclasses.replace(
            node,
            forward=worst(result.forward),
            message=explain(result.forward, list(result.backward.items())),
            backward=result.backward,
        )

    def _look_of_weights(self, key: Key) -> str:
        """What is said of those of its weights that differ."""
        parameters = next((pair.parameters for pair in self.pairs if pair.ours == key), ())
        off = [n for n in parameters if n in self.weights and self.weights[n].is_bug]
        shown = [
            (n.removeprefix(f"{key[0]}.") if len(key) == 1 else n, self.told.get(n)) for n in off
        ]
        listed = ", ".join(f"{name} ({look})" if look else name for name, look in shown)
        return f"its weights differ: {listed}" if off else ""

    def _gradient(self, name: str, pair: Pair, own: np.ndarray) -> np.ndarray | None:
        """Their gradient of one of our parameters, as far as it came through a pair."""
        plan, gradients = self.theirs.plan, self.theirs.trace.gradients
        link = self._links.get(name)
        if plan is None or link is None:
            return None
        names = list(link.theirs)
        if pair.ours == (TIED_HEAD,):
            names = [f"{pair.theirs[0]}.{name.rpartition('.')[2]}" for name in names]
        converted = self.converted.get(tuple(names))
        if converted is None:
            # Of what nothing is trained by there is none.
            arrays = [
                gradients.get(name, np.zeros(shape))
                for name, shape in zip(names, link.their_shapes, strict=True)
            ]
            converted = dict(zip(link.ours, link.to_ours(arrays), strict=True))
            self.converted[tuple(names)] = converted
        gradient = converted.pop(name)
        if not converted:
            del self.converted[tuple(names)]
            # Together they are as large as the model.
            for each in names if self.theirs.once else ():
                gradients.pop(each, None)
        padding = getattr(self.theirs.modules[pair.theirs[0]], "padding_idx", None)
        if padding is not None and name.endswith("embedding"):
            # Their row of the padding token is never trained: no one's arithmetic is wrong.
            if not np.array_equal(gradient[padding], own[padding]):
                self.untrained.append(f"{pair.their_path} (row {padding})")
            gradient[padding] = own[padding]
        return gradient

    @functools.cached_property
    def _links(self) -> dict[str, Link]:
        links = () if self.theirs.plan is None else self.theirs.plan.links
        return {name: link for link in links for name in link.ours}

    def _depth(self, pair: Pair) -> int:
        depth, parent = 0, self.parents[pair.ours]
        while parent is not None:
            depth, parent = depth + 1, self.parents[parent]
        return depth

    def _in_order(self, calls: Mapping[str, jax_side.Call]) -> list[Pair]:
        """A parent before its parts, and these in the order of calls."""
        trace = self.theirs.trace
        inside: dict[Any, list[Pair]] = {}
        for pair in self.pairs:
            inside.setdefault(self.parents[pair.ours], []).append(pair)

        def place(pair: Pair) -> tuple[int, int]:
            theirs = [trace.calls[p].order for p in pair.theirs if p in trace.calls]
            ours = [calls[p].order for p in pair.ours if p in calls]
            return min(theirs, default=len(trace.calls)), min(ours, default=len(calls))

        def below(parent: Any) -> Iterable[Pair]:
            for pair in sorted(inside.get(parent, ()), key=place):
                yield pair
                yield from below(pair.ours)

        return list(below(None))
