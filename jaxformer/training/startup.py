"""Start-up of a run: checks, devices, the strategy, and the state before its next step."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.adapters import is_adapter
from jaxformer.checkpoints import GROUPS, Arrays, Cast, Manifest
from jaxformer.config import TransformerLMConfig
from jaxformer.data.corpora import Corpus
from jaxformer.distributed import processes
from jaxformer.errors import JaxformerError, TextError, UsageError
from jaxformer.execution.attention_backends import slowed_by_dropout
from jaxformer.hardware.memory import device_memory
from jaxformer.hardware.units import format_count
from jaxformer.packing import PackedRows
from jaxformer.parameters import Parameters, split
from jaxformer.sampling import MixedRows
from jaxformer.train_step import TrainState
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment, WarmStart
from jaxformer.training.memory import check_memory, too_large_for_samples
from jaxformer.training.parallel import StepSpec, Strategy, make_strategy
from jaxformer.training.parallel.devices import check_devices, choose_devices
from jaxformer.training.resume_checks import check_resumable, differences
from jaxformer.training.run_folder import RunFolder
from jaxformer.training.state_arrays import (
    check_arrays,
    check_manifest,
    from_arrays,
    state_dtypes,
    state_shapes,
)
from jaxformer.transformer_lm import TransformerLM


@dataclasses.dataclass(frozen=True)
class StartingPoint:
    """A run that is ready for its next step.

    Attributes:
        strategy: the step on the run's devices.
        state: placed on them.
        step: how many steps the state has behind it.
        manifest: of the checkpoint that was restored; empty for a fresh run.
        writes_samples: whether every evaluation writes a text.
        summary: for the user, what is about to run, by name.
        warnings: for the user.
        notes: for the user, of what was restored or cast.
    """

    strategy: Strategy
    state: TrainState
    step: int
    manifest: Manifest
    writes_samples: bool
    summary: dict[str, str]
    warnings: list[str]
    notes: list[str]


def agree_on_devices(experiment: Experiment) -> list[jax.Device]:
    """Returns the devices of all processes, once all have the same run and room for it.

    Raises:
        UsageError: the processes have different settings, or their devices too little memory.
        TextError: the processes have different texts.
        DeviceError: mesh or batch do not divide over the devices.
    """
    config = experiment.config
    _check_same_everywhere(experiment)

    def choose() -> list[jax.Device]:
        devices = choose_devices(config)
        check_devices(config, len(devices))
        check_memory(config, len(devices), device_memory(devices))
        return devices

    return processes.all_or_raise(choose)


def _check_same_everywhere(experiment: Experiment) -> None:
    """Checks that all processes have the same settings and the same text."""

    def different_text(first: str, here: str) -> JaxformerError:
        return TextError(
            f"{experiment.corpus.name} here is not that of process 0: SHA-256 {here[:16]}…, not "
            f"{first[:16]}…: give all processes the same text"
        )

    def different_settings(first: str, here: str) -> JaxformerError:
        changes = differences(json.loads(first), json.loads(here))
        return UsageError(
            "the settings here are not those of process 0: "
            + ", ".join(f"{name} ({change})" for name, change in changes)
            + ": give all processes the same flags"
        )

    processes.check_equal(experiment.corpus.sha256, different_text)
    processes.check_equal(json.dumps(experiment.config.to_dict()), different_settings)


def start_run(
    experiment: Experiment, devices: list[jax.Device], folder: RunFolder, *, cast: bool
) -> StartingPoint:
    """Builds or restores the training state, and takes possession of the run's folder.

    Args:
        experiment: the run.
        devices: those of all processes.
        folder: where the run is kept; its newest checkpoint is restored if it is resumed.
        cast: let initial or restored floats have another dtype, and change them.

    Raises:
        CheckpointError: what the run starts from does not fit its settings.
        UsageError: a resumed run must not change a setting that was changed, or no step is left.
    """
    config, start = experiment.config, experiment.start
    spec = StepSpec.from_config(config, experiment.row)
    strategy = make_strategy(config, spec, devices)
    dtypes = state_dtypes(state_shapes(spec.shapes, spec.optimizer))
    dtype_cast = Cast(dtypes) if cast else None
    manifest: Manifest = {}
    if folder.resumed:
        state, manifest, notes, warnings = _restore(experiment, folder, strategy, dtype_cast)
    else:
        if start is None:
            notes = []
            state = strategy.initial_state(lambda: draw_parameters(config.model, config.seed))
        else:
            start, notes = _widen(start, dtypes)
            start = _draw_adapters(start, config, spec)
            state = _load_warm_start(start, config.steps, strategy, dtype_cast)
        warnings = processes.on_primary(folder.checkpoints.tidy)
    notes += [] if dtype_cast is None else dtype_cast.notes()
    step = int(strategy.fetch(state.step))
    folder.begin(config, experiment.files)
    warnings += _warn_unshared(folder)
    writes_samples = config.sample_tokens > 0
    reason = processes.broadcast(too_large_for_samples(config, device_memory(devices)))
    if writes_samples and reason:
        writes_samples = False
        warnings.append(reason)
    # Documents in one window are beyond the fused kernels anyway.
    reason = None if config.packing else slowed_by_dropout(config.model, config.dtype)
    if reason:
        warnings.append(reason)
    summary = _summarize(experiment, strategy, folder.path)
    return StartingPoint(strategy, state, step, manifest, writes_samples, summary, warnings, notes)


def draw_parameters(config: TransformerLMConfig, seed: int) -> Parameters:
    """Returns a model's initial parameters; to be compiled, as one by one they take much longer."""
    return split(TransformerLM(config, rngs=nnx.Rngs(seed)))[1]


def _widen(start: WarmStart, dtypes: Mapping[str, np.dtype]) -> tuple[WarmStart, list[str]]:
    """Changes weights to the dtypes that training keeps, where those hold every number exactly.

    Args:
        start: what to start from.
        dtypes: those that training keeps, by ``group/path``.

    Returns:
        The same with wider arrays, and what to tell the user.
    """
    before: set[str] = set()

    def widen(name: str, array: Any) -> Any:
        dtype = dtypes.get(name, array.dtype)
        if array.dtype == dtype or jnp.promote_types(array.dtype, dtype) != dtype:
            return array
        before.add(np.dtype(array.dtype).name)
        return np.asarray(array).astype(dtype)

    arrays = {
        group: {name: widen(f"{group}/{name}", array) for name, array in found.items()}
        if group in GROUPS
        else found
        for group, found in start.arrays.items()
    }
    exact = f", whose {' and '.join(sorted(before))} is kept as float32, exactly" if before else ""
    return dataclasses.replace(start, arrays=arrays), [f"starting from {start.source}{exact}"]


def _load_warm_start(
    start: WarmStart, steps: int, strategy: Strategy, cast: Cast | None
) -> TrainState:
    """The state that a model of another run gives, placed; moments are zero if it has none."""
    if start.step >= steps:
        raise UsageError(
            f"{start.source} has {start.step} steps behind it: give more --steps, or "
            "--fresh-optimizer to begin at step 0"
        )
    spec = strategy.spec
    shapes = state_shapes(spec.shapes, spec.optimizer)
    found = [group for group in GROUPS if group in start.arrays]
    given = {group: shapes.get(group, {}) for group in found}
    check_arrays({g: start.arrays[g] for g in found}, given, cast=cast is not None)
    arrays: Arrays = {
        group: {
            name: np.asarray(array) if cast is None else cast(f"{group}/{name}", np.asarray(array))
            for name, array in start.arrays[group].items()
        }
        for group in found
    }
    arrays["step"] = start.step
    if found == ["parameters"]:
        del shapes["parameters"], shapes["step"]
        arrays |= {**jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes), "step": 0}
    if "ema" in shapes:
        # An average begins with the first weights.
        arrays["ema"] = {name: arrays["parameters"][name] for name in shapes["ema"]}
    placed: TrainState = strategy.place(from_arrays(arrays, spec.shapes, spec.optimizer))
    return placed


def _draw_adapters(start: WarmStart, config: TrainConfig, spec: StepSpec) -> WarmStart:
    """Returns the start with new adapters, where the model has some and the start has none."""
    given = start.arrays["parameters"]
    missing = [name for name in spec.shapes if is_adapter(name) and name not in given]
    if not missing:
        return start
    if start.step:
        raise UsageError(
            f"{start.source} holds an optimizer's state, which is not of new adapters: take its "
            "weights alone with --fresh-optimizer"
        )

    def draw() -> Parameters:
        parameters = draw_parameters(config.model, config.seed)
        return {name: parameters[name] for name in missing}

    # What is not returned is not computed.
    arrays = {**start.arrays, "parameters": {**given, **jax.jit(draw)()}}
    return dataclasses.replace(start, arrays=arrays)


def _restore(
    experiment: Experiment, folder: RunFolder, strategy: Strategy, cast: Cast | None
) -> tuple[TrainState, Manifest, list[str], list[str]]:
    """The newest checkpoint's state, placed, its manifest, notes and warnings."""
    config, spec = experiment.config, strategy.spec
    changes: list[str] = []

    def accept(manifest: Manifest) -> Cast | None:
        changes[:] = check_resumable(
            manifest, config, experiment.vocabulary, experiment.corpus.sha256
        )
        shapes = state_shapes(spec.shapes, spec.optimizer)
        check_manifest(manifest, shapes, cast=cast is not None)
        return cast

    arrays, manifest, damaged = folder.checkpoints.restore_latest(
        quarantine=True, shardings=strategy.shardings(), accept=accept
    )
    # A run that is rejected must leave the folder as it was, so this comes after ``accept``.
    warnings = processes.on_primary(folder.checkpoints.tidy)
    state = strategy.place(from_arrays(arrays, spec.shapes, spec.optimizer))
    notes = [f"resuming from step {manifest['step']}", *changes]
    before, now = manifest.get("devices"), strategy.description
    if before not in (None, now):
        notes.append(f"{before} -> {now}: the same run up to rounding, not bitwise")
    return state, manifest, notes, warnings + damaged


def _warn_unshared(folder: RunFolder) -> list[str]:
    """A warning if a process does not see the run's folder, and so could not resume it."""
    blind = [str(process) for process, sees in enumerate(folder.seen_by()) if not sees]
    if not blind:
        return []
    return [
        f"process {', '.join(blind)} does not see {folder.path}: to resume, all hosts must share it"
    ]


def _describe_data(experiment: Experiment) -> str:
    known = experiment.tokenizer.vocabulary_size()
    if not isinstance(experiment.corpus, Corpus):
        where = ", read from the disk as they are needed" if experiment.is_streamed else ""
        rows = experiment.train_rows
        for part in rows.parts if isinstance(rows, MixedRows) else [rows]:
            if isinstance(part, PackedRows):
                where += (
                    f"; {part.documents:,} documents packed into {len(part):,} windows, which are "
                    f"{100 * part.fill:.1f} % full"
                )
        folders = [folder for folder, _ in experiment.corpus.parts]
        if experiment.row != "ids" and any(folder.train.has_answers for folder in folders):
            where += "; the tokens of answers alone count"
        train = sum(len(folder.train) for folder in folders)
        validation = sum(len(folder.validation) for folder in folders)
        return f"{train:,} + {validation:,} tokens of {known:,}{where}"
    characters = len(experiment.corpus.text)
    if experiment.vocabulary is not None:
        return f"{characters:,} characters, {known} different"
    assert experiment.train_ids is not None
    tokens = len(experiment.train_ids) + len(experiment.validation_ids)
    return f"{characters:,} characters as {tokens:,} tokens of {known:,}"


def _summarize(experiment: Experiment, strategy: Strategy, folder: Path) -> dict[str, str]:
    config, model = experiment.config, experiment.config.model
    size = format_count(sum(p.size for p in strategy.spec.shapes.values()))
    devices = strategy.devices
    hosts = "" if processes.count() == 1 else f" in {processes.count()} processes"
    return {
        "model": f"{model.num_layers} layers, {model.attention.num_heads} heads, "
        f"{model.d_model} wide, context {model.context_length}, {size} parameters",
        "data": f"{experiment.corpus.name}, {_describe_data(experiment)}",
        "steps": f"{config.steps} of {config.batch_size} windows, {config.dtype}",
        "devices": f"{len(devices)} × {devices[0].device_kind}{hosts}, jax {jax.__version__}",
        "folder": str(folder),
    }
