"""How a repro is made: the innermost pair of modules that shows a bug, run by itself, written."""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.errors import ResourceError, UsageError
from jaxformer.parity.compare.reference_run import ReferenceRun
from jaxformer.parity.matching.calls import MatchedCall, Unmatched, match_calls
from jaxformer.parity.matching.modules import TIED_HEAD, Pair
from jaxformer.parity.matching.positions import (
    match_alibi_slopes,
    position_ids_from_mask,
    reference_tables,
)
from jaxformer.parity.report.files import write_text
from jaxformer.parity.repro.modules import encode, noted_arguments, run_reference, state_of
from jaxformer.parity.repro.rebuilding import rebuilt_candidate, rebuilt_reference
from jaxformer.parity.repro.runtime import FORMAT, Repro
from jaxformer.parity.trace import jax_trace, torch_trace
from jaxformer.porting.formats.safetensors_files import write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.mapping.plans import Plan

Call = Callable[[Any, Sequence[Any]], Any]

SCRIPT = '''\
"""{path} of ours, {their_path} of theirs: {message}

Run it with: python repro.py
Both get their own weights and the same inputs, in float64, from arrays.safetensors.
"""

from pathlib import Path

from jaxformer.parity.repro.runtime import Repro

repro = Repro(Path(__file__).parent)
{theirs}
{ours}
result = repro.run(theirs, ours)
print(result)
assert result.is_equal, "they differ by more than rounding"
'''
BUILD = "{side} = repro.build_{side}()  # {kind}, by the settings in node.json"
FILL_IN = """{side} = None  # FILL IN: a {kind}, made as yours was; its weights are put in here
assert {side} is not None, "fill in {side} in repro.py: {why}\""""


def write_repro(
    folder: str | Path,
    torch_module: Any,
    jax_module: Any,
    inputs: Sequence[Any],
    path: str,
    *,
    jax_inputs: Sequence[Any] | None = None,
    dialect: str | None = None,
    names: Mapping[str, str] | None = None,
    torch_call: Call | None = None,
    jax_call: Call | None = None,
    message: str = "",
    backward: bool = True,
) -> Repro:
    """Writes a folder that shows how one pair of modules differs, without the models around it.

    It holds ``repro.py``, a script of a few lines, ``node.json`` and ``arrays.safetensors``. Models
    of transformers and of torch_ref are built anew by their settings; of others, and of ours if
    they were changed after they were built, the script asks for the module. A pair that cannot be
    run by itself (a table of positions, a tied head) is shown in the one around it.

    Args:
        folder: to be made; one that exists must be empty.
        torch_module: theirs.
        jax_module: ours.
        inputs: of theirs.
        path: of the node in the report.
        jax_inputs: see ``compare``.
        dialect: see ``compare``.
        names: see ``compare``.
        torch_call: see ``compare``.
        jax_call: see ``compare``.
        message: what is wrong, for the script.
        backward: whether to show gradients too.

    Raises:
        UsageError: there is no such node, the folder is in use, or what the modules are called with
            cannot be written.
        ResourceError: the folder cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists: give the name of a new folder")
    with jax.enable_x64(True), match_alibi_slopes(torch_module):
        reference = ReferenceRun(
            torch_module, inputs, dialect=dialect, names=names, backward=False, call=torch_call,
            config=jax_module,
        )  # fmt: skip
        given = reference.inputs if jax_inputs is None else jax_inputs
        candidate = jax_trace.in_dtype(jax_module, "float64")
        pairs = reference.pairs_with(jax_module)
        counted = {} if jax_call else position_ids_from_mask(candidate, pairs, reference.trace)
        run = jax_call or (lambda module, given: module(*given, **counted))
        calls, _ = jax_trace.trace(candidate, lambda module: run(module, given))
        pair = _choose(path, reference, pairs, calls)
        writing = _Writing(reference, pair, calls, candidate, backward)
    made = not folder.exists()
    try:
        folder.mkdir(exist_ok=True)
        writing.write(folder, message)
    except BaseException as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise ResourceError(f"could not write {folder}: {error.strerror or error}") from error
        raise
    return Repro(folder)


def _choose(
    path: str,
    reference: ReferenceRun,
    pairs: Sequence[Pair],
    calls: Mapping[str, jax_trace.JaxCall],
) -> Pair:
    """The pair of a node, or the innermost around it that can be run by itself."""
    there = {name for name, _ in reference.module.named_modules()}
    pairs = [
        pair
        for pair in pairs
        if pair.candidate != (TIED_HEAD,)
        and there.issuperset(pair.reference)
        and not isinstance(match_calls(pair, calls, reference.trace), Unmatched)
    ]
    paths = path.split(" + ")
    around = [
        pair
        for pair in pairs
        if pair.path == path
        or (
            len(pair.candidate) == 1
            and all(p.startswith(f"{pair.candidate[0]}.") or not pair.candidate[0] for p in paths)
        )
    ]
    if not around:
        raise UsageError(f"there is no module {path} to show by itself")
    return max(around, key=lambda pair: (pair.path == path, len(pair.candidate[0])))


class _Writing:
    """What a repro holds."""

    def __init__(
        self,
        reference: ReferenceRun,
        pair: Pair,
        calls: Mapping[str, jax_trace.JaxCall],
        candidate: Any,
        backward: bool,
    ):
        self.reference, self.pair, self.backward = reference, pair, backward
        self.candidate = candidate
        self.arrays: dict[str, np.ndarray] = {}
        found = reference_tables(reference.module, reference.trace)
        if found is not None:
            self.arrays |= {f"tables/{n}": t for n, t in zip(("cos", "sin"), found[1], strict=True)}
        self.reference_calls, traces = self._reference_side()
        alone = torch_trace.Trace(
            {path: trace.calls[""] for path, trace in zip(pair.reference, traces, strict=True)},
            [],
            {},
        )
        first = {name: _first(call) for name, call in calls.items()}
        matched = match_calls(pair, first, alone)
        if isinstance(matched, Unmatched):
            raise UsageError(
                f"{pair.path or 'the model'} cannot be shown by itself: " + matched.message
            )
        self.matched_call = matched[0]
        self.candidate_calls = [self._candidate_call(place) for place in range(len(pair.candidate))]
        self.groups: list[list[int]] = []
        self._expect(self.matched_call)
        if backward and reference.plan is not None:
            self._expect_parameters(reference.plan, traces)

    def _reference_side(self) -> tuple[list[dict[str, Any]], list[torch_trace.Trace]]:
        """Each of their modules by itself, as it was called in the model."""
        noted = noted_arguments(self.reference, self.pair.reference)
        calls, traces = [], []
        for place, path in enumerate(self.pair.reference):
            module = self.reference.module.get_submodule(path)
            for name, tensor in state_of(module).items():
                self.arrays[f"theirs/{place}/state/{name}"] = tensor
            args, kwargs = noted[path]
            arrays: dict[str, np.ndarray] = {}
            seen: dict[int, str] = {}
            call = {
                "path": path,
                "args": [encode(each, arrays, seen) for each in args],
                "kwargs": {name: encode(each, arrays, seen) for name, each in kwargs.items()},
            }
            trace = run_reference(module, call, arrays, backward=self.backward)
            for name, array in arrays.items():
                self.arrays[f"theirs/{place}/arguments/{name}"] = array
            for n, output in enumerate(trace.outputs[:1]):
                self.arrays[f"theirs/{place}/output/{n}"] = output
            calls.append(call)
            traces.append(trace)
        return calls, traces

    def _candidate_call(self, place: int) -> dict[str, Any]:
        """One of ours, called with the numbers of theirs."""
        matched_call, path = self.matched_call, self.pair.candidate[place]
        owner, method = jax_trace.resolve(self.candidate, path)
        for name, value in jax_trace.parameters_of(owner).items():
            self.arrays[f"ours/{place}/state/{name}"] = np.asarray(value)
        call = matched_call.candidate[place]
        args, kwargs = jax_trace.refill((call.args, call.kwargs), matched_call.inputs(place))
        args, kwargs = jax_trace.refill_integers((args, kwargs), matched_call.integers(place))
        arrays: dict[str, np.ndarray] = {}
        seen: dict[int, str] = {}
        encoded = {
            "path": path,
            "method": method,
            "args": [encode(each, arrays, seen) for each in args],
            "kwargs": {name: encode(each, arrays, seen) for name, each in kwargs.items()},
        }
        for name, array in arrays.items():
            self.arrays[f"ours/{place}/arguments/{name}"] = array
        return encoded

    def _expect(self, matched_call: MatchedCall) -> None:
        """Their outputs and gradients, in our form."""
        for place in range(len(matched_call.candidate)):
            for n, expected in enumerate(matched_call.outputs(place)):
                if expected is not None:
                    self.arrays[f"expected/{place}/output/{n}"] = expected
            if self.backward:
                shapes = [np.shape(a) for a in matched_call.candidate[place].outputs]
                for n, cotangent in enumerate(matched_call.output_gradients(place)):
                    self.arrays[f"ours/{place}/cotangents/{n}"] = (
                        np.zeros(shapes[n]) if cotangent is None else cotangent
                    )
        if self.backward:
            gradients = matched_call.input_gradients()
            for group in matched_call.groups():
                expected = gradients[group[0]]
                if expected is not None:
                    self.arrays[f"expected/0/input/{len(self.groups)}"] = expected
                    self.groups.append(list(group))

    def _expect_parameters(self, plan: Plan, traces: Sequence[torch_trace.Trace]) -> None:
        """Their gradients of parameters, in our layout."""
        found = {
            f"{path}.{name}".lstrip("."): gradient
            for path, trace in zip(self.pair.reference, traces, strict=True)
            for name, gradient in trace.gradients.items()
        }
        linked = {name for link in plan.links for name in link.source}
        # A tied array has one gradient under one of its names, or a share of it under each.
        for alias, name in plan.module_mapping.aliases.items():
            if alias in found and name in found and alias not in linked:
                found[name] = found[name] + found[alias]
        for link in plan.links:
            if not found.keys() >= set(link.source):
                continue
            converted = link.to_target([found[name] for name in link.source])
            for full, gradient in zip(link.target, converted, strict=True):
                for place, path in enumerate(self.pair.candidate):
                    if full.startswith(f"{path}.") or not path:
                        name = full.removeprefix(f"{path}.") if path else full
                        self.arrays[f"expected/{place}/parameter/{name}"] = gradient

    def write(self, folder: Path, message: str) -> None:
        """Writes the folder."""
        reference = rebuilt_reference(
            self.reference.module, self.pair, self.reference_calls, self.arrays
        )
        candidate = rebuilt_candidate(self.candidate, self.pair)
        about = {
            "format": FORMAT,
            "message": message,
            "backward": self.backward,
            "groups": self.groups,
            "reference": {**reference, "calls": self.reference_calls},
            "candidate": {**candidate, "calls": self.candidate_calls},
        }
        stored = {
            name: StoredTensor.of(np.ascontiguousarray(array))
            for name, array in self.arrays.items()
        }
        write_safetensors(folder / "arrays.safetensors", stored)
        write_text(folder / "node.json", json.dumps(about, indent=1) + "\n")
        kinds = {
            "reference": type(self.reference.module.get_submodule(self.pair.reference[0])).__name__,
            "candidate": type(
                jax_trace.resolve(self.candidate, self.pair.candidate[0])[0]
            ).__name__,
        }
        lines = {
            side: (BUILD if rebuilt["class"] else FILL_IN).format(
                side=side, kind=kinds[side], why=rebuilt.get("why", "")
            )
            for side, rebuilt in (("reference", reference), ("candidate", candidate))
        }
        script = SCRIPT.format(
            path=self.pair.path or "the whole model",
            reference_path=self.pair.reference_path or "the whole model",
            message=message.replace("\\", "/").replace('"', "'") or "see what it prints",
            **lines,
        )
        write_text(folder / "repro.py", script)


def _first(call: jax_trace.JaxCall) -> jax_trace.JaxCall:
    """The first call of several."""
    return dataclasses.replace(call, later=[])
