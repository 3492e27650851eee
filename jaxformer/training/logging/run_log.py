"""Where a run reports: the terminal, ``metrics.jsonl`` and metrics services."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxformer.distributed import processes
from jaxformer.errors import ResourceError
from jaxformer.hardware.invocation import command
from jaxformer.storage.durable_files import atomic_write_text
from jaxformer.training.config import TrainConfig
from jaxformer.training.logging.metrics import (
    MetricsFile,
    MetricsService,
    Sink,
    StepsFile,
    Tracker,
    plot_losses,
    read_metrics,
    read_samples,
)
from jaxformer.training.logging.progress import Reporter
from jaxformer.training.logging.report_page import make_report


class RunLog:
    """The reports of one run; in all processes but the primary one nothing is written or shown.

    Used as a context manager, which opens and closes the sinks.

    Args:
        folder: of the run.
        config: its settings.
        first_step: the step that the run continues from.
        trackers: metrics services to write to, beside ``metrics.jsonl``.
        reporter: the class of the attribute.

    Attributes:
        reporter: for the person at the terminal.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        first_step: int,
        trackers: Sequence[Tracker],
        reporter: type[Reporter] = Reporter,
    ):
        self._folder = folder
        self._config = config
        self._first_step = first_step
        self._trackers = trackers
        self._sinks: list[Sink] = []
        self._samples: StepsFile | None = None
        self.reporter = reporter(config.steps, first_step, quiet=not processes.is_primary())

    def __enter__(self) -> "RunLog":
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            if processes.is_primary():
                self._sinks.append(MetricsFile(self.metrics_path, self._first_step))
                self._samples = StepsFile(self._folder / "samples.jsonl", self._first_step)
                for name in self._trackers:
                    settings = self._config.to_dict()
                    service = MetricsService(name, self._folder, settings, self.reporter.warn)
                    self._sinks.append(service)
            on_error.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the progress bar away and closes the sinks."""
        self.reporter.close()
        for sink in self._sinks:
            sink.close()
        if self._samples is not None:
            self._samples.close()

    @property
    def metrics_path(self) -> Path:
        """``metrics.jsonl`` in the run's folder."""
        return self._folder / "metrics.jsonl"

    def write(self, **record: float) -> None:
        """Writes the numbers of one step to all sinks.

        Raises:
            ResourceError: ``metrics.jsonl`` could not be written.
        """
        for sink in self._sinks:
            sink.write(record)

    def sample(self, step: int, text: str) -> None:
        """Shows a text that the model wrote after a step, and keeps it in ``samples.jsonl``.

        Raises:
            ResourceError: ``samples.jsonl`` could not be written.
        """
        self.reporter.sample(text)
        if self._samples is not None:
            self._samples.write({"step": step, "text": text})

    def finish(self, devices: str) -> None:
        """Draws the loss curve, writes the report, and says how to use the trained model.

        Args:
            devices: what the model was trained on, in words.
        """
        picture = self._folder / "loss.png"
        title = f"{self._folder.name} · {self._config.data}"
        records = read_metrics(self.metrics_path)
        drawn = plot_losses(records, picture, title)
        report = self._write_report(records, devices)
        self.reporter.note(
            f"done: {self._folder}"
            + (f", loss curve in {picture}" if drawn else " (no loss curve: matplotlib is missing)")
            + f", report in {report}"
        )
        self.reporter.note(f"write more with: {command('sample', self._folder)}")

    def stop(self, devices: str) -> None:
        """Writes the report of a run that is not done, once it has made a step.

        Args:
            devices: see ``finish``.
        """
        records = read_metrics(self.metrics_path)
        # All that the run needs is saved: that it stops matters more than its report.
        with contextlib.suppress(ResourceError):
            if records:
                self._write_report(records, devices)

    def _write_report(self, records: Sequence[Mapping[str, Any]], devices: str) -> Path:
        report = self._folder / "report.html"
        samples = read_samples(self._folder / "samples.jsonl")
        page = make_report(self._folder, self._config, records, samples, devices)
        atomic_write_text(report, page)
        return report
