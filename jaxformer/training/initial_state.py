"""The state before a run's next step: drawn, of a model that was read, or of a checkpoint."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxformer.adapters import is_adapter
from jaxformer.checkpoints import GROUPS, Arrays, Cast, Manifest
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_tree import flatten
from jaxformer.distributed import processes
from jaxformer.errors import Setting, UsageError
from jaxformer.execution.delayed_draws import DelayedKeys, draw_arrays
from jaxformer.execution.seeds import seed_key
from jaxformer.parameters import Parameters, split
from jaxformer.train_step import TrainState
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment, WarmStart
from jaxformer.training.parallel import StepSpec, Strategy
from jaxformer.training.parallel.step_spec import make_model
from jaxformer.training.parallel.strategy import PlannedParameters
from jaxformer.training.resume_checks import check_resumable, check_steps, other_settings
from jaxformer.training.run_folder import RunFolder
from jaxformer.training.state_arrays import (
    check_arrays,
    check_manifest,
    from_arrays,
    state_shapes,
)


def first_state(
    experiment: Experiment,
    strategy: Strategy,
    dtypes: Mapping[str, np.dtype],
    cast: Cast | None,
) -> tuple[TrainState, list[str]]:
    """Returns the state of a run that is not resumed, placed, and what to tell the user.

    Args:
        experiment: the run; it starts from drawn weights, or from a model that was read.
        strategy: where the state is placed.
        dtypes: those that training keeps, by ``group/path``.
        cast: what changes floats of other dtypes; None rejects them.

    Raises:
        CheckpointError: what the run starts from does not fit its settings.
        UsageError: no step is left, or an optimizer's state is not of new adapters.
    """
    config, start = experiment.config, experiment.start
    if start is None:
        return strategy.initial_state(plan_parameters(config.model, config.seed)), []
    start, notes = _widen(start, dtypes)
    if start.optimizer is not None:
        notes += other_settings(start.optimizer_settings, config.optimizer)
    notes += [
        f"{name} {before} -> {now}: the model is not that of {start.source}"
        for name, (before, now) in _changed_settings(start, config.model).items()
    ]
    start = _draw_adapters(start, config, strategy.spec)
    return _load_warm_start(start, config.model, config.steps, strategy, cast), notes


def restore_state(
    experiment: Experiment, folder: RunFolder, strategy: Strategy, cast: Cast | None
) -> tuple[TrainState, Manifest, list[str], list[str]]:
    """Returns the newest checkpoint's state, placed, its manifest, notes and warnings.

    Raises:
        CheckpointError: it does not fit the run's settings; the folder is left as it was.
        UsageError: a setting was changed that a resumed run must not change.
    """
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
    check_steps(manifest, config)
    # A run that is rejected must leave the folder as it was, so this comes after ``accept``.
    warnings = processes.on_primary(folder.checkpoints.tidy)
    state = strategy.place(from_arrays(arrays, spec.shapes, spec.optimizer))
    notes = [f"resuming from step {manifest['step']}", *changes]
    before, now = manifest.get("devices"), strategy.description
    if before not in (None, now):
        notes.append(f"{before} -> {now}: the same run up to rounding, not bitwise")
    if manifest["step"] > 0 and not (folder.path / "metrics.jsonl").exists():
        notes.append(f"there is no metrics.jsonl: it begins after step {manifest['step']}")
    return state, manifest, notes, warnings + damaged


def draw_parameters(config: TransformerLMConfig | EncoderDecoderConfig, seed: int) -> Parameters:
    """Returns a model's initial parameters, on the default device; not to be compiled."""
    return draw_arrays(plan_parameters(config, seed))


def plan_parameters(
    config: TransformerLMConfig | EncoderDecoderConfig, seed: int
) -> PlannedParameters:
    """Returns a model's initial parameters before they are drawn, for ``draw_arrays``."""
    planned: Any = split(make_model(config, DelayedKeys(nnx.Rngs(seed_key(seed)))))[1]
    return planned


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


def _draw_adapters(start: WarmStart, config: TrainConfig, spec: StepSpec) -> WarmStart:
    """Returns the start with new adapters, where the model has some and the start has none."""
    given = start.arrays["parameters"]
    missing = [name for name in spec.shapes if is_adapter(name) and name not in given]
    if not missing:
        return start
    if start.step:
        raise UsageError(
            f"{start.source} holds an optimizer's state, which is not of new adapters: take its "
            "weights alone with ",
            Setting("fresh_optimizer"),
        )

    planned = plan_parameters(config.model, config.seed)
    drawn = draw_arrays({name: planned[name] for name in missing})
    arrays = {**start.arrays, "parameters": {**given, **drawn}}
    return dataclasses.replace(start, arrays=arrays)


def _check_same_model(start: WarmStart, model: Any, shapes: Mapping[str, Any]) -> None:
    """Checks that the settings are of the model that a run starts from.

    Raises:
        UsageError: they make other arrays; the settings that differ are named.
    """
    given = start.arrays["parameters"]
    if {n: tuple(x.shape) for n, x in given.items()} == {n: x.shape for n, x in shapes.items()}:
        return
    if changed := _changed_settings(start, model):
        has = ", ".join(f"{name} {before}" for name, (before, _) in changed.items())
        named = [
            part
            for name, (_, now) in changed.items()
            for part in (Setting(name, value=str(now)), ", ")
        ]
        raise UsageError(
            *named[:-1], f" contradicts the model in {start.source}, which has {has}: leave it out"
        )


def _changed_settings(start: WarmStart, model: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the settings that make another function than the model that a run starts from.

    Each is there with what it was and what it is now.
    """
    before, now = flatten(start.model), flatten(model)
    # Neither rates of dropout nor new adapters contradict it.
    free = ("dropout",) if before.get("lora_rank") else ("dropout", "lora_")
    return {
        name: (before.get(name), value)
        for name, value in now.items()
        if value != before.get(name) and not any(part in name for part in free)
    }


def _load_warm_start(
    start: WarmStart, model: Any, steps: int, strategy: Strategy, cast: Cast | None
) -> TrainState:
    """The state that a model of another run gives, placed; moments are zero if it has none."""
    if start.step >= steps:
        raise UsageError(
            f"{start.source} has {start.step} steps behind it: give more ",
            Setting("steps"),
            ", or ",
            Setting("fresh_optimizer"),
            " to begin at step 0",
        )
    spec = strategy.spec
    shapes = state_shapes(spec.shapes, spec.optimizer)
    found = [group for group in GROUPS if group in start.arrays]
    given = {group: shapes.get(group, {}) for group in found}
    _check_same_model(start, model, spec.shapes)
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
