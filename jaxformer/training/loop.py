"""From settings to a trained model: the run that ``train.py`` makes."""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from jaxformer.char_data import evaluation_windows, window_starts
from jaxformer.costs import count_training_operations
from jaxformer.distributed import processes
from jaxformer.errors import ResourceError, StoppedError
from jaxformer.execution.attention_backends import attention_kernel, slowed_by_dropout
from jaxformer.generation import generate
from jaxformer.hardware.accelerators import Utilization
from jaxformer.parameters import Parameters, merge
from jaxformer.train_step import TrainState
from jaxformer.training.divergence import all_finite, not_finite, report_divergence
from jaxformer.training.experiment import (
    Experiment,
    evaluation_batch_size,
    make_strategy,
    run_as,
)
from jaxformer.training.logging.metrics import (
    MetricsFile,
    Service,
    Sink,
    Tracker,
    check_trackers,
    plot_losses,
    read_metrics,
)
from jaxformer.training.logging.progress import Reporter
from jaxformer.training.memory import too_large_for_samples
from jaxformer.training.parallel.device_counts import describe_devices
from jaxformer.training.parallel.strategies import Strategy
from jaxformer.training.profiling import Profile
from jaxformer.training.run_folder import RunFolder, StopSignal
from jaxformer.training.starting import (
    after_loss,
    check_same,
    starting_point,
    summary,
    unseen,
    usable_devices,
)
from jaxformer.training.step_scheduler import StepScheduler


def train(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    cast: bool = False,
    trackers: Sequence[Tracker] = (),
    profile_steps: int | None = None,
) -> None:
    """Trains, evaluates, samples and saves until ``config.steps`` steps are made.

    A fresh run that ends before its first step leaves nothing behind. Where several processes train
    together, all of them call it; the first one alone writes and tells.

    Args:
        experiment: what to do.
        out: the run's folder.
        resume: go on with the run that is there.
        cast: let what it starts from have floats of another dtype, and change them.
        trackers: metrics services to write to, beside metrics.jsonl.
        profile_steps: how many steps to trace, after warm-up, into the folder.

    Raises:
        JaxformerError: one of its kinds, for whatever is refused; see ``errors``.
        DivergedError: a loss, a gradient or the state is not finite; that state is not saved.
        StoppedError: SIGINT or SIGTERM came; everything is saved.
    """
    config = experiment.config
    check_same(experiment)
    devices = processes.all_or_raise(lambda: usable_devices(experiment))
    first = processes.is_first()
    processes.all_or_raise(lambda: check_trackers(trackers if first else ()))
    with StopSignal() as stop, RunFolder(out, resume=resume) as folder, run_as(config):
        strategy = make_strategy(experiment, devices)
        state, about, notes, warnings = starting_point(experiment, folder, strategy, cast)
        step = int(strategy.fetch(state.step))
        folder.begin(config, () if experiment.start is None else experiment.start.files)
        warnings += unseen(folder)
        samples = config.sample_tokens > 0
        if samples and (reason := processes.broadcast(too_large_for_samples(config, devices))):
            samples = False
            warnings.append(reason)
        if reason := slowed_by_dropout(config.model, config.dtype):
            warnings.append(reason)
        processes.on_loss(lambda: after_loss(folder))
        reporter = Reporter(config.steps, step, quiet=not first)
        sinks: list[Sink] = []
        try:
            if first:
                sinks.append(MetricsFile(folder.path / "metrics.jsonl", step))
                for name in trackers:
                    sinks.append(Service(name, folder.path, config.to_dict(), reporter.warn))
            reporter.summary(summary(experiment, strategy, folder.path))
            for warning in warnings:
                reporter.warn(warning)
            for note in notes:
                reporter.note(note)
            traced = profile_steps if first else None
            with Profile(folder.path / "profile", traced, reporter) as profile:
                _Run(
                    experiment, folder, strategy, state, step, about, stop, reporter, sinks,
                    profile, samples,
                ).go()  # fmt: skip
        except RuntimeError as error:
            processes.end_if_lost(error)
            raise
        finally:
            reporter.close()
            for sink in sinks:
                sink.close()


class _Run:
    """The steps of one run, with what happens between them.

    Args:
        experiment: what to do.
        folder: where it is kept.
        strategy: how it runs, and where.
        state: what to start from, placed.
        step: how many steps that has behind it.
        about: the manifest of the checkpoint that it comes from, empty for a fresh run.
        stop: says when a signal has come.
        reporter: tells the person at the terminal.
        sinks: take the numbers.
        profile: traces some of the steps.
        samples: whether every evaluation writes a text.
    """

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        strategy: Strategy,
        state: TrainState,
        step: int,
        about: dict[str, Any],
        stop: StopSignal,
        reporter: Reporter,
        sinks: Sequence[Sink],
        profile: Profile,
        samples: bool,
    ):
        self.experiment = experiment
        self.config = config = experiment.config
        self.folder = folder
        self.calls = StepScheduler(stop, profile, config.steps_per_call)
        self.reporter = reporter
        self.sinks = sinks
        self.profile = profile
        self.samples = samples
        self.strategy = strategy
        operations = count_training_operations(
            merge(strategy.definition, strategy.shapes), config.model.context_length
        )
        self.utilization = Utilization.of(operations, strategy.devices, config.dtype)
        self.step = step
        self.state = state
        self.train_tokens = strategy.place_tokens(experiment.train_ids)
        self.validation_tokens = strategy.place_tokens(experiment.validation_ids)
        # The validation loss of the present state, and what the newest checkpoint holds of both.
        self.about = about
        self.val_loss: float | None = about.get("val_loss")
        self.saved = (self.step, self.val_loss) if about else None
        # The numbers of the step that was made last, and its batch.
        self.last: dict[str, Any] = {}

    def go(self) -> None:
        """Makes the steps that are left."""
        config = self.config
        if self.step < config.steps:
            self._compile()
        if self.experiment.start is not None and not self.about:
            # A run cut off before its first step must not go on from random weights.
            self._evaluate()
            self._save()
        while True:
            if self.val_loss is None and self._due(config.eval_interval):
                self._evaluate()
            stopped = self.calls.stopped()
            if self._due(config.checkpoint_interval) or stopped is not None:
                self._save()
            if self.step >= config.steps and self.val_loss is not None:
                self.folder.checkpoints.wait()
                return processes.on_primary(self._finish)
            if stopped is not None:
                self.folder.checkpoints.wait()
                self._stop(stopped)
            intervals = (config.eval_interval, config.checkpoint_interval)
            self._train_until(
                min(config.steps, *(self.step - self.step % n + n for n in intervals))
            )

    def _compile(self) -> None:
        """Makes no step, so that the time of the first one is a step's."""
        starts = np.zeros((self.config.steps_per_call, self.config.batch_size), np.int32)
        self.state, _ = self.strategy.train(self.state, self.train_tokens, starts, 0)

    def _due(self, interval: int) -> bool:
        return self.step >= self.config.steps or (self.step > 0 and self.step % interval == 0)

    def _stop(self, number: int) -> NoReturn:
        error = StoppedError(
            f"stopped after step {self.step}; everything is saved, go on with: "
            f"train.py --resume --out {self.folder.path}",
            number,
        )
        error.already_reported = not processes.is_first()
        raise error

    def _train_until(self, boundary: int) -> None:
        while self.step < boundary:
            count, until = self.calls.plan(self.step, boundary)
            if until == self.step:
                return
            while self.step < until:
                self._train(min(count, until - self.step))

    def _train(self, count: int) -> None:
        """Makes so many steps in one call."""
        config = self.config
        windows = len(self.experiment.train_ids) - config.model.context_length
        starts = np.zeros((config.steps_per_call, config.batch_size), np.int32)
        for i in range(count):
            starts[i] = window_starts(config.seed, self.step + i, config.batch_size, windows)
        begin = time.perf_counter()
        with jax.profiler.StepTraceAnnotation("train", step_num=self.step + 1):
            self.state, history = self.strategy.train(self.state, self.train_tokens, starts, count)
        self.val_loss = None
        made = len(history["train_loss"])
        seconds = (time.perf_counter() - begin) / made
        self.calls.record(seconds)
        self.profile.after(self.step + made, made)
        tokens_per_second = config.batch_size * config.model.context_length / seconds
        speed = {
            "tokens_per_second": tokens_per_second,
            **self.utilization.record(tokens_per_second),
        }
        for i in range(made):
            record = {name: float(values[i]) for name, values in history.items()}
            self._write(step=self.step + 1, **record, **speed)
            self.last = {**record, "window_starts": starts[i].tolist()}
            if not (math.isfinite(record["train_loss"]) and math.isfinite(record["grad_norm"])):
                self._diverged(self.step + 1, f"step {self.step + 1}", {})
            self.step += 1
        self.reporter.steps_done(
            self.step,
            record["train_loss"],
            tokens_per_second,
            1000 * seconds,
            self.utilization.describe(tokens_per_second),
        )

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        ids = self.experiment.validation_ids
        val_loss = self.strategy.evaluate(
            self.state.parameters,
            self.validation_tokens,
            *evaluation_windows(len(ids), self.config.model.context_length),
            evaluation_batch_size(self.config, self.strategy.devices),
            stopped=lambda: self.calls.stopped() is not None,
        )
        if val_loss is None:
            return
        self._write(step=self.step, val_loss=val_loss)
        if not math.isfinite(val_loss):
            what = f"the evaluation after step {self.step}"
            self._diverged(self.step, what, {"val_loss": val_loss})
        self.val_loss = val_loss
        self.reporter.evaluation(self.step, val_loss, time.perf_counter() - begin)
        if self.samples and self.calls.stopped() is None:
            parameters = self.strategy.fetch(self.state.parameters)
            processes.on_primary(lambda: self.reporter.sample(self._sample(parameters)))

    def _diverged(self, step: int, what: str, facts: dict[str, Any]) -> None:
        facts = {**self.last, **facts}
        processes.on_primary(lambda: report_divergence(self.folder, step, what, facts))

    def _sample(self, parameters: Parameters) -> str:
        model = merge(self.strategy.definition, parameters)
        tokenizer = self.experiment.tokenizer
        # A token at a time is not what the kernel asked for was made for.
        with attention_kernel("auto"):
            ids = generate(
                model,
                self.experiment.first_ids[None],
                self.config.sample_tokens,
                temperature=0.8,
                key=jax.random.fold_in(jax.random.key(self.config.seed), self.step),
            )[0]
        return tokenizer.decode(ids[ids < tokenizer.vocabulary_size()])

    def _save(self) -> None:
        if self.saved == (self.step, self.val_loss):
            return
        arrays = self.strategy.state_arrays(self.state)
        if not all_finite(self.state):
            wrong = not_finite(arrays)
            what = f"the state after step {self.step}"
            self._diverged(self.step, what, {"not_finite": wrong})
        corpus = self.experiment.corpus
        start = self.experiment.start
        source = self.about.get("init_from") if start is None else start.source
        self.folder.checkpoints.save(
            self.step,
            arrays,
            {
                "config": self.config.to_dict(),
                "vocabulary": self.experiment.vocabulary,
                "corpus": {"name": corpus.name, "sha256": corpus.sha256},
                "val_loss": self.val_loss,
                "init_from": source,
                "devices": describe_devices(self.config, len(self.strategy.devices)),
            },
            keep=self.config.keep,
        )
        self.saved = (self.step, self.val_loss)

    def _finish(self) -> None:
        picture = self.folder.path / "loss.png"
        records = read_metrics(self.folder.path / "metrics.jsonl")
        drawn = plot_losses(records, picture, f"{self.folder.path.name} · {self.config.data}")
        self.reporter.note(
            f"done: {self.folder.path}"
            + (f", loss curve in {picture}" if drawn else " (no loss curve: matplotlib is missing)")
        )
        self.reporter.note(f"write more with: jaxformer sample {self.folder.path}")

    def _write(self, **record: float) -> None:
        for sink in self.sinks:
            try:
                sink.write(record)
            except ResourceError as error:
                raise ResourceError(f"{error}; {self.folder.checkpoints.last_saved()}") from error
