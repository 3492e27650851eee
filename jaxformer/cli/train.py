"""``jaxformer train``: options, and the way from arguments to a training run.

JAX is imported once the arguments are known to be good, so that ``--help`` is instant.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxformer.cli.arguments import (
    Preset,
    Switch,
    given_names,
    join_mixture,
    parse,
    peek,
    preset_name,
    read_settings,
    run_folder,
    without,
)
from jaxformer.cli.starting import read_start
from jaxformer.distributed.settings import ProcessSettings
from jaxformer.errors import UsageError
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.training.presets import (
    check_adapters,
    check_schedule,
    check_tokenizer,
    fit_vocabulary,
)
from jaxformer.training.product_conditions import build_what_is_called
from jaxformer.training.run_arguments import check_companions, check_effects, training_effects

if TYPE_CHECKING:
    from jaxformer.training.experiment import Experiment

Processes = tyro.conf.FlagCreatePairsOff[ProcessSettings]
ONE_PROCESS = ProcessSettings()
PROCESS_FLAGS = {
    "--coordinator", "--num-processes", "--process-id", "--distributed", "--max-restarts",
}  # fmt: skip
# What a run that is resumed has in its folder, or has left behind.
OF_A_NEW_RUN = ("--init-from", "--fresh-optimizer", "--meta", "--ignore", "--config", "--resume")


@dataclass(frozen=True)
class TrainOptions:
    """Train a language model, of characters or of tokens.

    Settings come from the preset; every one of them can be given here. A resumed run takes its
    settings from its own folder.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Preset = "nano"
    """Where the settings below come from."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """A TOML file with settings, such as a run's config.toml. They replace those of the preset, and
    flags replace them."""
    out: Path | None = None
    """The run's folder; default runs/PRESET."""
    resume: Switch = False
    """Resume the run in that folder, from its newest checkpoint. Its settings are there, and no
    preset is read."""
    init_from: Path | None = None
    """Start from the model in a checkpoint that jaxformer port reads, and from its optimizer's
    state where it has one; its settings then stand in place of the preset's model."""
    fresh_optimizer: Switch = False
    """With --init-from: take the weights alone, and begin at step 0."""
    meta: Path | None = None
    """With --init-from: nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside it."""
    ignore: tuple[str, ...] = ()
    """With --init-from: arrays to leave out, by name or pattern, and settings without effect."""
    cast: Switch = False
    """With --init-from or --resume: change a checkpoint's arrays to the dtypes that training keeps;
    says what that rounds."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Metrics services to write to, beside metrics.jsonl."""
    dashboard: Switch = False
    """Show curves, speed, memory and samples on one screen, where there is a terminal."""
    profile: int | None = None
    """Write a trace of this many steps, after warm-up, into the run's folder."""
    compilation_cache: bool = True
    """Keep compiled programs in the user's cache folder, and use those that are there."""
    processes: tyro.conf.OmitArgPrefixes[Processes] = ONE_PROCESS
    debug: Switch = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        check_companions(
            is_warm=self.init_from is not None,
            resume=self.resume,
            fresh_optimizer=self.fresh_optimizer,
            meta=self.meta,
            ignore=self.ignore,
            cast=self.cast,
        )
        if self.profile is not None and self.profile < 1:
            raise ValueError(f"--profile must be at least 1 step: got {self.profile}")


@dataclass(frozen=True)
class PairTrainOptions(TrainOptions):
    """Train an encoder and decoder further, on sources and their targets.

    Settings come from the preset, and its model from --init-from; every one of them can be given
    here. A resumed run takes its settings from its own folder.
    """

    config: tyro.conf.OmitArgPrefixes[PairTrainConfig]


def run(arguments: Sequence[str]) -> int:
    """Trains a model as the arguments say, or resumes a run; returns the exit code.

    Raises:
        JaxformerError: the arguments, the data or the devices do not allow it.
    """
    arguments = join_mixture(arguments)
    from jaxformer.distributed import processes

    names = {argument.partition("=")[0] for argument in arguments}
    if names & PROCESS_FLAGS and not names & {"-h", "--help"}:
        # JAX has to know of the other processes before anything asks it for devices.
        settings = parse(Processes, "jaxformer train", arguments, ignore_unknown=True)
        if settings.starts_here:
            return _start_processes(arguments, settings)
        processes.initialize(settings, debug="--debug" in arguments)
    if processes.count() > 1:
        from jaxformer.training.run_folder import check_shared

        check_shared(run_folder(arguments))
    options, out, experiment = processes.all_or_raise(lambda: _prepare(arguments))

    from jaxformer.training import loop
    from jaxformer.training.logging.dashboard import Dashboard
    from jaxformer.training.logging.progress import Reporter

    loop.train(
        experiment,
        out,
        resume=options.resume,
        cast=options.cast,
        trackers=options.tracker,
        profile_steps=options.profile,
        reporter=Dashboard if options.dashboard else Reporter,
    )
    return 0


def _start_processes(arguments: Sequence[str], settings: ProcessSettings) -> int:
    """Starts the processes of this machine, and lets them resume the run when one is lost."""
    from jaxformer.distributed.launcher import run_processes
    from jaxformer.hardware.invocation import own_command

    own = without(arguments, "--num-processes", "--max-restarts")
    out = run_folder(arguments)

    def resume() -> list[str] | None:
        if not (out / "config.json").exists():
            return own_command("train", *own)
        is_saved = any(out.glob("checkpoints/*/MANIFEST.json"))
        if not is_saved and peek(own, "--init-from") is not None:
            # Without the weights that it started from it would start from random ones.
            return None
        return own_command("train", *without(own, *OF_A_NEW_RUN), "--resume")

    return run_processes(
        own_command("train", *own),
        settings.num_processes or 1,
        restarts=settings.max_restarts,
        resume=resume,
        report=lambda line: print(f"jaxformer: {line}", file=sys.stderr),
    )


def _prepare(arguments: Sequence[str]) -> tuple[TrainOptions, Path, "Experiment"]:
    """Returns the options, the run's folder and the experiment that the arguments define."""
    from jaxformer.distributed import processes

    preset, out = preset_name(arguments), run_folder(arguments)
    resume = "--resume" in arguments
    source = peek(arguments, "--init-from")
    tokenizer = None
    if resume and source is not None:
        raise UsageError("--resume continues the run that is there: leave out --init-from")
    for flag, is_read in (("--config", False), ("--preset", peek(arguments, "--out") is None)):
        # A preset names the folder where --out does not.
        if resume and not is_read and peek(arguments, flag) is not None:
            raise UsageError(f"--resume takes the settings from the run's folder: leave out {flag}")
    if resume:
        from jaxformer.training.resume_checks import check_settings
        from jaxformer.training.run_folder import check_start, stored_config, stored_vocabulary

        config = before = stored_config(out)
        check_start(out)
    else:
        config = read_settings(arguments)
    start, config = read_start(arguments, config)
    default = (
        PairTrainOptions(config=config)
        if isinstance(config, PairTrainConfig)
        else TrainOptions(config=config)
    )
    options: TrainOptions = parse(type(default), "jaxformer train", arguments, default)
    config = options.config
    check_effects(given_names(arguments), training_effects(config))
    if resume:
        check_settings(before, config)
        started, vocabulary = stored_vocabulary(out)
        if started:
            from jaxformer.data.tokenizers import tokenizer_in

            tokenizer = tokenizer_in(out, vocabulary)

    if not resume:
        check_schedule(config)
    if not resume and start is None:
        check_adapters(config)
        check_tokenizer(preset, config)
        if peek(arguments, "--vocab-size") is None and options.config_file is None:
            config = fit_vocabulary(preset, config)

    if processes.count() == 1:
        build_what_is_called(config)

    from jaxformer.hardware.memory import without_collection
    from jaxformer.porting.data import load_data

    corpus = load_data(config, download=options.download)

    with without_collection(all_stays=True):
        from jaxformer.hardware.compilation_cache import use_compilation_cache
        from jaxformer.training.experiment import Experiment

    use_compilation_cache(options.compilation_cache)
    return options, out, Experiment.prepare(config, corpus, start=start, tokenizer=tokenizer)
