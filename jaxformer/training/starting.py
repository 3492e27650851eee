"""What comes before the first step: what is checked, the first state, and what is shown."""

import json
from pathlib import Path
from typing import Any

import jax

from jaxformer.checkpoints import Cast, Manifest
from jaxformer.distributed import processes
from jaxformer.errors import JaxformerError, TextError, UsageError
from jaxformer.hardware.units import format_count
from jaxformer.train_step import TrainState
from jaxformer.training.experiment import (
    Experiment,
    check_devices,
    choose_devices,
    first_state,
)
from jaxformer.training.memory import check_memory
from jaxformer.training.parallel.device_counts import describe_devices
from jaxformer.training.parallel.strategies import Strategy
from jaxformer.training.run_folder import RunFolder, check_resumable, differences
from jaxformer.training.states import check_manifest, from_arrays, model_dtypes


def usable_devices(experiment: Experiment) -> list[jax.Device]:
    """The devices of all processes, once it is clear that the run can be made on them."""
    config = experiment.config
    devices = choose_devices(config)
    check_devices(config, len(devices))
    check_memory(config, devices)
    return devices


def check_same(experiment: Experiment) -> None:
    """Checks that all processes were given the same to do.

    Raises:
        UsageError: their settings differ.
        TextError: their texts differ.
    """

    def other_text(first: str, here: str) -> JaxformerError:
        return TextError(
            f"{experiment.corpus.name} here is not that of process 0: SHA-256 {here[:16]}…, not "
            f"{first[:16]}…: give all processes the same text"
        )

    def other_settings(first: str, here: str) -> JaxformerError:
        changes = differences(json.loads(first), json.loads(here))
        return UsageError(
            "the settings here are not those of process 0: "
            + ", ".join(f"{name} ({change})" for name, change in changes)
            + ": give all processes the same flags"
        )

    processes.same_everywhere(experiment.corpus.sha256, other_text)
    processes.same_everywhere(json.dumps(experiment.config.to_dict()), other_settings)


def unseen(folder: RunFolder) -> list[str]:
    """A warning where a process could not resume the run."""
    blind = [str(process) for process, sees in enumerate(folder.seen_by()) if not sees]
    if not blind:
        return []
    return [
        f"process {', '.join(blind)} does not see {folder.path}: to resume, all hosts must share it"
    ]


def after_loss(folder: RunFolder) -> str:
    """What is left of a run that has lost one of its processes."""
    return (
        f"{folder.checkpoints.last_saved()}: "
        f"start all processes again with train.py --resume --out {folder.path}"
    )


def starting_point(
    experiment: Experiment, folder: RunFolder, strategy: Strategy, cast: bool = False
) -> tuple[TrainState, dict[str, Any], list[str], list[str]]:
    """The first state, placed, the manifest that it comes from, notes and warnings."""
    config = experiment.config
    change = Cast(model_dtypes(config.model)) if cast else None
    if not folder.resumed:
        notes = [] if experiment.start is None else [f"starting from {experiment.start.source}"]
        state = first_state(experiment, strategy, change)
        warnings = processes.on_primary(folder.checkpoints.tidy)
        return state, {}, notes + ([] if change is None else change.notes()), warnings
    changes: list[str] = []

    def accept(manifest: Manifest) -> Cast | None:
        changes[:] = check_resumable(
            manifest, config, experiment.vocabulary, experiment.corpus.sha256
        )
        check_manifest(manifest, config.model, cast=cast)
        return change

    arrays, manifest, damaged = folder.checkpoints.restore_latest(
        quarantine=True, shardings=strategy.shardings(), accept=accept
    )
    # What a run that is refused would have tidied stays as it is.
    warnings = processes.on_primary(folder.checkpoints.tidy)
    _, state = from_arrays(arrays, config.model, experiment.optimizer)
    notes = [f"resuming from step {manifest['step']}", *changes]
    notes += [] if change is None else change.notes()
    before, now = manifest.get("devices"), describe_devices(config, len(strategy.devices))
    if before not in (None, now):
        notes.append(f"{before} -> {now}: the same run up to rounding, not bitwise")
    return strategy.place(state), manifest, notes, warnings + damaged


def summary(experiment: Experiment, strategy: Strategy, folder: Path) -> dict[str, str]:
    """What is about to run, in rows with a name."""
    config, model = experiment.config, experiment.config.model
    size = format_count(sum(p.size for p in strategy.shapes.values()))
    devices = strategy.devices
    hosts = "" if processes.count() == 1 else f" in {processes.count()} processes"
    return {
        "model": f"{model.num_layers} layers, {model.num_heads} heads, {model.d_model} wide, "
        f"context {model.context_length}, {size} parameters",
        "data": f"{experiment.corpus.name}, {len(experiment.corpus.text):,} characters, "
        f"{experiment.tokenizer.vocabulary_size()} different",
        "steps": f"{config.steps} of {config.batch_size} windows, {config.dtype}",
        "devices": f"{len(devices)} × {devices[0].device_kind}{hosts}, jax {jax.__version__}",
        "folder": str(folder),
    }
