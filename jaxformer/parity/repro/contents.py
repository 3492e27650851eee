"""Runs one pair of modules by itself and collects what its repro holds."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.parity.comparison.reference_run import ReferenceRun
from jaxformer.parity.matching.arguments import aligned, laid_as
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.matching.positions import Made, Tables, nearest_tables, reference_tables
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.jax_values import (
    float_arrays,
    integer_arrays,
    refill,
    refill_integers,
)
from jaxformer.parity.recording.torch_values import array, as_numpy, floats, is_integer
from jaxformer.parity.repro.calls import RecordedCall
from jaxformer.parity.repro.modules import ReferenceOutcome, encode, run_reference
from jaxformer.porting.mapping.packings import ONE_TO_ONE
from jaxformer.porting.mapping.plans import Plan
from jaxformer.positions import Rotary

Calls = Mapping[str, RecordedCall]


class ReproContents:
    """What the folder of a repro holds.

    Args:
        reference: the whole reference.
        pair: the modules to show.
        right: the calls of the reference's modules in the whole model, by path.
        own: those of the candidate's.
        candidate: the whole candidate.
        backward: whether gradients are compared too.
        wrong_weights: what the reference has in place of the candidate's wrong weights, by name.

    Attributes:
        arrays: weights, arguments and expected results, by the side or kind, the place of the
            module in the pair, and a name: ``reference/0/state/weight``.
        reference_calls: how each module of the reference is called, encoded.
        candidate_calls: how each module of the candidate is called, encoded.
        groups: inputs of the candidate whose gradients are known only as a sum.

    Raises:
        UsageError: the arguments of the modules cannot be written.
    """

    def __init__(
        self,
        reference: ReferenceRun,
        pair: Pair,
        right: Calls,
        own: Calls,
        candidate: Any,
        backward: bool,
        wrong_weights: Mapping[str, np.ndarray],
    ):
        self.reference, self.candidate, self.pair = reference, candidate, pair
        self.backward = backward
        self.arrays: dict[str, np.ndarray] = {}
        made = {path: Made(0, [_arrays(call.output)]) for path, call in right.items()}
        if found := reference_tables(reference.module, made):
            _, (cos, sin) = self._tables_of(found)
            self.arrays |= {"tables/cos": cos, "tables/sin": sin}
        self._own = [own[path] for path in pair.candidate]
        self._right = [right[path] for path in pair.reference]
        # The names of the float tensors that entered the reference's first module.
        self._entered: list[str] = []
        self.reference_calls, self._outcomes = self._run_reference_modules()
        self.candidate_calls = [
            self._encode_candidate_call(place) for place in range(len(pair.candidate))
        ]
        self.groups: list[list[int]] = []
        self._expect_outputs()
        self._expect_of_parameters("weight", wrong_weights.items())
        if backward:
            self._expect_input_gradients()
        if backward and reference.plan is not None:
            self._expect_parameter_gradients(reference.plan)

    def _tables_of(self, found: list[tuple[str, Tables]]) -> tuple[str, Tables]:
        """Returns of the reference's rotary tables those of the module that is shown."""
        owner, _ = jax_modules.resolve(self.candidate, self.pair.candidate[0])
        for _, node in nnx.iter_modules(owner):
            if isinstance(node, Rotary):
                return nearest_tables(node, found)
        return found[0]

    def _run_reference_modules(self) -> tuple[list[dict[str, Any]], list[ReferenceOutcome]]:
        """Runs each module of the reference by itself, called as in the whole model.

        Returns:
            How each is called, and what it gives.
        """
        calls, outcomes = [], []
        for place, (path, call) in enumerate(zip(self.pair.reference, self._right, strict=True)):
            module = self.reference.module.get_submodule(path)
            self._add(f"reference/{place}/state", _state_of(module))
            seen: dict[int, str] = {}
            encoded, arguments = _encode_call(call.args, call.kwargs, seen)
            if not place:
                tensors = floats([list(call.args), dict(call.kwargs)])
                self._entered = [seen[id(one)] for one in tensors]
            made = run_reference(module, encoded, arguments, backward=self.backward)
            self._add(f"reference/{place}/arguments", arguments)
            self._add(f"reference/{place}/output", dict(enumerate(made.outputs[:1])))
            calls.append({"path": path, **encoded})
            outcomes.append(made)
        return calls, outcomes

    def _entering(self, place: int) -> list[tuple[int, int]]:
        """Returns which float arguments of a module of the candidate are the reference's."""
        call = self._own[place]
        return aligned(
            [*map(np.asarray, float_arrays((call.args, call.kwargs)))],
            _arrays([list(self._right[0].args), dict(self._right[0].kwargs)]),
        )

    def _encode_candidate_call(self, place: int) -> dict[str, Any]:
        """Encodes the call of a candidate's module, with the values of the reference."""
        path, call = self.pair.candidate[place], self._own[place]
        owner, method = jax_modules.resolve(self.candidate, path)
        state = jax_modules.parameters_of(owner)
        self._add(f"candidate/{place}/state", {n: np.asarray(value) for n, value in state.items()})
        own = [*map(np.asarray, float_arrays((call.args, call.kwargs)))]
        given = _arrays([list(self._right[0].args), dict(self._right[0].kwargs)])
        right: list[Any] = [None] * len(own)
        for n, other in self._entering(place):
            right[n] = laid_as(given[other], own[n])
        args, kwargs = refill((call.args, call.kwargs), right)
        args, kwargs = refill_integers((args, kwargs), self._integers(place))
        encoded, arguments = _encode_call(args, kwargs, {})
        self._add(f"candidate/{place}/arguments", arguments)
        return {"path": path, "method": method, **encoded}

    def _integers(self, place: int) -> list[np.ndarray]:
        """Returns the integer input, where both sides take just one, of the same shape."""
        call, right = self._own[place], self._right[0]
        own = integer_arrays((call.args, call.kwargs))
        values = [*right.args, *right.kwargs.values()]
        others = [as_numpy(one) for one in values if is_integer(one)]
        is_same = len(own) == len(others) == 1 and own[0].shape == others[0].shape
        return others if is_same else []

    def _outputs(
        self, place: int, gradients: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray | None]:
        """Returns for each array that a module of the candidate returns the reference's.

        Args:
            place: of the module in the pair.
            gradients: of what each module of the reference returns first, of a single one of all
                of it: to return these, in the layout that the output itself has.
        """
        right = self._made()
        made = right if gradients is None else gradients
        own = [*map(np.asarray, float_arrays(self._own[place].output))]
        found: list[np.ndarray | None] = [None] * len(own)
        if self.pair.packing is not ONE_TO_ONE:
            shapes = [float_arrays(call.output)[0].shape for call in self._own]
            joined = [*made[: len(self._right)]]
            wide = [(*joined[0].shape[:-1], shape[-1]) for shape in shapes]
            found[0] = self.pair.unpack(joined, wide)[place].reshape(own[0].shape)
            return found
        for n, other in aligned(own, right):
            found[n] = laid_as(right[other], own[n], made[other])
        return found

    def _made(self) -> list[np.ndarray]:
        if self.pair.packing is ONE_TO_ONE:
            return self._outcomes[0].outputs
        return [one.outputs[0] for one in self._outcomes]

    def _expect_outputs(self) -> None:
        """Adds the reference's outputs, in the candidate's layout."""
        for place in range(len(self._own)):
            for n, expected in enumerate(self._outputs(place)):
                if expected is not None:
                    self.arrays[f"expected/{place}/output/{n}"] = expected

    def _expect_input_gradients(self) -> None:
        """Adds the reference's gradients of outputs and inputs, in the candidate's layout."""
        cotangents = [one.cotangent for one in self._outcomes if one.cotangent is not None]
        if not cotangents:
            return
        made = [cotangents[0], *map(np.zeros_like, self._outcomes[0].outputs[1:])]
        if self.pair.packing is not ONE_TO_ONE:
            made = cotangents
        for place, call in enumerate(self._own):
            own = float_arrays(call.output)
            for n, found in enumerate(self._outputs(place, made)):
                self.arrays[f"candidate/{place}/cotangents/{n}"] = (
                    np.zeros(own[n].shape) if found is None else found
                )
        own = [*map(np.asarray, float_arrays((self._own[0].args, self._own[0].kwargs)))]
        given = _arrays([list(self._right[0].args), dict(self._right[0].kwargs)])
        groups: dict[str, list[int]] = {}
        first: dict[str, np.ndarray] = {}
        for n, other in self._entering(0):
            groups.setdefault(self._entered[other], []).append(n)
            first.setdefault(self._entered[other], given[other])
        for name, group in groups.items():
            gradients = [one.input_gradients.get(name) for one in self._outcomes]
            known = [one for one in gradients if one is not None]
            if known:
                total = np.sum(known, axis=0)
                laid = laid_as(first[name], own[group[0]], total)
                self.arrays[f"expected/0/input/{len(self.groups)}"] = laid
                self.groups.append(group)

    def _expect_parameter_gradients(self, plan: Plan) -> None:
        """Adds the reference's gradients of parameters, in the candidate's layout."""
        found = {
            f"{path}.{name}".lstrip("."): gradient
            for path, one in zip(self.pair.reference, self._outcomes, strict=True)
            for name, gradient in one.gradients.items()
        }
        for link in plan.links:
            if not found.keys() >= set(link.source):
                continue
            converted = link.to_target([found[name] for name in link.source])
            self._expect_of_parameters("parameter", zip(link.target, converted, strict=True))

    def _expect_of_parameters(self, kind: str, found: Iterable[tuple[str, np.ndarray]]) -> None:
        """Adds what is expected of parameters, given by their names in the whole candidate."""
        for full, expected in found:
            for place, path in enumerate(self.pair.candidate):
                if full.startswith(f"{path}.") or not path:
                    name = full.removeprefix(f"{path}.") if path else full
                    self.arrays[f"expected/{place}/{kind}/{name}"] = expected

    def _add(self, start: str, arrays: Mapping[Any, np.ndarray]) -> None:
        """Adds arrays under a prefix of their names."""
        self.arrays |= {f"{start}/{name}": array for name, array in arrays.items()}


def can_be_shown(pair: Pair, right: Calls, own: Calls) -> bool:
    """Returns whether a pair can be run by itself: both sides call it, and return the same."""
    if not pair.can_run_isolated:
        return False
    if not (right.keys() >= set(pair.reference) and own.keys() >= set(pair.candidate)):
        return False
    made = [float_arrays(own[path].output) for path in pair.candidate]
    others = [_arrays(right[path].output) for path in pair.reference]
    if not all(made) or not all(others):
        return False
    if pair.packing is not ONE_TO_ONE:
        return True
    found = aligned([*map(np.asarray, made[0])], others[0])
    return any(place == 0 for place, _ in found)


def _arrays(value: Any) -> list[np.ndarray]:
    """Returns the float tensors of a nested value as arrays."""
    return [*map(array, floats(value))]


def _encode_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], seen: dict[int, str]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encodes the arguments of a call; the arrays among them are returned apart.

    Args:
        args: positional arguments.
        kwargs: named arguments.
        seen: gets the name of each array, by its identity.
    """
    arrays: dict[str, np.ndarray] = {}
    encoded = {
        "args": [encode(each, arrays, seen) for each in args],
        "kwargs": {name: encode(each, arrays, seen) for name, each in kwargs.items()},
    }
    return encoded, arrays


def _state_of(module: Any) -> dict[str, np.ndarray]:
    """Returns all parameters and buffers of a PyTorch module, also those that are not saved."""
    named = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: np.asarray(as_numpy(value.detach())) for name, value in named}
