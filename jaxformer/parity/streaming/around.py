"""What is around the blocks: both models, whose blocks return what the reference's returned."""

import copy
import dataclasses
import gc
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxformer.parity.comparison.modules import describe_modules, marked_candidate, with_table
from jaxformer.parity.comparison.parts import Found, Part, compare_part
from jaxformer.parity.judging.module_nodes import described
from jaxformer.parity.judging.module_rounding import Output, OutputPart, with_rounding
from jaxformer.parity.judging.verdicts import judge_node, worst_difference
from jaxformer.parity.matching.arguments import aligned, laid_as
from jaxformer.parity.matching.layouts import Layout
from jaxformer.parity.matching.values import Index
from jaxformer.parity.recording import torch_values
from jaxformer.parity.recording.jax_modules import resolve
from jaxformer.parity.recording.jax_values import float_arrays, is_whole
from jaxformer.parity.recording.operators.candidates import Candidate
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.narrow_runs import (
    NarrowRun,
    run_candidate_in,
    run_reference_in,
)
from jaxformer.parity.recording.operators.torch_run import run_torch
from jaxformer.parity.streaming.blocks import Sides, in_host_memory, on_reference_inputs
from jaxformer.parity.streaming.candidate_side import EmptyCandidate, Given
from jaxformer.parity.streaming.products import (
    arrays_of,
    candidate_slices,
    reference_slice,
    slices,
)
from jaxformer.parity.streaming.reference_side import (
    ReferencePass,
    answering,
    holder,
    replace_floats,
)

Call = Callable[[Any, Any], Any]


class Around:
    """Both models without their blocks and large heads, which are given what they return.

    What enters them is a result here, so that gradients come back from there too.

    Args:
        sides: both models.
        inputs: of the models.
        calls: how the reference and the candidate are called.
        found: of the blocks, by path.
    """

    def __init__(
        self,
        sides: Sides,
        inputs: Sequence[np.ndarray],
        calls: tuple[Call, Call],
        found: Mapping[str, Found],
    ):
        self.sides, self.inputs, self.calls, self.found = sides, inputs, calls, found
        layout = sides.layout
        # The reference's path of what is answered, by the candidate's.
        self.answered = {path: pair.reference[0] for path, pair in layout.units.items()}
        self.answered |= {path: pair.reference[0] for path, pair in layout.heads.items()}
        # Which floats that enter are the same on both sides.
        self.places = {
            other: aligned(
                _floats(in_host_memory(sides.candidate.given[path])),
                [*map(torch_values.array, torch_values.floats(list(sides.reference.given[other])))],
            )
            for path, other in self.answered.items()
        }

    def compare(self) -> tuple[Found, dict[str, str]]:
        """Compares what is around, and returns what its wrong weights look like too."""
        sides, layout = self.sides, self.sides.layout
        pairs = layout.outer_pairs()
        judged = [pair for pair in pairs if pair.path not in self.answered]
        weights, looks = sides.compare_weights(judged)
        raw = self._run_candidate(sides.candidate, "float64")
        sides.candidate.load_around(sides.wanted, "float64")
        made = self._made(sides.reference)
        kinds, attentions = describe_modules(sides.skeleton, pairs)
        index = Index()
        model = self._without_blocks(sides.reference)
        ported = {name for link in sides.links for name in link.source}
        buffers = [name for name, _ in model.named_buffers() if name in ported]
        with torch_values.everything_in_float64():
            reference = run_torch(
                model, [*self.inputs, *torch_values.fresh(made)], {}, sides.backward, buffers,
                self._call_reference, index.note, layout.recorded,
            )  # fmt: skip
        answers = [laid_as(*both) for both in self._both_made(made)]
        masks = {path: mask for each in self.found.values() for path, mask in each.masks.items()}
        found = compare_part(
            Part(
                reference, index, self._candidate(sides.candidate), [*self.inputs, *answers], pairs,
                layout.inner_parents(pairs), sides.links, {}, weights, kinds, attentions,
                sides.backward, raw=raw,
                answered={(path,) for path in self.answered}, masks=masks,
            )
        )  # fmt: skip
        del reference, index
        nodes = found.nodes
        if sides.low is not None:
            low_reference, low_candidate = sides.low
            nodes = with_rounding(
                nodes, [one for one in found.outputs if one.key[0] not in self.answered],
                sides.dtype,
                lambda: self._run_candidate(low_candidate, sides.dtype),
                lambda paths: self._run_reference(low_reference, sides.dtype, paths),
            )  # fmt: skip
        for table in sides.tables:
            if not layout.is_inner(table.path):
                nodes = with_table(nodes, table)
        return dataclasses.replace(found, nodes=nodes, outputs=()), looks

    def _made(self, reference: ReferencePass) -> list[Any]:
        """Returns the floats that blocks and heads of the reference return, one after another."""
        return [
            torch_values.floats(reference.made[path])[n]
            for path in self.answered.values()
            for n in _new_floats(self.sides.reference, path)
        ]

    def _both_made(self, made: Sequence[Any]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields what blocks and heads return first, of the reference and the candidate."""
        sides, place = self.sides, 0
        for path, other in self.answered.items():
            yield torch_values.array(made[place]), sides.candidate.made[path]
            place += len(_new_floats(sides.reference, other))

    def _without_blocks(self, reference: ReferencePass) -> Any:
        """Returns a copy of the reference that has an empty module in place of each block."""
        torch = torch_values.require_torch()
        paths = [path for path in self.answered.values() if not path.endswith(".attend")]
        empty = {id(reference.modules[path]): torch.nn.Identity() for path in paths}
        return copy.deepcopy(reference.module, dict(empty))

    def _call_reference(self, module: Any, given: Sequence[Any]) -> dict[str, Any]:
        """Calls the reference; what enters blocks and heads is among the results."""
        count = len(self.inputs)
        tensors = iter(given[count:])
        entered: dict[str, list[Any]] = {}
        reference = self.sides.reference

        def answer(path: str, original: Any, *args: Any, **kwargs: Any) -> Any:
            floats = torch_values.floats([list(args), dict(kwargs)])
            # What enters several blocks is one tensor, and each time a result of its own.
            entered[path] = [floats[n].clone() for _, n in self.places[path]]
            passed = {n: floats[m] for n, m in reference.passed_on[path].items()}
            every = iter({**waiting[path], **passed}[n] for n in itertools.count())
            return replace_floats(reference.made[path], every)

        waiting = {
            path: {n: next(tensors) for n in _new_floats(reference, path)}
            for path in self.answered.values()
        }
        with answering(module, self.sides.layout, answer):
            output = self.calls[0](module, list(given[:count]))
        named = {own: entered[path] for own, path in self.answered.items()}
        return {"entered": named, "output": torch_values.first_float(output)}

    def _candidate(self, candidate: EmptyCandidate) -> Candidate:
        """Returns the candidate, whose blocks and heads return what is given after the inputs."""
        count = len(self.inputs)
        waiting: dict[str, Any] = {}
        entered: dict[str, Any] = {}
        others: dict[str, Any] = {}

        def answer(path: str) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                floats = float_arrays((args, kwargs))
                entered[path] = [floats[n] for n, _ in self.places[self.answered[path]]]
                # Nothing else reads the masks.
                others[path] = [leaf for leaf in jax.tree.leaves((args, kwargs)) if is_whole(leaf)]
                return waiting[path]

            return called

        def call(module: Any, *given: Any) -> dict[str, Any]:
            waiting.update(zip(self.answered, given[count:], strict=True))
            output = self.calls[1](module, list(given[:count]))
            output = float_arrays(output)[0]
            return {"entered": dict(entered), "others": dict(others), "output": output}

        names = {
            name: variable.get_value()
            for name, variable in candidate.variables.items()
            if candidate.is_around(name)
        }
        return candidate.as_model(
            names, call, answers={path: answer(path) for path in self.answered}
        )

    def _run_candidate(self, candidate: EmptyCandidate, dtype: str) -> NarrowRun:
        """Runs what is around the blocks on what the candidate's own blocks return."""
        with jax.enable_x64(dtype == "float64"):
            candidate.load_around(self.sides.own, dtype)
            made = [np.asarray(candidate.made[path]) for path in self.answered]
            return run_candidate_in(dtype, self._candidate(candidate), [*self.inputs, *made], {})

    def _run_reference(
        self, reference: ReferencePass, dtype: str, paths: Collection[str]
    ) -> NarrowRun:
        """Runs what is around the reference's blocks in another dtype than float64."""
        made = torch_values.fresh(self._made(reference))
        return run_reference_in(
            dtype, self._without_blocks(reference), [*self.inputs, *made], {},
            self._call_reference, paths,
        )  # fmt: skip

    def compare_head(self, path: str) -> tuple[Found, dict[str, str]]:
        """Compares a large head in slices of the vocabulary, each as a model of its own."""
        sides = self.sides
        head = _Head(sides, path)
        weights, looks = sides.compare_weights([sides.layout.heads[path]])
        found = head.compare()
        node = dataclasses.replace(
            found.nodes[head.key], parameters=weights, **described(head.made(), head.exact())
        )
        nodes = {head.key: judge_node(node)}
        if sides.low is not None:
            reference, candidate = sides.low
            nodes = with_rounding(
                nodes, [head.output()], sides.dtype,
                lambda: head.candidate_run(candidate), lambda _: head.reference_run(reference),
            )  # fmt: skip
        return dataclasses.replace(found, nodes=nodes, outputs=()), looks


def _floats(given: Given) -> list[Any]:
    return float_arrays((given.args, given.kwargs))


def _new_floats(reference: ReferencePass, path: str) -> list[int]:
    """Returns places of the floats that a block or a head returned, and was not given."""
    made = torch_values.floats(reference.made[path])
    return [n for n in range(len(made)) if n not in reference.passed_on[path]]


class _Head:
    """A large head of both models.

    Args:
        sides: both models.
        path: of the head in the candidate.
    """

    def __init__(self, sides: Sides, path: str):
        self.sides, self.path = sides, path
        pair = sides.layout.heads[path]
        self.key, (self.other,) = pair.candidate, pair.reference
        self.name = path.removesuffix(".attend")
        self.owner = resolve(sides.candidate.module, path)[0]
        self.arrays = arrays_of(self.name, sides.wanted)
        names = tuple(f"{self.name}.{leaf}" for leaf in self.arrays)
        self.pair = dataclasses.replace(pair, parameters=names)
        own = self.other.removesuffix(".attend")
        # A tied head has the numbers of the embedding under a name of its own.
        self.links = [
            dataclasses.replace(
                link, source=tuple(f"{own}.{name.rpartition('.')[2]}" for name in link.source)
            )
            for link in sides.links
            if set(link.target) <= set(names)
        ]
        self.given = sides.reference.given[self.other]
        self.floats = torch_values.floats(list(self.given))

    def compare(self) -> Found:
        """Returns what was found of all slices."""
        reference = self.sides.reference
        read = reference.read_head(self.other.removesuffix(".attend"))
        own = on_reference_inputs(
            in_host_memory(self.sides.candidate.given[self.path]), self.floats
        )
        found: Found | None = None
        both = zip(
            candidate_slices(self.owner, self.arrays, "float64"), slices(read()), strict=True
        )
        for (_, part), (_, right) in both:
            module = reference_slice(reference.modules[self.other], right, reference.to_tensor)
            one = self._compare_slice(holder(module, self.other), part, own)
            found = one if found is None else self._worse(found, one)
            # What was recorded of a slice refers to itself.
            gc.collect()
        assert found is not None
        return found

    def _compare_slice(self, model: Any, part: Any, own: Given) -> Found:
        index, backward = Index(), self.sides.backward
        args, kwargs = torch_values.fresh(self.given)
        with torch_values.everything_in_float64():
            reference = run_torch(model, args, kwargs, backward, (), None, index.note, {self.other})

        def call(module: Any, given: Any) -> Any:
            owner, method = resolve(module, self.path)
            return getattr(owner, method)(*given)

        candidate = marked_candidate(_nnx_holder(part, self.name), call)
        kinds, attentions = describe_modules(self.sides.skeleton, [self.pair])
        return compare_part(
            Part(
                reference, index, candidate, list(own.args), [self.pair], {self.key: None},
                self.links, {}, {}, kinds, attentions, backward, depths=self.sides.layout.depths,
            )
        )  # fmt: skip

    def _worse(self, one: Found, other: Found) -> Found:
        """Returns what two slices show together."""
        first, second = one.nodes[self.key], other.nodes[self.key]
        backward = {
            name: worst_difference(n.backward[name] for n in (first, second) if name in n.backward)
            for name in dict.fromkeys([*first.backward, *second.backward])
        }
        node = dataclasses.replace(
            first,
            forward=worst_difference(d for d in (first.forward, second.forward) if d is not None),
            backward={name: worst for name, worst in backward.items() if worst is not None},
            message=first.message or second.message,
        )
        # All slices run the same operators.
        operators = min(one.operators, other.operators)
        return dataclasses.replace(
            one, nodes={self.key: node}, causes=one.causes or other.causes, operators=operators
        )

    def exact(self) -> np.ndarray:
        """Returns what the reference's head makes, in a line."""
        return laid_as(self._reference_made(self.sides.reference), self._own_made()).reshape(-1)

    def made(self) -> np.ndarray:
        """Returns what the candidate's head makes in the whole model, in a line."""
        return self._own_made().reshape(-1)

    def _own_made(self) -> np.ndarray:
        return self.sides.candidate.made[self.path]

    def _reference_made(self, reference: ReferencePass) -> np.ndarray:
        return torch_values.array(torch_values.floats(reference.made[self.other])[0])

    def output(self) -> Output:
        """Returns what says what a dtype rounds."""
        exact = laid_as(self._reference_made(self.sides.reference), self._own_made())
        same = Layout(exact.shape, tuple(range(exact.ndim)), exact.shape)
        part = OutputPart(
            self.path, 0, [Value(0, exact)], {self.other: 0}, lambda array: array, same
        )
        entered = Value(1, torch_values.array(self.floats[0]))
        return Output(self.key, [part], entered, lambda array: array.reshape(-1))

    def candidate_run(self, candidate: EmptyCandidate) -> NarrowRun:
        """Returns what the candidate's head was given and makes in a pass."""
        given = in_host_memory(candidate.given[self.path])
        made = np.asarray(candidate.made[self.path])
        return NarrowRun({}, {self.path: [made]}, {self.path: float_arrays(given.args)})

    def reference_run(self, reference: ReferencePass) -> NarrowRun:
        """Returns what the reference's head makes in a pass."""
        made = laid_as(self._reference_made(reference), self._own_made())
        return NarrowRun({}, {self.other: [made]})


def _nnx_holder(module: Any, path: str) -> Any:
    """Returns an NNX module that has another one at its path, and nothing else."""
    for name in reversed(path.split(".")):
        around = nnx.Module()
        setattr(around, name, module)
        module = around
    return module
