"""Reads the folder of a repro and runs both of its modules: what the script of a repro imports."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.errors import CheckpointError
from jaxformer.parity.findings import Difference
from jaxformer.parity.judging.weights import weight_difference
from jaxformer.parity.matching.positions import match_alibi_slopes
from jaxformer.parity.recording import jax_modules
from jaxformer.parity.report.text import scientific
from jaxformer.parity.repro.calls import Outcome, run_candidate
from jaxformer.parity.repro.modules import (
    build_candidate,
    build_reference,
    decode,
    load_state,
    run_reference,
    share_saved_tables,
    with_weights,
)
from jaxformer.parity.tolerance import judge
from jaxformer.porting.formats.raw_checkpoints import read_config
from jaxformer.porting.formats.safetensors_files import read_safetensors
from jaxformer.porting.formats.tensors import StoredTensor

FORMAT = 2
# What format 1 called the two sides, in node.json and in the names of arrays.
FORMAT_1_SIDES = {"theirs": "reference", "ours": "candidate"}


@dataclasses.dataclass(frozen=True)
class ReproResult:
    """What running both modules gave.

    Attributes:
        differences: of each output, gradient and wrong weight, from the reference's.
        reference_changed: whether the reference's output is another than when the repro was
            written.
    """

    differences: Mapping[str, Difference]
    reference_changed: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether all differences are rounding, and the reference is as it was."""
        wrong = any(difference.is_bug for difference in self.differences.values())
        return not wrong and not self.reference_changed

    def __str__(self) -> str:
        lines = [
            f"{name}: off by {scientific(d.relative)} of scale, allowed "
            f"{scientific(d.allowed / (d.scale or 1.0))}: {'bug' if d.is_bug else 'rounding'}"
            for name, d in self.differences.items()
        ]
        if self.reference_changed:
            lines.append("the output of the reference is another than when this was written")
        return "\n".join(lines)


class Repro:
    """A folder that ``write_repro`` wrote, in this version or an older one.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: the folder holds no repro, or a damaged one.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.about = read_config(self.folder / "node.json")
        version = self.about.get("format")
        if version not in (1, FORMAT):
            raise CheckpointError(f"{self.folder} holds no repro of format 1 or {FORMAT}")
        self.tensors = read_safetensors(self.folder / "arrays.safetensors")[0]
        if version == 1:
            self.about = {FORMAT_1_SIDES.get(key, key): one for key, one in self.about.items()}
            self.tensors = {_present_name(name): one for name, one in self.tensors.items()}

    def build_reference(self) -> list[Any]:
        """Builds the reference's modules, without weights.

        Raises:
            UsageError: the library that defines them is not installed, or not known.
        """
        reference = self.about["reference"]
        whole = build_reference(reference["library"], reference["class"], reference["config"])
        return [whole.get_submodule(call["path"]) for call in reference["calls"]]

    def build_candidate(self) -> list[Any]:
        """Builds the candidate's modules, without weights.

        Raises:
            UsageError: the class of the model is not known.
        """
        candidate = self.about["candidate"]
        whole = build_candidate(candidate["class"], candidate["config"])
        return [jax_modules.resolve(whole, call["path"])[0] for call in candidate["calls"]]

    # The scripts of format 1 call these.
    build_theirs = build_reference
    build_ours = build_candidate

    def run(self, reference: Any, candidate: Any) -> ReproResult:
        """Runs both sides and compares outputs and gradients.

        Args:
            reference: of ``build_reference``, or a module built otherwise; gets the weights of
                the folder.
            candidate: of ``build_candidate``, or a module built otherwise; gets the weights of
                the folder.
        """
        reference_modules = reference if isinstance(reference, list) else [reference]
        candidate_modules = candidate if isinstance(candidate, list) else [candidate]
        outputs = [
            run_reference(
                load_state(module, self.stored(f"reference/{place}/state/")),
                call,
                self.arrays(f"reference/{place}/arguments/"),
                backward=False,
            ).outputs
            for place, (module, call) in enumerate(
                zip(reference_modules, self.about["reference"]["calls"], strict=True)
            )
        ]
        changed = any(
            judge(output, self.tensors[f"reference/{place}/output/{n}"].read()).is_bug
            for place, made in enumerate(outputs)
            for n, output in enumerate(made[:1])
        )
        with jax.enable_x64(True), match_alibi_slopes(reference_modules[0]):
            return ReproResult(self._differences(candidate_modules), changed)

    def stored(self, start: str) -> dict[str, StoredTensor]:
        """Returns the arrays whose names have a prefix, by the rest of their names."""
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    def arrays(self, start: str) -> dict[str, np.ndarray]:
        """Reads the arrays whose names have a prefix."""
        return {name: tensor.read() for name, tensor in self.stored(start).items()}

    def _differences(self, modules: Sequence[Any]) -> dict[str, Difference]:
        runs = [_CandidateRun(self, place, module) for place, module in enumerate(modules)]
        found: dict[str, Difference] = {}
        for name, tensor in self.stored("expected/").items():
            place, kind, which = name.split("/", 2)
            expected = tensor.read()
            if kind == "input":
                # All candidate modules get the same input, so their gradients of it add up.
                group = self.about["groups"][int(which)]
                label = f"gradient of input {group[0]}"
                found[label] = _judge(functools.partial(_input_gradient, runs, group), expected)
                continue
            run = runs[int(place)]
            label = "output" if kind == "output" else f"gradient of {which}"
            if kind == "weight":
                label = f"weight {which}"
            if len(runs) > 1:
                label = f"{self.about['candidate']['calls'][int(place)]['path']}: {label}"
            if kind == "weight":
                # Its own dtype may be narrower: the folder has the candidate's numbers in float64.
                own = run.weights[which].astype(expected.dtype)
                found[label] = weight_difference(own, expected)
            else:
                found[label] = _judge(functools.partial(run.measured, kind, which), expected)
        return dict(sorted(found.items(), key=lambda item: not item[0].endswith("output")))


class _CandidateRun:
    """One module of the candidate with its weights, tables and arguments."""

    def __init__(self, repro: Repro, place: int, module: Any):
        side = f"candidate/{place}"
        self.weights = repro.arrays(f"{side}/state/")
        self.module = with_weights(module, self.weights)
        share_saved_tables(self.module, repro.stored("tables/"))
        call = repro.about["candidate"]["calls"][place]
        self.method = call["method"]
        given = repro.arrays(f"{side}/arguments/")
        self.args = [decode(each, given) for each in call["args"]]
        self.kwargs = {name: decode(each, given) for name, each in call["kwargs"].items()}
        cotangents = repro.arrays(f"{side}/cotangents/")
        self.cotangents = [cotangents[name] for name in sorted(cotangents, key=int)] or None

    @functools.cache  # noqa: B019
    def outcome(self, dtype: str) -> Outcome:
        """Runs the module in a dtype."""
        return run_candidate(
            self.module, self.method, self.args, self.kwargs, self.cotangents, dtype
        )

    def measured(self, kind: str, which: str, dtype: str) -> np.ndarray:
        """Returns an output by its number, or the gradient of a parameter by its name."""
        outcome = self.outcome(dtype)
        if kind == "output":
            return outcome.outputs[int(which)]
        return outcome.parameter_gradients[which]


def _input_gradient(runs: Sequence[_CandidateRun], group: Sequence[int], dtype: str) -> np.ndarray:
    outcomes = [run.outcome(dtype) for run in runs]
    return np.sum([o.input_gradients[n] for o in outcomes for n in group], axis=0)


def _judge(measured: Callable[[str], np.ndarray], expected: np.ndarray) -> Difference:
    """Judges what was measured of the candidate in each dtype."""
    return judge(measured("float64"), expected, functools.partial(measured, "float32"))


def _present_name(name: str) -> str:
    side, _, rest = name.partition("/")
    return f"{FORMAT_1_SIDES.get(side, side)}/{rest}"
