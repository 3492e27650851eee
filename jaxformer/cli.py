"""The ``jaxformer`` command: parse, build, run. JAX is imported only once the arguments stand."""

import contextlib
import errno
import io
import itertools
import os
import re
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
  sample    write text with a trained or a ported model
  port      move a checkpoint between PyTorch and JAX
  inspect   list what is in a checkpoint, or draw what is inside a model: attention, gradients,
            init, norms, positions, masks, scaling, costs

jaxformer COMMAND --help lists a command's options.
"""


# A flag without its --no- twin, which only settings that a preset may switch on need.
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


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
    resume: Switch = False
    """Go on with the run in that folder, from its newest checkpoint."""
    download: Switch = False
    """Fetch tiny-shakespeare (1.1 MB, its SHA-256 is pinned) if it is not on this machine."""
    tracker: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Metrics services to write to, beside metrics.jsonl."""
    debug: Switch = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class SampleOptions:
    """Write text with a model; standard output holds the text alone."""

    path: tyro.conf.Positional[Path]
    """A run's folder, or any checkpoint that jaxformer port reads."""
    prompt: str = ""
    """What the text begins with; default a new line, or the model's own first token."""
    prompt_ids: str = ""
    """The same as ids (1,2,3), for a model without a tokenizer."""
    tokens: int = 500
    """How many tokens to write: characters, where the model was trained on such."""
    temperature: float = 0.8
    """Below 1 plays safe, above 1 takes chances."""
    top_k: int | None = None
    """Choose among the k most probable tokens."""
    top_p: float | None = None
    """Choose among the most probable tokens that together reach this probability."""
    seed: int = 0
    """The same seed writes the same text."""
    greedy: Switch = False
    """Always take the most probable token."""
    samples: int = 1
    """How many texts to write."""
    step: int | None = None
    """Which checkpoint to use; default the newest."""
    best: Switch = False
    """Use the checkpoint with the lowest validation loss."""
    unknown: Literal["error", "skip", "replace"] = "error"
    """What to do with a prompt's characters that the model does not know."""
    dialect: str | None = None
    """Whose names the checkpoint's arrays have; default what it shows."""
    config: Path | None = None
    """The model's settings as JSON, which go before those in the checkpoint."""
    meta: Path | None = None
    """nanoGPT's meta.pkl, or a tokenizer.json; default what lies beside the checkpoint."""
    debug: Switch = False
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
    resume = "--resume" in arguments
    if resume:
        from jaxformer.training.run_folder import check_settings, stored_config

        before = stored_config(out)
    config = before if resume else PRESETS[preset]()
    options = _parse(TrainOptions, "jaxformer train", arguments, TrainOptions(config=config))
    config = options.config
    if resume:
        check_settings(before.to_dict(), config)

    from jaxformer.training.corpora import load_corpus

    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)

    from jaxformer.training.experiment import Experiment
    from jaxformer.training.loop import train

    experiment = Experiment.prepare(config, corpus)
    train(experiment, out, resume=options.resume, trackers=options.tracker)


def run_sample(arguments: Sequence[str]) -> None:
    """``jaxformer sample``."""
    options = _parse(SampleOptions, "jaxformer sample", arguments)

    from jaxformer.porting.checkpoint import in_float32, language_model, open_checkpoint
    from jaxformer.training.sampling import parse_ids, sample

    checkpoint = open_checkpoint(
        options.path,
        dialect=options.dialect,
        config=options.config,
        meta=options.meta,
        step=options.step,
        best=options.best,
    )
    for warning in checkpoint.contents.warnings:
        print(f"jaxformer: warning: {warning}", file=sys.stderr)
    plan = language_model(checkpoint)
    ids = parse_ids(options.prompt_ids)

    def model() -> Any:
        from jaxformer.porting.convert import build

        return build(in_float32(plan))

    try:
        tokenizer = checkpoint.tokenizer(plan.module.config.vocab_size)
    except UsageError:
        # What is missing matters only to those who want text.
        if not ids:
            raise
        tokenizer = None
    sample(
        model,
        tokenizer,
        prompt=options.prompt,
        prompt_ids=ids,
        first_ids=checkpoint.first_ids(),
        last_ids=checkpoint.last_ids(),
        tokens=options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        greedy=options.greedy,
        samples=options.samples,
        unknown=options.unknown,
    )


def run_port(arguments: Sequence[str]) -> None:
    """``jaxformer port``."""
    from jaxformer.porting.options import PortOptions

    options = _parse(PortOptions, "jaxformer port", arguments)

    from jaxformer.porting.command import port

    port(options, list(arguments))


def run_inspect(arguments: Sequence[str]) -> None:
    """``jaxformer inspect``."""
    from jaxformer.inspection.options import INSPECTIONS, USAGE, TreeOptions

    what, *rest = arguments or ["nothing"]
    if what in ("-h", "--help"):
        print(USAGE, end="")
        return
    if what not in INSPECTIONS and not _is_path(what):
        raise UsageError(
            f"{what} is not to be inspected: use {', '.join(INSPECTIONS)}, or a checkpoint's path"
        )
    if what not in INSPECTIONS:
        options = _parse(TreeOptions, "jaxformer inspect", arguments)

        from jaxformer.inspection.checkpoint_tree import show

        show(options)
        return
    options = _parse(INSPECTIONS[what], f"jaxformer inspect {what}", rest)

    from jaxformer.inspection.command import inspect

    inspect(what, options)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": run_train,
    "sample": run_sample,
    "port": run_port,
    "inspect": run_inspect,
}


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; a refusal is one line on standard error."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal without our characters is no reason to stop.
        sys.stdout.reconfigure(errors="replace")
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
        # Whoever read our output has left; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        refusal = _resource_refusal(error, arguments[0])
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
                **settings,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise UsageError(_one_line(complaint.getvalue(), program)) from None
    except ValueError as error:
        raise UsageError(str(error)) from None


def _one_line(complaint: str, program: str) -> str:
    """What tyro's framed message says, without its frame and its help texts."""
    # Its rules are drawn in box characters or in ASCII, as the terminal's encoding allows.
    lines = [line.strip("│| ") for line in complaint.strip().splitlines()[1:]]
    paragraphs = [
        " ".join(words)
        for rule, words in itertools.groupby(lines, lambda line: not line.strip("─╰╯+-"))
        if not rule
    ]
    message = re.sub(r"^Error parsing ([\w.]+: )?", "", paragraphs[0]).rstrip(".")
    similar = [p for p in paragraphs if p.startswith(("Perhaps you meant", "Arguments similar"))]
    flags = re.findall(r"(?<!\S)--[\w-]+(?= |,|$)", " ".join(p.partition(":")[2] for p in similar))
    hint = f"; did you mean {' or '.join(dict.fromkeys(flags))}?" if flags else ""
    return f"{message[:1].lower()}{message[1:]}{hint} (see {program} --help)"


def _is_path(argument: str) -> bool:
    """Whether an argument can only be meant as a path."""
    return os.path.lexists(argument) or os.sep in argument or "." in argument


def _peek(arguments: Sequence[str], flag: str) -> str | None:
    """The last value of a flag that decides the defaults of the others."""
    found = None
    for place, here in enumerate(arguments):
        if here == flag:
            found = next(iter(arguments[place + 1 :]), None)
        elif here.startswith(f"{flag}="):
            found = here.partition("=")[2]
    return found


def _resource_refusal(error: Exception, command: str) -> str | None:
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error):
        if command != "train":
            return "out of memory: free some, or use a smaller model"
        return "out of memory: use a smaller --batch-size, more --accumulation, or --dtype bfloat16"
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EACCES,
        errno.EROFS,
    ):
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def _refuse(message: str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    # What the library calls by its keywords, this command calls by its flags.
    message = re.sub(r"\bconfig=(?=\{)", "a JSON file for --config: ", message)
    message = re.sub(r"(?<![\w-])(dialect|config)=(?=\W|$)", r"--\1", message)
    print(f"jaxformer: {message}", file=sys.stderr)
    return code
