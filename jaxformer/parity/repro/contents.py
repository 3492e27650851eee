"""Runs one pair of modules by itself and collects what its repro holds."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.errors import UsageError
from jaxformer.parity.comparison.reference_run import ReferenceRun
from jaxformer.parity.matching.calls.calls import MatchedCall, Unmatched, match_calls
from jaxformer.parity.matching.pairs import Pair
from jaxformer.parity.matching.positions import (
    Tables,
    made_in,
    nearest_tables,
    reference_tables,
)
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.recording.calls import jax_trace, torch_trace
from jaxformer.parity.recording.jax_values import refill, refill_integers
from jaxformer.parity.repro.modules import encode, run_reference
from jaxformer.porting.mapping.plans import Plan
from jaxformer.positions import Rotary


class ReproContents:
    """What the folder of a repro holds.

    Args:
        reference: the whole reference.
        pair: the modules to show.
        calls: of the whole candidate, by path.
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
        UsageError: the pair cannot be run by itself, or its arguments cannot be written.
    """

    def __init__(
        self,
        reference: ReferenceRun,
        pair: Pair,
        calls: Mapping[str, jax_trace.JaxCall],
        candidate: Any,
        backward: bool,
        wrong_weights: Mapping[str, np.ndarray],
    ):
        self.reference, self.candidate, self.pair = reference, candidate, pair
        self.backward = backward
        self.arrays: dict[str, np.ndarray] = {}
        if found := reference_tables(reference.module, made_in(reference.trace)):
            _, (cos, sin) = self._tables_of(found)
            self.arrays |= {"tables/cos": cos, "tables/sin": sin}
        self.reference_calls, traces, gradients = self._run_reference_modules()
        isolated = torch_trace.Trace(
            {path: trace.calls[""] for path, trace in zip(pair.reference, traces, strict=True)},
            [],
        )
        first = {name: dataclasses.replace(call, later=[]) for name, call in calls.items()}
        matched = match_calls(pair, first, isolated)
        if isinstance(matched, Unmatched):
            where = pair.path or "the model"
            raise UsageError(f"{where} cannot be shown by itself: {matched.message}")
        self.candidate_calls = [
            self._encode_candidate_call(matched[0], place) for place in range(len(pair.candidate))
        ]
        self.groups: list[list[int]] = []
        self._expect_outputs(matched[0])
        self._expect_of_parameters("weight", wrong_weights.items())
        if backward:
            self._expect_input_gradients(matched[0])
        if backward and reference.plan is not None:
            self._expect_parameter_gradients(reference.plan, gradients)

    def _tables_of(self, found: list[tuple[str, Tables]]) -> tuple[str, Tables]:
        """Returns of the reference's rotary tables those of the module that is shown."""
        owner, _ = jax_modules.resolve(self.candidate, self.pair.candidate[0])
        for _, node in nnx.iter_modules(owner):
            if isinstance(node, Rotary):
                return nearest_tables(node, found)
        return found[0]

    def _run_reference_modules(
        self,
    ) -> tuple[list[dict[str, Any]], list[torch_trace.Trace], dict[str, np.ndarray]]:
        """Runs each module of the reference by itself, called as in the whole model.

        Returns:
            How each is called, what was recorded of it, and the gradients of all parameters.
        """
        calls, traces = [], []
        gradients: dict[str, np.ndarray] = {}
        for place, path in enumerate(self.pair.reference):
            module = self.reference.module.get_submodule(path)
            self._add(f"reference/{place}/state", _state_of(module))
            call = self.reference.trace.calls[path]
            encoded, arguments = _encode_call(call.args, call.kwargs)
            trace, found = run_reference(module, encoded, arguments, backward=self.backward)
            self._add(f"reference/{place}/arguments", arguments)
            self._add(f"reference/{place}/output", dict(enumerate(trace.outputs[:1])))
            calls.append({"path": path, **encoded})
            traces.append(trace)
            gradients |= {f"{path}.{name}".lstrip("."): each for name, each in found.items()}
        return calls, traces, gradients

    def _encode_candidate_call(self, matched_call: MatchedCall, place: int) -> dict[str, Any]:
        """Encodes the call of a candidate's module, with the values of the reference."""
        path = self.pair.candidate[place]
        owner, method = jax_modules.resolve(self.candidate, path)
        state = jax_modules.parameters_of(owner)
        self._add(f"candidate/{place}/state", {n: np.asarray(value) for n, value in state.items()})
        call = matched_call.candidate[place]
        args, kwargs = refill((call.args, call.kwargs), matched_call.inputs(place))
        args, kwargs = refill_integers((args, kwargs), matched_call.integers(place))
        encoded, arguments = _encode_call(args, kwargs)
        self._add(f"candidate/{place}/arguments", arguments)
        return {"path": path, "method": method, **encoded}

    def _expect_outputs(self, matched_call: MatchedCall) -> None:
        """Adds the reference's outputs, in the candidate's layout."""
        for place in range(len(matched_call.candidate)):
            for n, expected in enumerate(matched_call.outputs(place)):
                if expected is not None:
                    self.arrays[f"expected/{place}/output/{n}"] = expected

    def _expect_input_gradients(self, matched_call: MatchedCall) -> None:
        """Adds the reference's gradients of outputs and inputs, in the candidate's layout."""
        for place, call in enumerate(matched_call.candidate):
            shapes = [np.shape(a) for a in call.outputs]
            for n, cotangent in enumerate(matched_call.output_gradients(place)):
                self.arrays[f"candidate/{place}/cotangents/{n}"] = (
                    np.zeros(shapes[n]) if cotangent is None else cotangent
                )
        gradients = matched_call.input_gradients()
        for group in matched_call.groups():
            expected = gradients[group[0]]
            if expected is not None:
                self.arrays[f"expected/0/input/{len(self.groups)}"] = expected
                self.groups.append(list(group))

    def _expect_parameter_gradients(self, plan: Plan, found: Mapping[str, np.ndarray]) -> None:
        """Adds the reference's gradients of parameters, in the candidate's layout."""
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


def _encode_call(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Encodes the arguments of a call; the arrays among them are returned apart."""
    arrays: dict[str, np.ndarray] = {}
    seen: dict[int, str] = {}
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
    return {name: np.asarray(torch_trace.as_numpy(value.detach())) for name, value in named}
