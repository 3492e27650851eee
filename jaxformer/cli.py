"""The ``jaxformer`` command: parse, build, run. JAX is imported only once the arguments stand."""

import contextlib
import dataclasses
import errno
import io
import itertools
import os
import re
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tyro

from jaxformer.errors import JaxformerError, ResourceError, UsageError
from jaxformer.training.options import ProcessOptions, SampleOptions, TrainOptions
from jaxformer.training.presets import PRESETS

PROCESS_FLAGS = {"--coordinator", "--num-processes", "--process-id", "--distributed"}

USAGE = """\
usage: jaxformer COMMAND [OPTIONS]

  train     train a character language model (the same as train.py)
  sample    write text with a trained or a ported model
  port      move a checkpoint between PyTorch and JAX
  verify    run two checkpoints side by side, and name the first place where they part
  inspect   list what is in a checkpoint, or draw what is inside a model: attention, gradients,
            init, norms, positions, masks, scaling, costs
  plan      say what training would take: memory, operations, where it fits

jaxformer COMMAND --help lists a command's options.
"""


def run_train(arguments: Sequence[str]) -> None:
    """``jaxformer train``."""
    with _interrupted_at_once():
        _train(arguments)


@contextlib.contextmanager
def _interrupted_at_once() -> Iterator[None]:
    """SIGINT ends the process with one line, until training says otherwise.

    A KeyboardInterrupt that comes while a module is imported can be lost there, and the run would
    then begin.
    """

    def stop(_number: int, _frame: types.FrameType | None) -> None:
        os.write(2, b"jaxformer: stopped\n")
        os._exit(130)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _train(arguments: Sequence[str]) -> None:
    from jaxformer.training import processes

    names = {argument.partition("=")[0] for argument in arguments}
    if names & PROCESS_FLAGS and not names & {"-h", "--help"}:
        # JAX has to know of the other processes before anything asks it for devices.
        alone = _parse(ProcessOptions, "jaxformer train", arguments, others=True)
        processes.initialize(alone, debug="--debug" in arguments)
    if processes.count() > 1:
        from jaxformer.training.run_folder import check_shared

        check_shared(_run_folder(arguments))
    options, out, experiment = processes.together(lambda: _prepare_training(arguments))

    from jaxformer.training.loop import train

    train(
        experiment,
        out,
        resume=options.resume,
        cast=options.cast,
        trackers=options.tracker,
        profile_steps=options.profile,
    )


def _prepare_training(arguments: Sequence[str]) -> tuple[TrainOptions, Path, Any]:
    """The options, the run's folder and the ``Experiment`` that the arguments make."""
    preset, out = _preset(arguments), _run_folder(arguments)
    resume = "--resume" in arguments
    source = _peek(arguments, "--init-from")
    start = tokenizer = None
    if resume and source is not None:
        raise UsageError("--resume goes on with the run that is there: leave out --init-from")
    if resume:
        from jaxformer.training.run_folder import (
            check_settings,
            stored_config,
            stored_vocabulary,
        )

        config = before = stored_config(out)
    else:
        config = PRESETS[preset]()
    if source is not None:
        from jaxformer.porting.starts import read_start
        from jaxformer.training.experiment import Start

        start = Start(**read_start(Path(source), fresh="--fresh-optimizer" in arguments))
        config = dataclasses.replace(config, model=start.model)
    default = TrainOptions(config=config)
    options: TrainOptions = _parse(TrainOptions, "jaxformer train", arguments, default)
    config = options.config
    if resume:
        check_settings(before.to_dict(), config)
        started, vocabulary = stored_vocabulary(out)
        if started:
            from jaxformer.porting.tokenizers import tokenizer_in

            tokenizer = tokenizer_in(out, vocabulary)

    from jaxformer.training.corpora import load_corpus

    corpus = load_corpus(config.data, encoding=config.encoding, download=options.download)

    from jaxformer.training.compilation import use_compilation_cache
    from jaxformer.training.experiment import Experiment

    use_compilation_cache(options.compilation_cache)
    return options, out, Experiment.prepare(config, corpus, start=start, tokenizer=tokenizer)


def run_sample(arguments: Sequence[str]) -> None:
    """``jaxformer sample``."""
    options = _parse(SampleOptions, "jaxformer sample", arguments)

    from jaxformer.porting.checkpoint import in_float32, language_model, open_checkpoint
    from jaxformer.training.compilation import use_compilation_cache
    from jaxformer.training.sampling import parse_ids, sample

    use_compilation_cache(options.compilation_cache)
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


def run_verify(arguments: Sequence[str]) -> int:
    """``jaxformer verify``."""
    from jaxformer.parity.options import VerifyOptions

    options = _parse(VerifyOptions, "jaxformer verify", arguments)

    from jaxformer.parity.command import verify

    return verify(options)


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


def run_plan(arguments: Sequence[str]) -> None:
    """``jaxformer plan``."""
    from jaxformer.planning.options import PlanOptions

    default = PlanOptions(config=PRESETS[_preset(arguments)]())
    options = _parse(PlanOptions, "jaxformer plan", arguments, default)

    from jaxformer.planning.command import plan
    from jaxformer.training.compilation import use_compilation_cache

    use_compilation_cache(options.compilation_cache)
    plan(options)


# Each gives its exit code; None is 0.
COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "train": run_train,
    "sample": run_sample,
    "port": run_port,
    "verify": run_verify,
    "inspect": run_inspect,
    "plan": run_plan,
}


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; a refusal is one line on standard error."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
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
        code = COMMANDS[arguments[0]](arguments[1:]) or 0
        _leave_processes(code)
        return code
    except JaxformerError as error:
        return _refuse(error, error.exit_code, arguments)
    except KeyboardInterrupt:
        return _refuse("stopped", 130, arguments)
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        lost = _explain(error)
        if lost is not None:
            return _refuse(lost, lost.exit_code, arguments)
        refusal = _resource_refusal(error, arguments[0])
        if refusal is not None:
            return _refuse(refusal, ResourceError.exit_code, arguments)
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        return _refuse(f"{message} (a bug in jaxformer; --debug shows where)", 1, arguments)


def entry_point() -> None:
    """The installed command."""
    sys.exit(main(sys.argv[1:]))


def _parse(
    cls: type,
    program: str,
    arguments: Sequence[str],
    default: Any = None,
    *,
    others: bool = False,
) -> Any:
    """The options that the arguments make; with ``others`` there may be arguments beside them.

    Raises:
        UsageError: an argument is unknown, cannot be read or is refused by the options' classes.
    """
    settings: dict[str, Any] = {} if default is None else {"default": default}
    if others:
        settings["return_unknown_args"] = True
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            parsed: Any = tyro.cli(cls, prog=program, args=list(arguments), **settings)
            return parsed[0] if others else parsed
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


def _preset(arguments: Sequence[str]) -> str:
    """The preset that decides the defaults of all settings.

    Raises:
        UsageError: there is none of that name.
    """
    preset = _peek(arguments, "--preset") or "nano"
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset} is unknown: choose among {', '.join(PRESETS)}")
    return preset


def _run_folder(arguments: Sequence[str]) -> Path:
    return Path(_peek(arguments, "--out") or f"runs/{_preset(arguments)}")


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
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and (error.errno in full or error.filename is not None):
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def _explain(error: Exception) -> JaxformerError | None:
    """What the runtime's error means where this process trains with others."""
    processes = sys.modules.get("jaxformer.training.processes")
    if processes is None or "RESOURCE_EXHAUSTED" in str(error):
        return None
    refusal: JaxformerError | None = processes.explain(error)
    return refusal


def _leave_processes(code: int, message: str = "", *, told_elsewhere: bool = False) -> None:
    """Parts from the other processes of the run, if there are any."""
    processes = sys.modules.get("jaxformer.training.processes")
    if processes is not None:
        processes.leave(code, message, told_elsewhere=told_elsewhere)


def _refuse(error: JaxformerError | str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    # What the library calls by its keywords, this command calls by its flags.
    message = re.sub(r"\bconfig=(?=\{)", "a JSON file for --config: ", str(error))
    message = re.sub(r"(?<![\w-])(dialect|config)=(?=\W|$)", r"--\1", message)
    told_elsewhere = isinstance(error, JaxformerError) and error.told_elsewhere
    if not told_elsewhere:
        print(f"jaxformer: {message}", file=sys.stderr)
    _leave_processes(code, message, told_elsewhere=told_elsewhere)
    return code
