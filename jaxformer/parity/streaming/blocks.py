"""What is found of one block, which is compared as a model of its own."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxformer.parity.comparison.modules import describe_modules, with_table
from jaxformer.parity.comparison.parts import Found, Part, compare_part
from jaxformer.parity.findings import Difference, Node
from jaxformer.parity.judging.coverage import CountedOperators
from jaxformer.parity.judging.module_rounding import with_rounding
from jaxformer.parity.judging.pair_coverage import Called
from jaxformer.parity.judging.weights import compare_weight, weight_difference
from jaxformer.parity.matching.arguments import aligned, laid_as
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.jax_values import is_float
from jaxformer.parity.recording.operators.narrow_runs import (
    NarrowRun,
    run_candidate_in,
    run_reference_in,
)
from jaxformer.parity.recording.operators.torch_run import run_torch
from jaxformer.parity.recording.torch_values import everything_in_float64, fresh
from jaxformer.parity.report.report import Report
from jaxformer.parity.streaming.candidate_side import EmptyCandidate, Given, Tensors
from jaxformer.parity.streaming.layout import Layout, is_within
from jaxformer.parity.streaming.reference_side import ReferencePass
from jaxformer.parity.streaming.state import State
from jaxformer.porting.mapping.rules import Link
from jaxformer.porting.mapping.transfer import read_view


@dataclasses.dataclass(frozen=True)
class Sides:
    """Both models, after their forward passes.

    Attributes:
        layout: their parts.
        links: which arrays of both sides hold the same numbers.
        skeleton: the candidate, with shapes in place of weights.
        own: the candidate's arrays, by name.
        wanted: the reference's arrays, by the same names and in the same layout.
        reference: its pass in float64.
        candidate: its pass in float64.
        low: the same two in the dtype under test; None if that is float64.
        dtype: under test.
        backward: whether gradients are compared.
        tables: nodes of tables of positions.
    """

    layout: Layout
    links: Sequence[Link]
    skeleton: Any
    own: Tensors
    wanted: Tensors
    reference: ReferencePass
    candidate: EmptyCandidate
    low: tuple[ReferencePass, EmptyCandidate] | None
    dtype: str
    backward: bool
    tables: Sequence[Node]

    def compare_weights(
        self, pairs: Sequence[Pair]
    ) -> tuple[dict[str, Difference], dict[str, str]]:
        """Returns the differences of the weights of pairs, and what the wrong ones look like."""
        differences: dict[str, Difference] = {}
        looks: dict[str, str] = {}
        for name in dict.fromkeys(name for pair in pairs for name in pair.parameters):
            own, wanted = read_view(self.own[name]), read_view(self.wanted[name])
            if own.flags.f_contiguous and wanted.flags.f_contiguous:
                # Both are transposed views: as they lie in memory they are compared faster.
                difference = weight_difference(own.T, wanted.T)
                if not difference.is_bug:
                    differences[name] = difference
                    continue
            own, wanted = np.ascontiguousarray(own), np.ascontiguousarray(wanted)
            differences[name], look = compare_weight(name, own, wanted)
            if look is not None:
                looks[name] = look
        return differences, looks


@dataclasses.dataclass(frozen=True)
class BlockResult:
    """What was found of one block.

    Attributes:
        found: of its pairs of modules.
        looks: what its wrong weights look like, by name.
    """

    found: Found
    looks: dict[str, str]

    def save(self, state: State, name: str) -> None:
        """Keeps what was found."""
        found = self.found
        notes = {
            "report": Report("", "", tuple(found.nodes.values()), causes=found.causes).to_json(),
            "keys": list(found.nodes),
            "looks": self.looks,
            "masks": list(found.masks),
            "remarks": found.remarks,
            "incomplete": found.incomplete,
            "operators": [found.operators.reference, found.operators.candidate],
            "called": [sorted(found.called.reference), sorted(found.called.candidate)],
        }
        state.save(name, [np.ascontiguousarray(mask) for mask in found.masks.values()], notes)

    @classmethod
    def load(cls, state: State, name: str) -> "BlockResult | None":
        """Returns what was found before; None if there is nothing."""
        known = state.load(name)
        if known is None:
            return None
        arrays, notes = known
        report = Report.from_dict(json.loads(notes["report"]))
        found = Found(
            dict(zip(map(tuple, notes["keys"]), report.nodes, strict=True)),
            report.causes,
            tuple(notes["remarks"]),
            Called(*notes["called"]),
            dict(zip(notes["masks"], arrays, strict=True)),
            incomplete=tuple(notes["incomplete"]),
            operators=CountedOperators(*map(tuple, notes["operators"])),
        )
        return cls(found, notes["looks"])


def compare_block(sides: Sides, path: str) -> BlockResult:
    """Compares one block.

    Args:
        sides: both models.
        path: of the block in the candidate.
    """
    pairs = sides.layout.pairs_of(path)
    unit = sides.layout.units[path].reference[0]
    weights, looks = sides.compare_weights(pairs)
    raw = _run_candidate(sides.candidate, path, sides.own, "float64")
    args, kwargs = fresh(sides.reference.given[unit])
    given = in_host_memory(sides.candidate.given[path])
    given = on_reference_inputs(given, torch_values.floats([list(args), dict(kwargs)]))
    index = Index()
    with sides.reference.loaded(unit, as_stored=True) as model:
        with everything_in_float64():
            reference = run_torch(
                model, args, kwargs, sides.backward, (), None, index.note, sides.layout.recorded
            )
        kinds, attentions = describe_modules(sides.skeleton, pairs)
        found = compare_part(
            Part(
                reference, index, sides.candidate.unit(path), list(given.args), pairs,
                sides.layout.inner_parents(pairs), sides.links,
                {name: t for name, t in sides.wanted.items() if is_within(name, path)},
                weights, kinds, attentions, sides.backward, named=given.kwargs,
                depths=sides.layout.depths, raw=raw,
            )
        )  # fmt: skip
    del reference, index
    if sides.low is not None:
        low_reference, low_candidate = sides.low
        nodes = with_rounding(
            found.nodes, found.outputs, sides.dtype,
            partial(_run_candidate, low_candidate, path, sides.own, sides.dtype),
            partial(_run_reference, low_reference, unit, sides.dtype),
        )  # fmt: skip
        found = dataclasses.replace(found, nodes=nodes)
    nodes = found.nodes
    for table in sides.tables:
        if is_within(table.path, path):
            nodes = with_table(nodes, table)
    return BlockResult(dataclasses.replace(found, nodes=nodes, outputs=()), looks)


def _run_candidate(candidate: EmptyCandidate, path: str, own: Tensors, dtype: str) -> NarrowRun:
    """Runs a block on what the candidate itself gave it."""
    given = in_host_memory(candidate.given[path])
    with jax.enable_x64(dtype == "float64"), candidate.loaded(path, own, dtype):
        return run_candidate_in(dtype, candidate.unit(path), given.args, given.kwargs)


def _run_reference(
    reference: ReferencePass, unit: str, dtype: str, paths: Collection[str]
) -> NarrowRun:
    """Runs a block of the reference in another dtype than float64."""
    args, kwargs = fresh(reference.given[unit])
    with reference.loaded(unit) as model:
        return run_reference_in(dtype, model, args, kwargs, None, paths)


def in_host_memory(given: Given) -> Given:
    """Returns arguments with arrays of numpy."""

    def on_host(leaf: Any) -> Any:
        return np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf

    return Given(*jax.tree.map(on_host, (given.args, given.kwargs)))


def on_reference_inputs(given: Given, tensors: Sequence[Any]) -> Given:
    """Returns what a module of the candidate was given, with the reference's numbers.

    Args:
        given: its own arguments, in host memory.
        tensors: the floats that the reference's module was given.
    """
    leaves, structure = jax.tree.flatten((given.args, given.kwargs))
    floats = [n for n, leaf in enumerate(leaves) if is_float(leaf)]
    arrays = [torch_values.array(tensor) for tensor in tensors]
    for place, n in aligned([leaves[n] for n in floats], arrays):
        leaves[floats[place]] = laid_as(arrays[n], leaves[floats[place]])
    args, kwargs = jax.tree.unflatten(structure, leaves)
    return Given(args, kwargs)
