"""From settings to a trained model: the run that ``train.py`` makes."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxformer.char_data import (
    CharTokenizer,
    evaluation_windows,
    train_validation_split,
    window_starts,
)
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.errors import DeviceError, DivergedError, StoppedError, UsageError
from jaxformer.generation import generate
from jaxformer.optimizers import make_optimizer
from jaxformer.parameters import Parameters, abstract, merge, split
from jaxformer.train_step import TrainState
from jaxformer.training.checkpoints import Arrays
from jaxformer.training.config import TrainConfig
from jaxformer.training.corpora import Corpus
from jaxformer.training.metrics import MetricsFile, Service, Tracker, plot_losses, read_metrics
from jaxformer.training.progress import Reporter, describe_parameters
from jaxformer.training.run_folder import RunFolder, StopSignal, check_resumable
from jaxformer.training.strategies import DataParallel, check_batch_size
from jaxformer.transformer_lm import TransformerLM

# A call of the compiled step should end often enough to hear a signal and to move the bar.
SECONDS_PER_CALL = 0.5


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Settings with all that follows from the corpus: nothing is left to be filled in.

    Attributes:
        config: with ``model.vocab_size`` set.
        optimizer: with ``decay_steps`` set.
        corpus: the text.
        tokenizer: its characters.
        train_ids: the first 90 % of it, int32.
        validation_ids: the rest.
    """

    config: TrainConfig
    optimizer: OptimizerConfig
    corpus: Corpus
    tokenizer: CharTokenizer
    train_ids: np.ndarray
    validation_ids: np.ndarray

    @classmethod
    def prepare(cls, config: TrainConfig, corpus: Corpus) -> "Experiment":
        """Reads the corpus into ids and completes the settings.

        Raises:
            TextError: a split is shorter than a window.
            UsageError: the vocabulary does not fit ``model.vocab_size``.
        """
        tokenizer = CharTokenizer.train_from_text(corpus.text)
        train_ids, validation_ids = train_validation_split(
            tokenizer.encode(corpus.text), config.model.context_length
        )
        size = config.model.vocab_size or tokenizer.vocabulary_size()
        if size < tokenizer.vocabulary_size():
            raise UsageError(
                f"--vocab-size {size} is less than the {tokenizer.vocabulary_size()} characters "
                f"of {corpus.name}"
            )
        model = dataclasses.replace(config.model, vocab_size=size)
        decay_steps = config.optimizer.decay_steps or config.steps
        return cls(
            dataclasses.replace(config, model=model),
            dataclasses.replace(config.optimizer, decay_steps=decay_steps),
            corpus,
            tokenizer,
            train_ids,
            validation_ids,
        )


def train(
    experiment: Experiment,
    out: Path,
    *,
    resume: bool = False,
    trackers: Sequence[Tracker] = (),
) -> None:
    """Trains, evaluates, samples and saves until ``config.steps`` steps are made.

    Args:
        experiment: what to do.
        out: the run's folder.
        resume: go on with the run that is there.
        trackers: metrics services to write to, beside metrics.jsonl.

    Raises:
        JaxformerError: one of its kinds, for whatever is refused; see ``errors``.
        StoppedError: SIGINT or SIGTERM came; everything is saved.
    """
    config = experiment.config
    devices = choose_devices(config.devices)
    check_batch_size(config.batch_size, config.accumulation, len(devices))
    folder = RunFolder(out, resume=resume)
    try:
        _Run(experiment, folder, devices, resume, trackers).go()
    finally:
        folder.close()


def choose_devices(count: int | None) -> list[jax.Device]:
    """The first ``count`` local devices, or all of them.

    Raises:
        DeviceError: there are fewer.
    """
    devices = jax.local_devices()
    if count is not None and count > len(devices):
        raise DeviceError(f"--devices {count}: this process has {len(devices)}")
    return devices[:count]


def make_parameters(config: TransformerLMConfig, seed: int) -> tuple[nnx.GraphDef, Parameters]:
    """A model's definition and its initial parameters, drawn in one compiled call."""

    def build() -> TransformerLM:
        return TransformerLM(config, rngs=nnx.Rngs(seed))

    definition, _ = abstract(build)
    return definition, jax.jit(lambda: split(build())[1])()


def to_arrays(state: TrainState) -> Arrays:
    """A state as a checkpoint holds it."""
    return {
        "parameters": state.parameters,
        "mu": optax.tree_utils.tree_get(state.optimizer_state, "mu"),
        "nu": optax.tree_utils.tree_get(state.optimizer_state, "nu"),
        "step": state.step,
    }


def from_arrays(arrays: Arrays, optimizer: OptimizerConfig) -> TrainState:
    """The state that a checkpoint holds."""
    empty = make_optimizer(optimizer).init(arrays["parameters"])
    optimizer_state = optax.tree_utils.tree_set(
        empty, mu=arrays["mu"], nu=arrays["nu"], count=np.int32(arrays["step"])
    )
    return TrainState(arrays["parameters"], optimizer_state, np.int32(arrays["step"]))


class _Run:
    """What the steps of one run share."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        devices: list[jax.Device],
        resume: bool,
        trackers: Sequence[Tracker],
    ):
        self.experiment = experiment
        self.config = config = experiment.config
        self.folder = folder
        self.vocabulary = "".join(experiment.tokenizer.vocabulary)
        self.definition, parameters = make_parameters(config.model, config.seed)
        self.parameter_count = sum(p.size for p in parameters.values())
        notes, warnings = [], []
        if resume:
            arrays, manifest, warnings = folder.checkpoints.restore_latest()
            notes = check_resumable(
                manifest, config, self.vocabulary, experiment.corpus.sha256
            )
            state = from_arrays(arrays, experiment.optimizer)
            notes.insert(0, f"resuming from step {int(state.step)}")
        else:
            state = TrainState.create(parameters, experiment.optimizer)
        self.step = int(state.step)
        folder.write_config(config)

        self.parallel = DataParallel(
            self.definition,
            experiment.optimizer,
            seed=config.seed,
            batch_size=config.batch_size,
            accumulation=config.accumulation,
            context_length=config.model.context_length,
            compute_dtype=jnp.bfloat16 if config.dtype == "bfloat16" else None,
            uses_dropout=uses_dropout(config.model),
            devices=devices,
        )
        self.state = self.parallel.replicate(state)
        self.train_tokens = self.parallel.replicate(experiment.train_ids)
        self.validation_tokens = self.parallel.replicate(experiment.validation_ids)
        self.evaluation = evaluation_windows(
            len(experiment.validation_ids), config.model.context_length
        )
        self.val_loss: float | None = None

        self.reporter = Reporter(config.steps, self.step)
        self.metrics = MetricsFile(folder.path / "metrics.jsonl", self.step)
        self.sinks = [self.metrics] + [
            Service(name, folder.path, config.to_dict(), self.reporter.warn) for name in trackers
        ]
        self._summarise(devices)
        for warning in warnings:
            self.reporter.warn(warning)
        for note in notes:
            self.reporter.note(note)

    def go(self) -> None:
        """Makes the steps that are left."""
        config = self.config
        try:
            with StopSignal() as stop:
                while self.step < config.steps:
                    self._train_until(self._next_boundary(), stop)
                    if stop.received is not None:
                        self._stop(stop.received)
                    done = self.step == config.steps
                    if done or self.step % config.eval_interval == 0:
                        self._evaluate()
                    if done or self.step % config.checkpoint_interval == 0:
                        self._save()
            self._finish()
        finally:
            self.reporter.close()
            for sink in self.sinks:
                sink.close()

    def _next_boundary(self) -> int:
        intervals = (self.config.eval_interval, self.config.checkpoint_interval)
        return min(self.config.steps, *(self.step - self.step % n + n for n in intervals))

    def _train_until(self, boundary: int, stop: StopSignal) -> None:
        config = self.config
        count = 1
        windows = len(self.experiment.train_ids) - config.model.context_length
        tokens_per_step = config.batch_size * config.model.context_length
        while self.step < boundary and stop.received is None:
            count = min(count, boundary - self.step)
            starts = np.zeros((config.steps_per_call, config.batch_size), np.int32)
            for i in range(count):
                starts[i] = window_starts(config.seed, self.step + i, config.batch_size, windows)
            begin = time.perf_counter()
            self.state, history = self.parallel.train(
                self.state, self.train_tokens, starts, count
            )
            seconds = (time.perf_counter() - begin) / count
            self._check_finite(history)
            for i in range(count):
                record = {name: float(values[i]) for name, values in history.items()}
                self._write(
                    step=self.step + i + 1, **record, tokens_per_second=tokens_per_step / seconds
                )
            self.step += count
            self.reporter.steps_done(
                self.step,
                float(history["train_loss"][-1]),
                tokens_per_step / seconds,
                1000 * seconds,
            )
            count = max(1, min(config.steps_per_call, int(SECONDS_PER_CALL / seconds)))

    def _check_finite(self, history: dict[str, np.ndarray]) -> None:
        for i, (loss, norm) in enumerate(
            zip(history["train_loss"], history["grad_norm"], strict=True)
        ):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise DivergedError(
                    f"step {self.step + i + 1} diverged (loss {loss}, gradient norm {norm}, "
                    f"learning rate {history['learning_rate'][i]:.2g}): the last checkpoint is "
                    "untouched; resume it with a smaller --learning-rate"
                )

    def _evaluate(self) -> None:
        begin = time.perf_counter()
        starts, mask = self.evaluation
        self.val_loss = self.parallel.evaluate(
            self.state.parameters,
            self.validation_tokens,
            starts,
            mask,
            self.config.eval_batch_size,
        )
        self.reporter.evaluation(self.step, self.val_loss, time.perf_counter() - begin)
        self._write(step=self.step, val_loss=self.val_loss)
        if self.config.sample_tokens:
            self.reporter.sample(self._sample())

    def _sample(self) -> str:
        model = merge(self.definition, self.parallel.fetch(self.state.parameters))
        prompt = "\n" if "\n" in self.vocabulary else self.vocabulary[0]
        ids = generate(
            model,
            self.experiment.tokenizer.encode(prompt)[None],
            self.config.sample_tokens,
            temperature=0.8,
            key=jax.random.key(self.config.seed),
        )[0]
        known = np.asarray(ids)[np.asarray(ids) < len(self.vocabulary)]
        return self.experiment.tokenizer.decode(known)

    def _save(self) -> dict[str, Any]:
        manifest = self.folder.checkpoints.save(
            self.step,
            to_arrays(self.parallel.fetch(self.state)),
            {
                "config": self.config.to_dict(),
                "vocabulary": self.vocabulary,
                "corpus": {
                    "name": self.experiment.corpus.name,
                    "sha256": self.experiment.corpus.sha256,
                },
                "val_loss": self.val_loss,
            },
        )
        self.folder.checkpoints.prune(self.config.keep)
        return manifest

    def _stop(self, number: int) -> None:
        self._save()
        raise StoppedError(
            f"stopped after step {self.step}; everything is saved, go on with: "
            f"train.py --resume --out {self.folder.path}",
            number,
        )

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
            sink.write(record)

    def _summarise(self, devices: list[jax.Device]) -> None:
        config, experiment = self.config, self.experiment
        model = config.model
        self.reporter.summary(
            {
                "model": f"{model.num_layers} layers, {model.num_heads} heads, {model.d_model} "
                f"wide, context {model.context_length}, "
                f"{describe_parameters(self.parameter_count)} parameters",
                "data": f"{experiment.corpus.name}, {len(experiment.corpus.text):,} characters, "
                f"{len(self.vocabulary)} different",
                "steps": f"{config.steps} of {config.batch_size} windows, {config.dtype}",
                "devices": f"{len(devices)} × {devices[0].device_kind}, jax {jax.__version__}",
                "folder": str(self.folder.path),
            }
        )


def uses_dropout(config: TransformerLMConfig) -> bool:
    """Whether any place of dropout has a rate above zero."""
    return any(
        getattr(config, field.name) > 0
        for field in dataclasses.fields(config)
        if field.name.endswith("_dropout")
    )
