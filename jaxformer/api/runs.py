"""``train``: a training run from a program, and what it has left in its folder."""

import base64
import dataclasses
import functools
import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from jaxformer.api.model import Model, load
from jaxformer.data.tokenizers import tokenizer_in
from jaxformer.errors import UsageError
from jaxformer.hardware.compilation_cache import use_compilation_cache
from jaxformer.porting.arguments import read_names, read_path, wrong_kind
from jaxformer.porting.data import load_data
from jaxformer.porting.train_states import read_warm_start
from jaxformer.training import loop
from jaxformer.training.config import TrainConfig
from jaxformer.training.config_files import read_toml
from jaxformer.training.experiment import Experiment
from jaxformer.training.logging.metrics import Tracker, read_metrics
from jaxformer.training.presets import (
    check_adapters,
    check_schedule,
    check_tokenizer,
    find_preset,
    fine_tuning,
    fit_vocabulary,
)
from jaxformer.training.resume_checks import check_settings
from jaxformer.training.run_arguments import (
    check_companions,
    check_effects,
    check_out,
    training_effects,
)
from jaxformer.training.run_folder import stored_config, stored_vocabulary


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a training run has left.

    Attributes:
        folder: of the run: checkpoints, metrics and settings.
        config: its settings, completed by the text.
        metrics: the records of ``metrics.jsonl``: one a step, and one an evaluation.
    """

    folder: Path
    config: TrainConfig
    metrics: Sequence[dict[str, Any]] = dataclasses.field(repr=False)

    @property
    def train_loss(self) -> float | None:
        """The training loss of the last step, in nats per token."""
        return self._last("train_loss")

    @property
    def val_loss(self) -> float | None:
        """The loss over the whole validation split at the end, in nats per token."""
        return self._last("val_loss")

    @functools.cached_property
    def model(self) -> Model:
        """The trained model, of the last checkpoint."""
        return load(self.folder)

    @functools.cached_property
    def best_model(self) -> Model:
        """The model of the kept checkpoint with the lowest validation loss."""
        return load(self.folder, best=True)

    def __repr__(self) -> str:
        """Returns the run and its losses, in one line."""
        losses = {"training loss": self.train_loss, "validation loss": self.val_loss}
        found = [f"{name} {loss:.4f}" for name, loss in losses.items() if loss is not None]
        return (
            f"<TrainResult: {', '.join([str(self.folder), f'{self.config.steps} steps', *found])}>"
        )

    def _repr_html_(self) -> str:
        """Returns the same for a notebook, with the loss curve if it was drawn."""
        picture = self.folder / "loss.png"
        text = f"<p>{escape(repr(self)[1:-1])}</p>"
        if not picture.is_file():
            return text
        data = base64.b64encode(picture.read_bytes()).decode()
        return f'{text}<img alt="loss curve" width="640" src="data:image/png;base64,{data}">'

    def _last(self, name: str) -> float | None:
        values = (record[name] for record in reversed(self.metrics) if name in record)
        return next(values, None)


def train(
    config: TrainConfig | str | Path | None = None,
    out: str | Path | None = None,
    *,
    resume: bool = False,
    init_from: str | Path | None = None,
    fresh_optimizer: bool = False,
    meta: str | Path | None = None,
    ignore: Sequence[str] = (),
    cast: bool = False,
    trackers: Sequence[Tracker] = (),
    download: bool = False,
    **settings: Any,
) -> TrainResult:
    """Trains a model as ``train.py`` does, and returns what the run has left.

    Args:
        config: the settings, the path of a file of settings such as a run's ``config.toml`` (what
            it leaves out is of ``nano``; a text is one if it ends in ``.toml``), or the name of a
            preset; default ``nano``, with ``init_from`` the settings for training a model further.
            With ``resume`` and without ``out`` a name gives the default of ``out`` alone.
        out: the run's folder; default ``runs/`` and the name of the preset.
        resume: continue the run in that folder, from its newest checkpoint and with its settings.
        init_from: a checkpoint whose model, and optimizer's state if it has one, to start from.
        fresh_optimizer: with ``init_from``: take the weights alone, and begin at step 0.
        meta: with ``init_from``: nanoGPT's meta.pkl, or a tokenizer.json; default what lies
            beside it.
        ignore: with ``init_from``: arrays to leave out, by name or pattern, and settings without
            effect.
        cast: change a checkpoint's arrays to the dtypes that training keeps.
        trackers: metrics services to write to, beside ``metrics.jsonl``.
        download: fetch a corpus of jaxformer that is not on this machine.
        settings: settings of the run, of its model and of its optimizer by name, as the flags of
            ``train.py``; they replace those of ``config``. ``lora_rank=8`` trains adapters alone.

    Raises:
        UsageError: there is no such preset, file or setting, an argument is of another kind, or
            the settings do not fit each other.
        JaxformerError: the run cannot be made; see ``jaxformer.errors`` for the kinds.
        DivergedError: a loss, a gradient or the state is not finite; that state is not saved.
        StoppedError: SIGINT or SIGTERM came; everything is saved.
    """
    if not isinstance(config, TrainConfig | str | os.PathLike | None):
        raise wrong_kind(
            "config", "a TrainConfig, the name of a preset or the path of a config.toml", config
        )
    if isinstance(config, str) and config.endswith(".toml"):
        config = Path(config)
    preset = config if isinstance(config, str) else "nano" if config is None else None
    folder = Path("runs") / (preset or "run") if out is None else read_path("out", out)
    check_out(str(folder) if out is None else os.fspath(out))
    services: Any = read_names("trackers", trackers)
    if resume and init_from is not None:
        raise UsageError("resume continues the run that is there: leave out init_from")
    # A preset names the folder where out does not.
    if resume and config is not None and not (isinstance(config, str) and out is None):
        raise UsageError("resume takes the settings from the run's folder: leave out config")
    check_companions(
        is_warm=init_from is not None,
        resume=resume,
        fresh_optimizer=fresh_optimizer,
        meta=meta,
        ignore=ignore,
        cast=cast,
    )
    start = None
    if init_from is not None:
        start = read_warm_start(
            read_path("init_from", init_from),
            fresh=fresh_optimizer,
            ignore=read_names("ignore", ignore),
            meta=None if meta is None else read_path("meta", meta),
        )
    before = stored_config(folder) if resume else None
    chosen = _settings(config) if before is None else before
    if start is not None:
        chosen = chosen.with_model(start.model)
        if config is None and not start.step:
            chosen = fine_tuning(chosen)
    try:
        final = chosen.replace(**settings)
    except ValueError as error:
        raise UsageError(str(error)) from None
    check_effects(settings, training_effects(final))
    tokenizer = None
    if before is None:
        check_schedule(final)
    if before is None and start is None:
        check_adapters(final)
    if before is not None:
        check_settings(before, final)
        started, vocabulary = stored_vocabulary(folder)
        tokenizer = tokenizer_in(folder, vocabulary) if started else None
    elif start is None and preset is not None:
        check_tokenizer(preset, final)
        if "vocab_size" not in settings:
            final = fit_vocabulary(preset, final)
    corpus = load_data(final, download=download)
    use_compilation_cache()
    experiment = Experiment.prepare(final, corpus, start=start, tokenizer=tokenizer)
    loop.train(experiment, folder, resume=resume, cast=cast, trackers=services)
    return TrainResult(folder, stored_config(folder), read_metrics(folder / "metrics.jsonl"))


def _settings(config: TrainConfig | str | os.PathLike[str] | None) -> TrainConfig:
    """Returns the settings that ``train`` was given: as they are, of a preset or of a file."""
    if isinstance(config, TrainConfig):
        return config
    if isinstance(config, os.PathLike):
        return read_toml(Path(config), find_preset("nano"))
    try:
        return find_preset("nano" if config is None else config)
    except UsageError as error:
        raise UsageError(*error.args, ", or name a .toml file of settings") from None
