"""The ``jaxformer`` command: parse, build, run. JAX is imported only once the arguments stand."""

import contextlib
import dataclasses
import errno
import io
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxformer.errors import JaxformerError, ResourceError, UsageError
from jaxformer.training.config import PRESETS, TrainConfig

USAGE = """\
usage: jaxformer COMMAND [OPTIONS]

  train     train a character language model (the same as train.py)
  sample    write text with a trained model

jaxformer COMMAND --help lists a command's options.
"""


@dataclass(frozen=True)
class TrainOptions:
    """Train a character language model.

    Settings come from the preset; every one of them can be given here. A resumed run takes its
    settings from its own folder.
    """

    config: tyro.conf.OmitArgPrefixes[TrainConfig]
    preset: Annotated[str, tyro.conf.arg(metavar="|".join(PRESETS))] = "nano"
    """Where the settings below come from."""
    out: Path | None = None
    """The run's folder; default runs/PRESET."""
    resume: bool = False
    """Go on with the run in that folder, from its newest checkpoint."""
    download: bool = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Metrics services to write to, beside metrics.jsonl."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a trained model; standard output holds the text alone."""

    path: tyro.conf.Positional[Path]
    """A run's folder."""
    prompt: str = "\n"
    """What the text begins with."""
    tokens: int = 500
    """How many characters to write."""
    temperature: float = 0.8
    """Below 1 plays safe, above 1 takes chances."""
    top_k: int | None = None
    """Choose among the k most probable characters."""
    top_p: float | None = None
    """Choose among the most probable characters that together reach this probability."""
    seed: int = 0
    """The same seed writes the same text."""
    greedy: bool = False
    """Always take the most probable character."""
    samples: int = 1
    """How many texts to write."""
    step: int | None = None
    """Which checkpoint to use; default the newest."""
    best: bool = False
    """Use the checkpoint with the lowest validation loss."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a prompt's characters that the model does not know."""
    debug: bool = False
    """Show the traceback of an error."""

    def __post_init__(self) -> None:
        from jaxformer.training.sampling import check

        check(self)


def run_train(arguments: Sequence[str]) -> None:
    """``jaxformer train``."""
    known = _peek(arguments, "--preset"), _peek(arguments, "--out")
    preset = known[0] or "nano"
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset} is unknown: choose among {', '.join(PRESETS)}")
    out = Path(known[1] or f"runs/{preset}")
    config = PRESETS[preset]()
    if "--resume" in arguments:
        from jaxformer.training.run_folder import stored_config

        config = stored_config(out) or config
    options = _parse(TrainOptions, "jaxformer train", arguments, TrainOptions(config=config))

    from jaxformer.training.corpora import load_corpus

    config = options.config
    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)

    from jaxformer.training.loop import Experiment, train

    experiment = Experiment.prepare(config, corpus)
    train(experiment, out, resume=options.resume, trackers=options.tracker)


def run_sample(arguments: Sequence[str]) -> None:
    """``jaxformer sample``."""
    options = _parse(SampleOptions, "jaxformer sample", arguments)

    from jaxformer.training.sampling import sample

    sample(**{k: v for k, v in dataclasses.asdict(options).items() if k != "debug"})


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {"train": run_train, "sample": run_sample}


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; a refusal is one line on standard error."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from jaxformer import __version__

        print(__version__)
        return 0
    try:
        if arguments[0] not in COMMANDS:
            raise UsageError(f"there is no command {arguments[0]}: use {' or '.join(COMMANDS)}")
        COMMANDS[arguments[0]](arguments[1:])
    except JaxformerError as error:
        return _refuse(str(error), error.exit_code, arguments)
    except KeyboardInterrupt:
        return _refuse("stopped", 130, arguments)
    except BrokenPipeError:
        return 141
    except Exception as error:
        refusal = _resource_refusal(error)
        if refusal is not None:
            return _refuse(refusal, ResourceError.exit_code, arguments)
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return _refuse(f"{message} (a bug in jaxformer; --debug shows where)", 1, arguments)
    return 0


def entry_point() -> None:
    """The installed command."""
    sys.exit(main(sys.argv[1:]))


def _parse(cls: type, program: str, arguments: Sequence[str], default: Any = None) -> Any:
    """The options that the arguments make.

    Raises:
        UsageError: an argument is unknown, cannot be read or is refused by the options' classes.
    """
    settings = {} if default is None else {"default": default}
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                prog=program,
                args=list(arguments),
                config=(tyro.conf.FlagCreatePairsOff,),
                **settings,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_one_line(complaint.getvalue())) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _one_line(complaint: str) -> str:
    """The words of tyro's framed message."""
    words = " ".join(line.strip("│╭╮╰╯─ ") for line in complaint.splitlines())
    return " ".join(words.split())


def _peek(arguments: Sequence[str], flag: str) -> str | None:
    """The value of a flag that decides the defaults of the others."""
    for here, after in zip(arguments, [*arguments[1:], None], strict=True):
        if here == flag:
            return after
        if here.startswith(f"{flag}="):
            return here.partition("=")[2]
    return None


def _resource_refusal(error: Exception) -> str | None:
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        return "out of memory: use a smaller --batch-size, more --accumulation, or --dtype bfloat16"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS):
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def _refuse(message: str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    print(f"jaxformer: {message}", file=sys.stderr)
    return code
