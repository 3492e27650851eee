"""The optimizer of a training run, as the manifest of one of its checkpoints tells it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxformer.config import OptimizerConfig
from jaxformer.config_tree import from_dict
from jaxformer.optimizers import learning_rate


def settings_of_run(
    manifest: Mapping[str, Any],
) -> tuple[str, dict[str, float], float | None]:
    """Returns a run's optimizer and its settings, with the learning rate of its last step.

    Also that of the next step, where it is known.
    """
    if isinstance(manifest.get("optimizer"), dict):
        known = dict(manifest["optimizer"])
        return known.pop("optimizer", "adamw"), known, None
    run = manifest.get("config") or {}
    given = run.get("optimizer")
    if not isinstance(given, dict):
        return "adamw", {}, None
    config: OptimizerConfig = from_dict(OptimizerConfig, given)
    if config.decay_steps is None:
        config = dataclasses.replace(config, decay_steps=run.get("steps"))
    step = manifest["step"]
    last, following = (float(learning_rate(config, at)) for at in (max(step - 1, 0), step))
    settings = {
        "learning_rate": last,
        **{name: getattr(config, name) for name in ("beta1", "beta2", "eps", "weight_decay")},
        "momentum": config.momentum_rate,
    }
    return config.optimizer, settings, following
