"""A repro: one pair of modules with its weights and inputs, taken out of the models around it.

``write_repro`` (in ``repro_writing``) makes a folder: ``node.json`` says how both modules are built
and called, ``arrays.safetensors`` holds what they are given and what came of it, and ``repro.py``
runs both. This is what that script imports.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxformer.errors import CheckpointError
from jaxformer.parity.matching.positions import match_alibi_slopes
from jaxformer.parity.report.model import Difference
from jaxformer.parity.report.text import scientific
from jaxformer.parity.repro.modules import (
    build_candidate,
    build_torch,
    decode,
    load_state,
    run_reference,
    share_saved_tables,
    with_weights,
)
from jaxformer.parity.tolerance import judge
from jaxformer.parity.trace import isolated_run, jax_trace
from jaxformer.porting.formats.raw_checkpoints import read_config
from jaxformer.porting.formats.safetensors_files import read_safetensors
from jaxformer.porting.formats.tensors import StoredTensor

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of running both modules.

    Attributes:
        differences: of each output and gradient, ours from theirs.
        reference_changed: whether theirs gives something else than when the repro was written.
    """

    differences: Mapping[str, Difference]
    reference_changed: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether all is rounding."""
        wrong = any(difference.is_bug for difference in self.differences.values())
        return not wrong and not self.reference_changed

    def __str__(self) -> str:
        lines = [
            f"{name}: off by {scientific(d.relative)} of scale, allowed "
            f"{scientific(d.allowed / (d.scale or 1.0))}: {'bug' if d.is_bug else 'rounding'}"
            for name, d in self.differences.items()
        ]
        if self.reference_changed:
            lines.append("theirs does not give what it gave when this was written")
        return "\n".join(lines)


class Repro:
    """A folder that ``write_repro`` wrote.

    Args:
        folder: the folder.

    Raises:
        CheckpointError: it is none, or damaged.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.about = read_config(self.folder / "node.json")
        if self.about.get("format") != FORMAT:
            raise CheckpointError(f"{self.folder} holds no repro of format {FORMAT}")
        self.tensors = read_safetensors(self.folder / "arrays.safetensors")[0]

    def build_reference(self) -> list[Any]:
        """Their modules, without weights.

        Raises:
            UsageError: the code that they are made of is not installed, or not known.
        """
        reference = self.about["reference"]
        whole = build_torch(reference["library"], reference["class"], reference["config"])
        return [whole.get_submodule(call["path"]) for call in reference["calls"]]

    def build_candidate(self) -> list[Any]:
        """Our modules, without weights.

        Raises:
            UsageError: our model is not known.
        """
        candidate = self.about["candidate"]
        whole = build_candidate(candidate["class"], candidate["config"])
        return [jax_trace.resolve(whole, call["path"])[0] for call in candidate["calls"]]

    def run(self, reference: Any, candidate: Any) -> Result:
        """Runs both and compares what comes of it.

        Args:
            reference: of ``build_theirs``, or one built otherwise; it gets their weights.
            candidate: of ``build_ours``, or one built otherwise; it gets our weights.
        """
        reference_modules = reference if isinstance(reference, list) else [reference]
        candidate_modules = candidate if isinstance(candidate, list) else [candidate]
        traces = [
            run_reference(
                load_state(module, self._part(f"theirs/{place}/state/")),
                call,
                self._arrays(f"theirs/{place}/arguments/"),
                backward=self.about["backward"],
            )
            for place, (module, call) in enumerate(
                zip(reference_modules, self.about["reference"]["calls"], strict=True)
            )
        ]
        changed = any(
            judge(output, self.tensors[f"theirs/{place}/output/{n}"].read()).is_bug
            for place, trace in enumerate(traces)
            for n, output in enumerate(trace.outputs[:1])
        )
        with jax.enable_x64(True), match_alibi_slopes(reference_modules[0]):
            return Result(self._differences(candidate_modules), changed)

    def _differences(self, modules: Sequence[Any]) -> dict[str, Difference]:
        runs = [_Candidate(self, place, module) for place, module in enumerate(modules)]
        found: dict[str, Difference] = {}
        for name, tensor in self.tensors.items():
            if not name.startswith("expected/"):
                continue
            _, place, kind, which = name.split("/", 3)
            expected = tensor.read()
            if kind == "input":
                # What several of ours pull back to what they were all given.
                group = self.about["groups"][int(which)]
                picked = functools.partial(_inputs, runs, group)
                label = f"gradient of input {group[0]}"
            else:
                picked = functools.partial(_picked, runs[int(place)], kind, which)
                label = "output" if kind == "output" else f"gradient of {which}"
            if len(runs) > 1 and kind != "input":
                label = f"{self.about['candidate']['calls'][int(place)]['path']}: {label}"
            found[label] = judge(picked("float64"), expected, functools.partial(picked, "float32"))
        return dict(sorted(found.items(), key=lambda item: not item[0].endswith("output")))

    def _part(self, start: str) -> dict[str, StoredTensor]:
        return {
            name.removeprefix(start): tensor
            for name, tensor in self.tensors.items()
            if name.startswith(start)
        }

    def _arrays(self, start: str) -> dict[str, np.ndarray]:
        return {name: tensor.read() for name, tensor in self._part(start).items()}


class _Candidate:
    """One of our modules, with its weights and its tables."""

    def __init__(self, repro: Repro, place: int, module: Any):
        arrays = repro._arrays(f"ours/{place}/state/")
        self.module = with_weights(module, arrays)
        share_saved_tables(self.module, repro._part("tables/"))
        call = repro.about["candidate"]["calls"][place]
        self.method = call["method"]
        given = repro._arrays(f"ours/{place}/arguments/")
        self.call = jax_trace.JaxCall(
            tuple(decode(each, given) for each in call["args"]),
            {name: decode(each, given) for name, each in call["kwargs"].items()},
            0,
        )
        cotangents = repro._arrays(f"ours/{place}/cotangents/")
        self.cotangents = [cotangents[name] for name in sorted(cotangents, key=int)] or None

    @functools.cache  # noqa: B019
    def outcome(self, dtype: str) -> isolated_run.IsolatedOutcome:
        """What it does in a dtype."""
        return isolated_run.run_isolated(
            self.module, self.method, self.call, {}, cotangents=self.cotangents, dtype=dtype
        )


def _picked(run: _Candidate, kind: str, which: str, dtype: str) -> np.ndarray:
    outcome = run.outcome(dtype)
    if kind == "output":
        return outcome.outputs[int(which)]
    return outcome.parameter_gradients[which]


def _inputs(runs: Sequence[_Candidate], group: Sequence[int], dtype: str) -> np.ndarray:
    outcomes = [run.outcome(dtype) for run in runs]
    return np.sum([o.input_gradients[n] for o in outcomes for n in group], axis=0)
