"""Start-up of a run: checks, devices, the strategy, and what the user is told before the start."""

import dataclasses
import json

import jax

from jaxformer.checkpoints import Cast, Manifest
from jaxformer.distributed import processes
from jaxformer.errors import JaxformerError, TextError, UsageError
from jaxformer.execution.attention_backends import slowed_by_dropout
from jaxformer.hardware.memory import device_memory
from jaxformer.train_step import TrainState
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment
from jaxformer.training.initial_state import first_state, restore_state
from jaxformer.training.memory import check_memory, too_large_for_samples
from jaxformer.training.parallel import StepSpec, Strategy, make_strategy
from jaxformer.training.parallel.devices import check_devices, choose_devices
from jaxformer.training.resume_checks import differences
from jaxformer.training.run_folder import RunFolder
from jaxformer.training.state_arrays import state_dtypes, state_shapes
from jaxformer.training.summary import describe_run


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
    config = experiment.config
    spec = StepSpec.from_config(config, experiment.row)
    strategy = make_strategy(config, spec, devices)
    if _compiles_ahead(experiment, devices, folder):
        ids = experiment.train_ids
        corpus = None if ids is None else len(ids)
        strategy.compile_ahead(spec.state_shapes(), corpus, config.steps_per_call)
    dtypes = state_dtypes(state_shapes(spec.shapes, spec.optimizer))
    dtype_cast = Cast(dtypes) if cast else None
    manifest: Manifest = {}
    if folder.resumed:
        state, manifest, notes, warnings = restore_state(experiment, folder, strategy, dtype_cast)
    else:
        state, notes = first_state(experiment, strategy, dtypes, dtype_cast)
        warnings = processes.on_primary(folder.checkpoints.tidy)
    if folder.starts_over:
        warnings.append(
            f"{folder.path} has no checkpoint: the run starts over at step 0, and what its "
            "metrics.jsonl and samples.jsonl have is replaced"
        )
    notes += [] if dtype_cast is None else dtype_cast.notes()
    step = int(strategy.fetch(state.step))
    warm = experiment.start
    folder.begin(config, experiment.files, None if warm is None else warm.source)
    warnings += _warn_unshared(folder)
    warnings += _warn_long_warmup(config)
    writes_samples = config.sample_tokens > 0
    reason = processes.broadcast(too_large_for_samples(config, device_memory(devices)))
    if writes_samples and reason:
        writes_samples = False
        warnings.append(reason)
    # Documents in one window are beyond the fused kernels anyway.
    reason = None if config.packing else slowed_by_dropout(config.model, config.dtype)
    if reason:
        warnings.append(reason)
    summary = describe_run(experiment, strategy, folder.path)
    return StartingPoint(strategy, state, step, manifest, writes_samples, summary, warnings, notes)


def _compiles_ahead(experiment: Experiment, devices: list[jax.Device], folder: RunFolder) -> bool:
    """Returns whether the step is compiled while its state is drawn.

    What is read may not fit, and the message must not wait for the compiler. On an accelerator the
    compiler measures programs, and would share it with the draws.
    """
    is_drawn = experiment.start is None and not folder.resumed
    return is_drawn and devices[0].platform == "cpu" and processes.count() == 1


def _warn_long_warmup(config: TrainConfig) -> list[str]:
    """A warning if the run ends before its warm-up does, unless its schedule is a longer run's."""
    optimizer, steps = config.optimizer, config.steps
    if optimizer.warmup_steps <= max(steps, optimizer.decay_steps or 0):
        return []
    reached = optimizer.learning_rate * steps / (optimizer.warmup_steps + 1)
    return [
        f"warm-up takes {optimizer.warmup_steps:,} steps, and the run has {steps:,}: the learning "
        f"rate rises to {reached:.3g}, not to {optimizer.learning_rate:g} (--warmup-steps)"
    ]


def _warn_unshared(folder: RunFolder) -> list[str]:
    """A warning if a process does not see the run's folder, and so could not resume it."""
    blind = [str(process) for process, sees in enumerate(folder.seen_by()) if not sees]
    if not blind:
        return []
    return [
        f"process {', '.join(blind)} does not see {folder.path}: to resume, all hosts must share it"
    ]
