"""Training runs side by side: the state of each, where their settings differ, and their losses."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.training.config import TrainConfig
from jaxformer.training.logging.metrics import read_metrics
from jaxformer.training.run_folder import holds_run, is_in_use, stored_config

# The speed of a run is the median of so many of its last steps.
TIMED_STEPS = 100


@dataclasses.dataclass(frozen=True)
class RunSummary:
    """One training run, as its folder shows it.

    Attributes:
        folder: of the run.
        config: its settings.
        records: those of ``metrics.jsonl``.
        state: ``training`` (a process holds its lock), ``done``, ``diverged`` or ``stopped``.
        saved: the step of the newest checkpoint; None where there is none.
    """

    folder: Path
    config: TrainConfig
    records: Sequence[Mapping[str, Any]] = dataclasses.field(repr=False)
    state: str
    saved: int | None

    @property
    def step(self) -> int:
        """How many optimizer steps were made."""
        return max((record["step"] for record in self.records), default=0)

    @property
    def train_loss(self) -> float | None:
        """The training loss of the last step, in nats per token."""
        return next((v for _, v in reversed(self.curve("train_loss"))), None)

    @property
    def val_loss(self) -> float | None:
        """The loss of the last evaluation, in nats per token."""
        return next((v for _, v in reversed(self.curve("val_loss"))), None)

    @property
    def best(self) -> tuple[int, float] | None:
        """The step with the lowest validation loss, and that loss."""
        return min(self.curve("val_loss"), key=lambda point: point[1], default=None)

    @property
    def tokens_per_second(self) -> float | None:
        """The speed of training: the median of the last steps."""
        speeds = [v for _, v in self.curve("tokens_per_second")[-TIMED_STEPS:]]
        return statistics.median(speeds) if speeds else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """Returns the points (step, value) of one metric that are finite."""
        return [(r["step"], r[name]) for r in self.records if r.get(name) is not None]

    def to_dict(self) -> dict[str, Any]:
        """Returns what ``jaxformer runs --json`` prints of it."""
        best = self.best
        return {
            "run": str(self.folder),
            "state": self.state,
            "step": self.step,
            "steps": self.config.steps,
            "saved_step": self.saved,
            "train_loss": self.train_loss,
            "val_loss": self.val_loss,
            "best_val_loss": None if best is None else best[1],
            "best_step": None if best is None else best[0],
            "tokens_per_second": self.tokens_per_second,
            "data": self.config.data,
        }


def read_run(folder: Path) -> RunSummary:
    """Reads the state of the run in a folder; nothing is changed, and a running one goes on.

    Raises:
        CheckpointError: the folder holds no run, or it cannot be read.
    """
    try:
        return _read_run(folder)
    except OSError as error:
        file = error.filename or folder
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error


def _read_run(folder: Path) -> RunSummary:
    if not holds_run(folder):
        raise CheckpointError(f"{folder} holds no run")
    config = stored_config(folder)
    metrics = folder / "metrics.jsonl"
    records = read_metrics(metrics) if metrics.exists() else []
    saved = max(CheckpointFolder(folder / "checkpoints").steps(), default=None)
    made = max((record["step"] for record in records), default=0)
    if is_in_use(folder):
        state = "training"
    elif made >= config.steps and saved is not None and saved >= config.steps:
        state = "done"
    elif any(_step_of(path) >= made for path in folder.glob("divergence-*.json")):
        state = "diverged"
    else:
        state = "stopped"
    return RunSummary(folder, config, records, state, saved)


def find_runs(folder: Path) -> list[Path]:
    """Returns the runs in a folder and in the folders below it, in alphabetical order.

    What lies inside a run is not searched. A ported model is no run: its folder has checkpoints,
    and neither settings of a run nor metrics. A folder that may not be searched is listed as a run,
    which cannot be read.

    Raises:
        UsageError: there is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the one that holds the runs")
    try:
        if holds_run(folder):
            is_trained = any((folder / name).exists() for name in ("config.json", "metrics.jsonl"))
            return [folder] if is_trained else []
        below = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except PermissionError:
        return [folder]
    return [run for path in below for run in find_runs(path)]


def different_settings(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """Returns the settings in which the runs differ: the value of each run, by name."""
    tables = [_settings(run.config) for run in runs]
    names = dict.fromkeys(name for table in tables for name in table)
    values = {name: [table.get(name) for table in tables] for name in names}
    return {name: each for name, each in values.items() if any(v != each[0] for v in each[1:])}


def _settings(config: TrainConfig) -> dict[str, Any]:
    """Returns all settings of a run by name, those of the model and of the optimizer among them."""
    flat: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        flat |= value if isinstance(value, dict) else {name: value}
    return flat


def _step_of(path: Path) -> int:
    number = path.stem.partition("-")[2]
    return int(number) if number.isdecimal() else -1
