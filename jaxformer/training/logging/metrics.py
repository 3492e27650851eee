"""Metrics of a run: ``metrics.jsonl``, metrics services, and a picture of the losses."""

import contextlib
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from jaxformer.errors import ResourceError, Setting, UsageError
from jaxformer.hardware.invocation import install
from jaxformer.storage.durable_files import atomic_write_text

Tracker = Literal["tensorboard", "wandb", "trackio"]
TRACKER_MODULES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def check_trackers(trackers: Sequence[Tracker]) -> None:
    """Checks that the services are known, and that their packages are installed.

    Raises:
        UsageError: one is not.
    """
    setting = Setting("trackers", flag="tracker")
    for name in trackers:
        if name not in TRACKER_MODULES:
            raise UsageError(setting, f" must be of {', '.join(TRACKER_MODULES)}: got {name!r}")
        if importlib.util.find_spec(TRACKER_MODULES[name]) is None:
            named = setting._replace(value=name)
            raise UsageError(named, f" needs a package: {install(name)}")


class Sink(Protocol):
    """Takes the numbers of a run, step by step."""

    def write(self, record: Mapping[str, float]) -> None:
        """Writes the numbers of step ``record["step"]``."""

    def close(self) -> None:
        """Writes what is still held."""


class StepsFile:
    """A file with one JSON object a line, each with the ``step`` that it belongs to.

    Args:
        path: of the file.
        first_step: the step that a resumed run starts from; later lines are of steps that were
            made but never saved, and will be made again.
    """

    def __init__(self, path: Path, first_step: int = 0):
        if path.exists():
            kept = [json.dumps(r) + "\n" for r in _read_steps(path) if r["step"] <= first_step]
            atomic_write_text(path, "".join(kept))
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any]) -> None:
        """Appends one line, and hands it to the operating system.

        Raises:
            ResourceError: it could not be written.
        """
        try:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
        except OSError as error:
            raise ResourceError(f"could not write {self._path}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file."""
        # A line that is still held could not be written, and ``write`` has said so.
        with contextlib.suppress(OSError):
            self._file.close()


class MetricsFile(StepsFile):
    """The file ``metrics.jsonl``.

    Keys, where they apply: ``step``, ``train_loss`` and ``val_loss`` (nats per token; of a mixture
    the mean by the shares of its sources, beside ``val_loss/NAME`` of each, and its bits per byte),
    ``val_bits_per_byte`` (of tokens that are no characters), ``tokens_seen`` (by this step),
    ``tokens_per_second``, ``grad_norm`` (before clipping), ``learning_rate``,
    ``model_flops_utilization`` (a share) on devices whose peak is known, and ``part_grad_norm``,
    ``gradient_parts`` and ``noise_scale`` (windows) where that is measured.
    """

    def write(self, record: Mapping[str, float]) -> None:
        """Appends one line; what is not finite becomes null.

        Raises:
            ResourceError: it could not be written.
        """
        super().write({k: v if math.isfinite(v) else None for k, v in record.items()})


class MetricsService:
    """A metrics service; after its first failure, reported once, nothing more is sent to it.

    Args:
        name: tensorboard, wandb or trackio.
        folder: the run's folder.
        config: its settings.
        warn: called with one line on what went wrong.
    """

    def __init__(
        self, name: Tracker, folder: Path, config: dict[str, Any], warn: Callable[[str], None]
    ):
        self._name = name
        self._warn = warn
        self._failed = False
        self._log: Callable[[dict[str, float], int], Any] = lambda record, step: None
        self._finish: Callable[[], Any] = lambda: None
        try:
            tracker = importlib.import_module(TRACKER_MODULES[name])
            if name == "tensorboard":
                writer = tracker.SummaryWriter(str(folder / "tensorboard"))
                self._log = lambda record, step: [
                    writer.add_scalar(key, value, step) for key, value in record.items()
                ]
                self._finish = writer.close
            else:
                tracker.init(project="jaxformer", name=folder.name, config=config)
                self._log = lambda record, step: tracker.log(record, step=step)
                self._finish = tracker.finish
        except (Exception, SystemExit) as error:
            self._fail(error)

    def write(self, record: Mapping[str, float]) -> None:
        """Sends the numbers of one step."""
        if not self._failed:
            numbers = {key: value for key, value in record.items() if key != "step"}
            try:
                self._log(numbers, int(record["step"]))
            except (Exception, SystemExit) as error:
                self._fail(error)

    def close(self) -> None:
        """Ends the run in the service."""
        if not self._failed:
            try:
                self._finish()
            except (Exception, SystemExit) as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self._failed = True
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        self._warn(f"{self._name} does not answer ({reason}); metrics.jsonl is still written")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``MetricsFile``, without lines that are cut short or damaged."""
    numbers = (int, float, type(None))
    return [one for one in _read_steps(path) if all(type(v) in numbers for v in one.values())]


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Returns the texts that a run has written, each with its step, without damaged lines."""
    return [one for one in _read_steps(path) if isinstance(one.get("text"), str)]


def _read_steps(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``StepsFile``, without lines that are cut short or damaged."""
    records = []
    for line in path.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and type(record.get("step")) is int:
            records.append(record)
    return records


def plot_losses(records: Sequence[Mapping[str, Any]], path: Path, title: str) -> bool:
    """Draws training and validation loss against the step; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    trained = [(r["step"], r["train_loss"]) for r in records if r.get("train_loss") is not None]
    evaluated = [(r["step"], r["val_loss"]) for r in records if r.get("val_loss") is not None]
    # A layout that measures its texts would draw all of it three times.
    figure = Figure(figsize=(8, 4.5))
    axes = figure.subplots(gridspec_kw={"left": 0.09, "right": 0.98, "top": 0.92, "bottom": 0.12})
    if trained:
        steps, losses = zip(*trained, strict=True)
        axes.plot(steps, losses, color="#9db4c0", linewidth=0.8, label="training, each step")
    if evaluated:
        steps, losses = zip(*evaluated, strict=True)
        axes.plot(
            steps, losses, "o-", color="#c1121f", markersize=4, label="validation, whole split"
        )
        axes.annotate(
            f"{losses[-1]:.3f}", (steps[-1], losses[-1]), xytext=(0, 10),
            textcoords="offset points", ha="right", color="#c1121f",
        )  # fmt: skip
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    return True
