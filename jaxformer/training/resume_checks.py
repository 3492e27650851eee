"""Which settings a resumed run may change, and which it must keep."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxformer.checkpoints import Manifest
from jaxformer.config import OptimizerConfig
from jaxformer.errors import CheckpointError, Setting, UsageError
from jaxformer.training.config import TrainConfig

# With another value the state would no longer be that of the same experiment.
FIXED = (
    "model", "data", "encoding", "tokenizer", "block_size", "sampling", "packing", "seed",
    "batch_size", "accumulation", "dtype", "vocabulary", "corpus",
    "optimizer.optimizer", "optimizer.ema", "source_length", "target_begin", "truncate",
)  # fmt: skip


def check_settings(before: TrainConfig, now: TrainConfig) -> None:
    """Checks that a resumed run keeps the settings that it must keep.

    Raises:
        UsageError: it does not; all such settings are named.
    """
    _reject_fixed(dict(differences(before.to_dict(), now.to_dict())))


def check_resumable(
    manifest: Manifest, config: TrainConfig, vocabulary: str | None, corpus_sha256: str
) -> list[str]:
    """Checks that a run can continue from a checkpoint.

    Args:
        manifest: of the checkpoint.
        config: the settings of the run from here on.
        vocabulary: its characters in the order of their ids; None if tokens are not characters.
        corpus_sha256: of its text.

    Returns:
        The settings that changed and may change, one line each.

    Raises:
        UsageError: a setting changed that a resumed run must keep; all such settings are named.
        CheckpointError: the manifest has no settings.
    """
    # Read back, so that JSON's lists are tuples again and settings since added have their defaults.
    try:
        before = TrainConfig.from_dict(manifest["config"]).to_dict()
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest of step {manifest['step']} has no settings that can be read: {error}"
        ) from error
    changes = dict(differences(before, config.to_dict()))
    characters, corpus = manifest.get("vocabulary"), manifest.get("corpus")
    if characters != vocabulary:
        changes["vocabulary"] = " -> ".join(
            "tokens of a tokenizer" if known is None else f"{len(known)} characters"
            for known in (characters, vocabulary)
        )
    if corpus is None:
        raise UsageError(
            "this folder holds a ported model and no run: start one with ",
            Setting("init_from"),
            ", in another",
        )
    digest = corpus.get("sha256", "")
    if digest != corpus_sha256:
        changes["corpus"] = f"SHA-256 {digest[:12]} -> {corpus_sha256[:12]}"
    _reject_fixed(changes)
    return [f"{name}: {change}" for name, change in changes.items()]


def check_steps(manifest: Manifest, config: TrainConfig) -> None:
    """Checks that a run is to make at least the steps that it has made.

    Args:
        manifest: of the checkpoint from which it continues.
        config: the settings of the run from here on.

    Raises:
        UsageError: it is to make fewer.
    """
    if config.steps < manifest["step"]:
        raise UsageError(
            Setting("steps", value=str(config.steps)),
            f" is below step {manifest['step']}, which this run has reached: give that or more",
        )


def other_settings(given: Mapping[str, float], config: OptimizerConfig) -> Iterator[str]:
    """Yields a line for each setting that an optimizer had, and that a run has changed.

    Args:
        given: by the names of ``OptimizerConfig``, as far as they are known.
        config: the settings of the run.
    """
    own = {
        "beta1": config.beta1,
        "beta2": config.beta2,
        "eps": config.eps,
        "momentum": config.momentum_rate,
        "weight_decay": config.weight_decay,
    }
    for name, value in own.items():
        before = given.get(name, value)
        if not math.isclose(before, value, rel_tol=1e-6):
            yield f"the optimizer had {name} {before:g}, this run has {value:g}"


def _reject_fixed(changes: dict[str, str]) -> None:
    fixed = {
        name: change
        for name, change in changes.items()
        if name in FIXED or name.partition(".")[0] in FIXED
    }
    if fixed:
        kept = ", ".join(f"{name} ({change})" for name, change in fixed.items())
        # The text is read anew, and may have changed where no setting did.
        advice = "leave that out" if set(fixed) - {"corpus"} else "give the text as it was"
        raise UsageError(f"a resumed run must keep {kept}: {advice}, or start a new run")


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the name and both values of every setting that differs, as ``seed``, ``1 -> 2``."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for inner, change in differences(old, new):
                yield f"{name}.{inner}", change
        elif old != new:
            yield name, f"{old} -> {new}"
