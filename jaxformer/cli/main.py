"""The ``jaxformer`` command: parse, build, run. JAX is imported only once the arguments stand."""

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from jaxformer.cli.arguments import is_path, parse, preset_name
from jaxformer.cli.train_options import SampleOptions
from jaxformer.errors import (
    JaxformerError,
    ResourceError,
    Setting,
    UsageError,
    is_out_of_memory,
)
from jaxformer.hardware.huge_pages import reexec_with_huge_pages
from jaxformer.training.presets import PRESETS

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
    from jaxformer.cli.train import train

    train(arguments)


def run_sample(arguments: Sequence[str]) -> None:
    """``jaxformer sample``."""
    options = parse(SampleOptions, "jaxformer sample", arguments)

    from jaxformer.cli.sample import parse_ids, sample
    from jaxformer.hardware.compilation_cache import use_compilation_cache
    from jaxformer.porting.checkpoint import in_float32, language_model, open_checkpoint

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
        from jaxformer.porting.api import build

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
    from jaxformer.cli.port_options import PortOptions

    options = parse(PortOptions, "jaxformer port", arguments)

    from jaxformer.cli.port import port

    port(options, list(arguments))


def run_verify(arguments: Sequence[str]) -> int:
    """``jaxformer verify``."""
    from jaxformer.cli.verify_options import VerifyOptions

    options = parse(VerifyOptions, "jaxformer verify", arguments)

    from jaxformer.cli.verify import verify

    return verify(options)


def run_inspect(arguments: Sequence[str]) -> None:
    """``jaxformer inspect``."""
    from jaxformer.cli.inspect_options import INSPECTIONS, USAGE, TreeOptions

    what, *rest = arguments or ["nothing"]
    if what in ("-h", "--help"):
        print(USAGE, end="")
        return
    if what not in INSPECTIONS and not is_path(what):
        raise UsageError(
            f"{what} is not to be inspected: use {', '.join(INSPECTIONS)}, or a checkpoint's path"
        )
    if what not in INSPECTIONS:
        options = parse(TreeOptions, "jaxformer inspect", arguments)

        from jaxformer.inspection.checkpoint_tree import show

        show(options)
        return
    options = parse(INSPECTIONS[what], f"jaxformer inspect {what}", rest)

    from jaxformer.cli.inspect import inspect

    inspect(what, options)


def run_plan(arguments: Sequence[str]) -> None:
    """``jaxformer plan``."""
    from jaxformer.cli.plan_options import PlanOptions

    default = PlanOptions(config=PRESETS[preset_name(arguments)]())
    options = parse(PlanOptions, "jaxformer plan", arguments, default)

    from jaxformer.cli.plan import plan
    from jaxformer.hardware.compilation_cache import use_compilation_cache

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
    if sys.argv[1:2] == ["train"]:
        reexec_with_huge_pages()
    sys.exit(main(sys.argv[1:]))


def _resource_refusal(error: Exception, command: str) -> str | None:
    if is_out_of_memory(error):
        if command != "train":
            return "out of memory: free some, or use a smaller model"
        return "out of memory: use a smaller --batch-size, more --accumulation, or --dtype bfloat16"
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and (error.errno in full or error.filename is not None):
        return f"{error.filename or 'a file'}: {error.strerror}"
    return None


def _explain(error: Exception) -> JaxformerError | None:
    """What the runtime's error means where this process trains with others."""
    processes = sys.modules.get("jaxformer.distributed.processes")
    if processes is None or is_out_of_memory(error):
        return None
    refusal: JaxformerError | None = processes.explain(error)
    return refusal


def _leave_processes(code: int, message: str = "", *, already_reported: bool = False) -> None:
    """Parts from the other processes of the run, if there are any."""
    processes = sys.modules.get("jaxformer.distributed.processes")
    if processes is not None:
        processes.leave(code, message, already_reported=already_reported)


def as_flag(setting: Setting) -> str:
    """Returns a setting as the command line writes it: ``--dialect``."""
    flag = f"--{setting.name.replace('_', '-')}"
    return f"a JSON file for {flag}: {setting.example}" if setting.example else flag


def _refuse(error: JaxformerError | str, code: int, arguments: Sequence[str]) -> int:
    if "--debug" in arguments:
        traceback.print_exc()
    message = error.message(as_flag) if isinstance(error, JaxformerError) else error
    already_reported = isinstance(error, JaxformerError) and error.already_reported
    if not already_reported:
        print(f"jaxformer: {message}", file=sys.stderr)
    _leave_processes(code, message, already_reported=already_reported)
    return code
