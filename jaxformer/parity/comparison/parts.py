"""Compares two models, or parts of them, whose modules are known to be the same.

It is the comparison by operators, and it is known which modules of the two sides are the same. So
it is known what must enter each module and leave it, and a module answers for its own code alone:
an early error hides no later one, and a bug shows in the module that has it and in none around it.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from jaxformer.errors import UsageError
from jaxformer.parity.cores import widened
from jaxformer.parity.diagnosis.causes import find_causes
from jaxformer.parity.diagnosis.gradients import STOPPED, STOPPED_IN_PART
from jaxformer.parity.findings import Difference, Node, RootCause
from jaxformer.parity.judging.coverage import CountedOperators
from jaxformer.parity.judging.divergences import Judged
from jaxformer.parity.judging.module_nodes import ModuleNodes
from jaxformer.parity.judging.module_rounding import Output
from jaxformer.parity.judging.pair_coverage import Called
from jaxformer.parity.judging.verdicts import arithmetic_stage, judge_node
from jaxformer.parity.matching.known_gradients import KnownGradients
from jaxformer.parity.matching.known_modules import KnownModules, Requirement
from jaxformer.parity.matching.known_parameters import known_parameters
from jaxformer.parity.matching.known_values import (
    required_choices,
    required_integers,
    required_masks,
)
from jaxformer.parity.matching.pairs import Pair, PairKey, depths_of, in_call_order
from jaxformer.parity.matching.reference_attention import (
    MaskState,
    ReferenceAttention,
    used_rows,
)
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.graph import first_shape
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.narrow_runs import NarrowRun
from jaxformer.parity.recording.operators.torch_run import TorchRun
from jaxformer.parity.segments.backward_runs import run_backward
from jaxformer.parity.segments.requirements import Requirements
from jaxformer.parity.segments.results import Results, called, compare_results
from jaxformer.parity.segments.walk import Walk
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.rules import Link


@dataclasses.dataclass(frozen=True)
class Part:
    """Two models, or parts of them.

    Attributes:
        reference: after its forward pass, with the calls of its modules.
        index: of the reference's values, noted during that pass.
        candidate: the model, which marks what enters its modules.
        inputs: of the candidate.
        pairs: the modules that are the same.
        parents: the pair around each pair.
        links: which arrays of both sides hold the same numbers.
        wanted: the reference's arrays, by the names and in the layout of the candidate's.
        weights: how far the candidate's own are from them, by name.
        kinds: the classes of the candidate's modules, by path.
        attentions: paths of the candidate's attentions.
        backward: whether gradients are compared.
        named: inputs of the candidate by name.
        depths: how many pairs are around each pair in the whole models, where these are a part.
        raw: what the candidate makes in the whole model, where that is not what it makes here.
        answered: pairs that are not run here: what they return is given.
        masks: what masks must allow that enter modules whose inside is not here, by path.
    """

    reference: TorchRun
    index: Index
    candidate: Candidate
    inputs: Sequence[Any]
    pairs: Sequence[Pair]
    parents: Mapping[PairKey, PairKey | None]
    links: Sequence[Link]
    wanted: Mapping[str, StoredTensor]
    weights: Mapping[str, Difference]
    kinds: Mapping[str, str]
    attentions: Collection[str]
    backward: bool
    named: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    depths: Mapping[PairKey, int] = dataclasses.field(default_factory=dict)
    raw: NarrowRun | None = None
    answered: Collection[PairKey] = ()
    masks: Mapping[str, MaskState] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found of a part.

    Attributes:
        nodes: of the pairs, in the order of calls; their wrong weights are not described yet.
        causes: the lines of code of their bugs.
        remarks: what else is to be said.
        called: which modules were called.
        masks: what masks must allow that enter from outside, by path.
        outputs: what the pairs return first.
        incomplete: a sentence on each result and each choice that was not compared.
        operators: how many of both sides were compared.
    """

    nodes: dict[PairKey, Node]
    causes: tuple[RootCause, ...] = ()
    remarks: tuple[str, ...] = ()
    called: Called = dataclasses.field(default_factory=Called)
    masks: Mapping[str, MaskState] = dataclasses.field(default_factory=dict)
    outputs: tuple[Output, ...] = ()
    incomplete: tuple[str, ...] = ()
    operators: CountedOperators = dataclasses.field(default_factory=CountedOperators)


def compare_part(part: Part) -> Found:
    """Compares two parts; use it under ``jax.enable_x64(True)``.

    Raises:
        UsageError: the whole models cannot be laid beside each other.
    """
    try:
        return _Comparison(part).run()
    finally:
        part.reference.close()


class _Comparison:
    """The comparison of a part."""

    def __init__(self, part: Part):
        self.part = part
        self.attention = ReferenceAttention(part.reference.softmaxes)
        self.walk = Walk(part.reference.tape, index=part.index)
        self.walk.known_parameters = known_parameters(part.links, part.reference, part.wanted)
        known = {match.value for match in self.walk.known_parameters.values()}
        values = part.reference.tape.values
        self.walk.index.add(value for value in values if first_shape(value) not in known)
        self.choices = _choices(part)
        numbers = {name: partial(_in_float64, tensor) for name, tensor in part.wanted.items()}
        self.own = JaxRun(
            part.candidate, part.inputs, part.named, self.walk.candidate, numbers,
            part.backward, True, self.choices,
        )  # fmt: skip
        self.known = KnownModules(
            part.pairs, part.parents, self.own.marks, part.reference.calls, self.walk.matches,
            (self.walk.candidate, part.reference.tape), part.answered,
        )  # fmt: skip
        whole = self.known.unmatched.get(("",))
        if whole is not None:
            raise UsageError(
                f"the models cannot be compared: {whole.message}; torch_call= and jax_call= say "
                "how each is called, given it and its inputs"
            )
        self.walk.owners = {
            path: pair.path
            for pair in part.pairs
            if self.known.calls[pair.candidate]
            for path in pair.candidate
        }

    def run(self) -> Found:
        """Goes through both passes."""
        part, walk, known = self.part, self.walk, self.known
        forward = Requirements(walk, self._used_rows)
        forward.add(known.forward())
        forward.add(required_integers(known, walk.candidate, part.reference.tape))
        forward.add(required_choices(known, walk.candidate, part.reference.tape))
        masks, outside = required_masks(
            known, part.attentions, part.masks, self.attention,
            (walk.candidate, part.reference.tape),
        )  # fmt: skip
        forward.add(masks)
        walk.after = forward.settle
        walk.advance()
        forward.settle_rest()
        settled = len(walk.divergences)
        results = compare_results(walk)
        forward.all += self._required_results(settled)
        depths = part.depths or depths_of(part.pairs, part.parents)
        maker = ModuleNodes(
            self._in_order(), depths, known, part.kinds, part.reference.kinds_of_all, walk,
            self.attention,
        )  # fmt: skip
        contexts = maker.contexts(forward.all, part.raw)
        outputs = tuple(maker.outputs())
        causes = find_causes([Judged(divergence) for divergence in walk.divergences], walk)
        backward = Requirements(walk, self._used_rows)
        remarks: list[str] = []
        if part.backward:
            walk.keep_corrections()
            gradients = run_backward(part.reference, self.own, walk, results, self._without_unused)
            if isinstance(gradients, str):
                remarks.append(f"gradients were not compared: {gradients}")
            else:
                cotangents = [one for one in self.own.cotangents if one[0].is_cotangent]
                wanted = KnownGradients(known, cotangents, self.own.differentiated)
                backward.add(wanted.of_modules())
                backward.add(wanted.of_parameters(part.links, part.reference, *gradients))
                walk.after = backward.settle
                walk.advance_backward()
                backward.settle_rest()
        nodes = {
            key: judge_node(dataclasses.replace(node, **contexts.get(key, {})))
            for key, node in maker.make(forward.all, backward.all, part.weights).items()
        }
        causes += find_causes([*self._only_backward()], walk)
        run = Called({*part.reference.returned}, {mark.path for mark, _ in self.own.marks})
        lines = tuple(self._of_nodes(causes, nodes))
        remarks += walk.remarks
        incomplete = tuple(self._incomplete(results))
        operators = CountedOperators.of(walk)
        return Found(nodes, lines, tuple(remarks), run, outside, outputs, incomplete, operators)

    def _in_order(self) -> list[Pair]:
        """Returns the pairs in the order of calls."""
        own: dict[str, int] = {}
        for place, (mark, _) in enumerate(self.own.marks):
            own.setdefault(mark.path, place)
        calls = self.part.reference.calls
        right = {path: each[0].begin for path, each in calls.items() if each}
        return in_call_order(self.part.pairs, self.part.parents, own, right)

    def _required_results(self, settled: int) -> Iterator[Requirement]:
        """Yields what is wrong in results beside what modules return: code around all of them.

        Args:
            settled: how many wrong segments were found of modules.
        """
        keys = [pair.candidate for pair in self.part.pairs]
        owner = ("",) if ("",) in keys else keys[0]
        for found in self.walk.divergences[settled:]:
            yield Requirement(
                owner, "its result", [found.required], found.required_reference,
                difference=found.difference,
            )  # fmt: skip

    def _incomplete(self, results: Results) -> Iterator[str]:
        """Yields a sentence on each result and each choice that was not compared."""
        yield from results.uncompared
        for place, (own, right) in results.misshapen.items():
            name = called(self.walk.candidate.output_names[place])
            yield f"{name} has shape {own.shape}, the reference's {right.shape}"
        for path in self.choices:
            if not self.known.calls.get((path,)):
                yield f"what {path} chooses was not compared: the reference's choice was taken"

    def _only_backward(self) -> Iterator[Judged]:
        """Yields the wrong segments of the backward pass that no wrong one of a module explains.

        A wrong formula has a wrong derivative.
        """
        divergences = self.walk.divergences
        wrong = {self.walk.owner(d) for d in divergences if not d.is_backward}
        for divergence in divergences:
            if divergence.is_backward and self.walk.owner(divergence) not in wrong:
                yield Judged(divergence)

    def _of_nodes(
        self, causes: Iterable[RootCause], nodes: Mapping[PairKey, Node]
    ) -> Iterator[RootCause]:
        """Yields of each pair with a bug of its own the cause that says most."""
        by_path = {node.path: node for node in nodes.values()}
        stops: dict[str, set[str]] = defaultdict(set)
        if any(cause.is_backward for cause in causes):
            paths = {path: pair.path for pair in self.part.pairs for path in pair.candidate}
            for module, source in self.own.stops_of_modules():
                stops[paths.get(module, self.walk.owner_of(module))].add(source)
        seen = set()
        for cause in sorted(causes, key=lambda cause: not cause.diagnosis):
            path = cause.candidate_path
            node = by_path.get(path)
            if path in seen or (node is not None and arithmetic_stage(node) != cause.stage):
                continue
            seen.add(path)
            source, lines = cause.jax_source, stops[path]
            if cause.diagnosis in (STOPPED, STOPPED_IN_PART):
                # The line that reads what gets no gradient is right.
                source = next(iter(lines)) if len(lines) == 1 else ""
            yield dataclasses.replace(
                cause,
                jax_source=source,
                jax_module=path,
                torch_module=cause.torch_module if node is None else node.reference_path,
                candidate_path="",
                effect=None,
            )

    def _used_rows(self, array: np.ndarray, one: Requirement) -> Iterator[np.ndarray]:
        unused = [*self.attention.padding.values()]
        for call in self.known.calls[one.owner][:1]:
            idle = self.attention.idle(call.right[0].begin, call.right[0].end)
            unused += [] if idle is None else [idle]
        yield from used_rows(array, unused)

    def _without_unused(self, cotangent: np.ndarray) -> np.ndarray:
        """Returns a cotangent after it got zeros where nobody uses a result."""
        for rows in self.attention.padding.values():
            if cotangent.shape[:2] == rows.shape:
                cotangent[rows] = 0.0
        return cotangent


def _choices(part: Part) -> dict[str, list[list[np.ndarray]]]:
    """Returns the integers that modules of the reference chose, by the path of the candidate's."""
    calls = {
        pair.candidate[0]: part.reference.calls[pair.reference[0]]
        for pair in part.pairs
        if len(pair.candidate) == 1
        and pair.can_run_isolated
        and part.reference.calls.get(pair.reference[0])
    }
    return {
        path: [[value.data for value in call.chosen] for call in each]
        for path, each in calls.items()
        if any(call.chosen for call in each)
    }


def _in_float64(tensor: StoredTensor) -> np.ndarray:
    return widened(np.asarray(tensor.read()))
