"""The training loop: steps, evaluations and checkpoints until a run is done."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxformer.costs import count_training_operations
from jaxformer.distributed import processes
from jaxformer.errors import ResourceError, StoppedError, TextError
from jaxformer.hardware.accelerators import Utilization
from jaxformer.hardware.invocation import command
from jaxformer.parameters import merge
from jaxformer.training.batches import make_batches
from jaxformer.training.divergence import all_finite, not_finite, report_divergence
from jaxformer.training.evaluation import Evaluator
from jaxformer.training.experiment import Experiment
from jaxformer.training.logging.metrics import Tracker, check_trackers, read_metrics
from jaxformer.training.logging.noise_scale import NoiseScale
from jaxformer.training.logging.progress import Reporter
from jaxformer.training.logging.run_log import RunLog
from jaxformer.training.products import choose_products
from jaxformer.training.profiling import Profile
from jaxformer.training.run_folder import RunFolder
from jaxformer.training.startup import StartingPoint, agree_on_devices, start_run
from jaxformer.training.state_arrays import averaged_parameters
from jaxformer.training.step_scheduler import StepScheduler, StopSignal


def train(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    cast: bool = False,
    trackers: Sequence[Tracker] = (),
    profile_steps: int | None = None,
    reporter: type[Reporter] = Reporter,
) -> None:
    """Trains, evaluates, samples and saves until ``config.steps`` steps are made.

    A fresh run that ends before its first step leaves nothing behind. Where several processes train
    together, all of them call this; the primary process alone writes and reports.

    Args:
        experiment: the run.
        out: its folder.
        resume: continue with the run that is in the folder.
        cast: let what the run starts from have floats of another dtype, and change them.
        trackers: metrics services to write to, beside ``metrics.jsonl``.
        profile_steps: how many steps to trace, after warm-up, into the folder.
        reporter: what shows the run to the person at the terminal.

    Raises:
        JaxformerError: the run cannot be made; see ``errors`` for the kinds.
        DivergedError: a loss, a gradient or the state is not finite; that state is not saved.
        StoppedError: SIGINT or SIGTERM came, or nobody reads what is shown; everything is saved.
    """
    devices = agree_on_devices(experiment)
    is_primary = processes.is_primary()
    processes.all_or_raise(lambda: check_trackers(trackers if is_primary else ()))
    with StopSignal() as stop, RunFolder(out, resume=resume) as folder:
        config, notes = choose_products(experiment.config, devices, resumed=resume)
        experiment = dataclasses.replace(experiment, config=config)
        with experiment.execution_settings():
            start = start_run(experiment, devices, folder, cast=cast)
            processes.set_exit_hint(lambda: _describe_recovery(folder))
            with RunLog(folder.path, experiment.config, start.step, trackers, reporter) as log:
                log.reporter.when_reader_leaves(stop.note_lost_reader)
                log.reporter.introduce(start.summary, start.warnings, notes + start.notes)
                traced = profile_steps if is_primary else None
                try:
                    with Profile(folder.path / "profile", traced, log.reporter) as profile:
                        scheduler = StepScheduler(stop, profile, experiment.config.steps_per_call)
                        loop = TrainingLoop(experiment, start, folder, log, scheduler)
                        with contextlib.closing(loop.batches):
                            loop.run()
                except RuntimeError as error:
                    processes.exit_if_peer_lost(error)
                    raise


def _describe_recovery(folder: RunFolder) -> str:
    """What a run that has lost a process has saved, and how to resume it."""
    return (
        f"{folder.checkpoints.last_saved()}: "
        f"all processes resume there with {command('train', '--resume', '--out', folder.path)}"
    )


class TrainingLoop:
    """The steps of one run, and what happens between them.

    Args:
        experiment: the run.
        start: its strategy, and the state before its next step.
        folder: where it is kept.
        log: where it reports.
        scheduler: decides how many steps a call makes, and when to stop.
    """

    def __init__(
        self,
        experiment: Experiment,
        start: StartingPoint,
        folder: RunFolder,
        log: RunLog,
        scheduler: StepScheduler,
    ):
        self.config = config = experiment.config
        self.strategy = strategy = start.strategy
        self.folder = folder
        self.devices = start.summary["devices"]
        self.log = log
        self.scheduler = scheduler
        self.evaluator = Evaluator(experiment, strategy)
        self.writes_samples = start.writes_samples
        self.batches = make_batches(experiment, strategy)
        self.validation = experiment.validation
        self.bytes_per_token = experiment.bytes_per_token
        self.utilization = Utilization.of(
            count_training_operations(
                merge(strategy.spec.definition, dict(strategy.spec.shapes)),
                *config.row_lengths,
            ),
            strategy.devices,
            config.dtype,
        )
        warm_start, corpus = experiment.start, experiment.corpus
        self.manifest = {
            "config": config.to_dict(),
            "vocabulary": experiment.vocabulary,
            "corpus": {"name": corpus.name, "sha256": corpus.sha256},
            "init_from": start.manifest.get("init_from")
            if warm_start is None
            else warm_start.source,
            "devices": strategy.description,
        }
        about = start.manifest if warm_start is None else warm_start.about
        self.manifest |= {k: about[k] for k in ("origin", "token_ids") if about.get(k)}
        self.saves_first = warm_start is not None and not start.manifest
        self.step, self.state = start.step, start.state
        # The validation loss of ``state``, and the step and loss of the newest checkpoint.
        self.val_loss: float | None = start.manifest.get("val_loss")
        self.saved = (self.step, self.val_loss) if start.manifest else None
        self.noise_scale: NoiseScale | None = None
        if config.optimizer.noise_scale:
            self.noise_scale = NoiseScale(config.batch_size)
            if self.step and log.metrics_path.exists():
                self.noise_scale.replay(read_metrics(log.metrics_path))
        # The numbers of the step that was made last, and where its windows begin.
        self.last_record: dict[str, Any] = {}

    def run(self) -> None:
        """Makes the steps that are left.

        Raises:
            DivergedError: a loss, a gradient or the state is not finite.
            StoppedError: a signal came.
        """
        config = self.config
        if self.step < config.steps:
            self._compile()
        if self.saves_first:
            # A run that is cut off before its first step must not resume from random weights.
            self._evaluate()
            self._save()
        while True:
            if self.val_loss is None and self._is_due(config.eval_interval):
                self._evaluate()
            signal_number = self.scheduler.stop_signal()
            if self._is_due(config.checkpoint_interval) or signal_number is not None:
                self._save()
            if self.step >= config.steps and self.val_loss is not None:
                self.folder.checkpoints.wait()
                return processes.on_primary(lambda: self.log.finish(self.devices))
            if signal_number is not None:
                self.folder.checkpoints.wait()
                processes.on_primary(lambda: self.log.stop(self.devices))
                self._stop(signal_number)
            intervals = (config.eval_interval, config.checkpoint_interval)
            self._train_until(
                min(config.steps, *(self.step - self.step % n + n for n in intervals))
            )

    def _compile(self) -> None:
        """Makes no step, so that the time of the first step is that of a step alone."""
        self.state, _ = self.strategy.train(self.state, *self.batches.take(self.step, 0), 0)

    def _is_due(self, interval: int) -> bool:
        return self.step >= self.config.steps or (self.step > 0 and self.step % interval == 0)

    def _stop(self, signal_number: int) -> NoReturn:
        error = StoppedError(
            f"stopped after step {self.step}; everything is saved, resume with: "
            f"{command('train', '--resume', '--out', self.folder.path)}",
            signal_number,
        )
        error.already_reported = not processes.is_primary()
        raise error

    def _train_until(self, boundary: int) -> None:
        while self.step < boundary:
            count, until = self.scheduler.plan(self.step, boundary)
            if until == self.step:
                return
            while self.step < until:
                self._train(min(count, until - self.step))

    def _train(self, count: int) -> None:
        """Makes so many steps in one call."""
        begin = time.perf_counter()
        tokens, starts = self._take(count)
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            self.state, history = self.strategy.train(self.state, tokens, starts, count)
        self.val_loss = None
        made = len(history["train_loss"])
        seconds = time.perf_counter() - begin
        self.scheduler.record(self.step, made, seconds)
        self._record_steps(history, seconds / made)

    def _take(self, count: int) -> tuple[Any, Any]:
        """The windows of the next steps; if they cannot be read, what is done is saved first."""
        try:
            return self.batches.take(self.step, count)
        except TextError as error:
            if processes.count() > 1 or self.step == 0:
                raise
            self._save()
            self.folder.checkpoints.wait()
            raise TextError(*error.args, f"; {self.folder.checkpoints.last_saved()}") from error

    def _record_steps(self, history: dict[str, np.ndarray], seconds: float) -> None:
        """Writes the numbers of each step of a call; ``seconds`` is what one of them took."""
        config = self.config
        tokens_per_second = config.batch_size * config.tokens_per_row / seconds
        utilization = self.utilization.record(tokens_per_second)
        for i in range(len(history["train_loss"])):
            record = {name: float(values[i]) for name, values in history.items()}
            step = self.step + 1
            scale = None
            if self.noise_scale is not None:
                record["gradient_parts"] = self.strategy.gradient_parts
                scale = self.noise_scale.update(record)
            if scale is not None:
                record["noise_scale"] = scale
            self._write(
                step=step,
                **record,
                tokens_seen=step * config.batch_size * config.tokens_per_row,
                tokens_per_second=tokens_per_second,
                **utilization,
            )
            self.last_record = {**record, "window_starts": self.batches.starts(step - 1).tolist()}
            if not (math.isfinite(record["train_loss"]) and math.isfinite(record["grad_norm"])):
                self._diverge(step, f"step {step}", {})
            self.step = step
        self.log.reporter.steps_done(
            self.step,
            record["train_loss"],
            tokens_per_second,
            1000 * seconds,
            self.utilization.describe(tokens_per_second),
        )

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        weights = averaged_parameters(self.state)
        losses = self.evaluator.validation_losses(weights, self._has_stopped)
        if losses is None:
            return
        shares = [one.share for one in self.validation]
        val_loss = sum(share * loss for share, loss in zip(shares, losses, strict=True))
        numbers = {"val_loss": val_loss}
        if len(losses) > 1:
            for one, loss in zip(self.validation, losses, strict=True):
                numbers[f"val_loss/{one.name}"] = loss
                if one.bytes_per_token is not None:
                    bits = loss / math.log(2) / one.bytes_per_token
                    numbers[f"val_bits_per_byte/{one.name}"] = bits
        if self.bytes_per_token is not None:
            numbers["val_bits_per_byte"] = val_loss / math.log(2) / self.bytes_per_token
        self._write(step=self.step, **numbers)
        if not math.isfinite(val_loss):
            subject = f"the evaluation after step {self.step}"
            self._diverge(self.step, subject, {"val_loss": val_loss})
        self.val_loss = val_loss
        reporter = self.log.reporter
        reporter.evaluation(
            self.step,
            val_loss,
            time.perf_counter() - begin,
            unit="token" if self.manifest["vocabulary"] is None else "char",
            bytes_per_token=self.bytes_per_token,
        )
        if len(losses) > 1:
            for one, loss in zip(self.validation, losses, strict=True):
                reporter.note(f"  {one.name}: {loss:.4f} nats/token")
        if self.writes_samples:
            parameters = self.strategy.fetch(weights)
            processes.on_primary(
                lambda: self.log.sample(self.step, self.evaluator.sample(parameters, self.step))
            )

    def _has_stopped(self) -> bool:
        return self.scheduler.stop_signal() is not None

    def _save(self) -> None:
        if self.saved == (self.step, self.val_loss):
            return
        arrays = self.strategy.state_arrays(self.state)
        if not all_finite(self.state):
            wrong = not_finite(arrays)
            self._diverge(self.step, f"the state after step {self.step}", {"not_finite": wrong})
        manifest = {**self.manifest, "val_loss": self.val_loss}
        self.folder.checkpoints.save(self.step, arrays, manifest, keep=self.config.keep)
        self.saved = (self.step, self.val_loss)

    def _diverge(self, step: int, subject: str, facts: dict[str, Any]) -> None:
        facts = {**self.last_record, **facts}
        processes.on_primary(lambda: report_divergence(self.folder, step, subject, facts))

    def _write(self, **record: float) -> None:
        try:
            self.log.write(**record)
        except ResourceError as error:
            # A save that is under way counts, if it succeeds.
            self.folder.checkpoints.settle()
            raise ResourceError(*error.args, f"; {self.folder.checkpoints.last_saved()}") from error
