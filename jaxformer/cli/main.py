"""The ``jaxformer`` command: finds the command's module, runs it, reports its error.

A module of a command is imported when it is run, and imports JAX once its arguments are known to be
good, so that help and errors of usage are instant.
"""

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence

from jaxformer.cli.early_signals import stopped_at_once
from jaxformer.errors import (
    JaxformerError,
    ResourceError,
    UsageError,
    as_flag,
    is_out_of_memory,
)
from jaxformer.hardware.huge_pages import reexec_with_huge_pages
from jaxformer.hardware.nvidia_driver import check_requested_platform

USAGE = """\
usage: jaxformer COMMAND [OPTIONS]

  train     train a language model (the same as train.py)
  sample    write text with a trained or a ported model
  tokenize  make a folder of tokens of texts, to train on
  port      move a checkpoint between PyTorch and JAX
  verify    run two checkpoints side by side, and name the first place where they differ
  runs      list training runs with their state, or compare some
  inspect   list what is in a checkpoint, or draw what is inside a model: attention, gradients,
            init, norms, positions, masks, scaling, experts, costs
  plan      estimate what training takes: memory, operations, where it fits
  completions  make bash, zsh or fish complete these commands and their flags

jaxformer COMMAND --help lists a command's options.
"""
# By command the module whose ``run`` takes the arguments and returns an exit code; None is 0.
COMMANDS = {
    "train": "jaxformer.cli.train",
    "sample": "jaxformer.cli.sample",
    "tokenize": "jaxformer.cli.tokenize",
    "port": "jaxformer.cli.port",
    "verify": "jaxformer.cli.verify",
    "runs": "jaxformer.cli.runs",
    "inspect": "jaxformer.cli.inspect",
    "plan": "jaxformer.cli.plan",
    "completions": "jaxformer.cli.completions",
}


def main(arguments: Sequence[str]) -> int:
    """Runs a command and returns its exit code; an error is one line on standard error."""
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
        code = _run(arguments[0], arguments[1:])
        _leave_processes(code)
        return code
    except BrokenPipeError:
        # Whoever read our output has left; the interpreter must not try to flush it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return _report_error("stopped", 130, arguments)
    except Exception as error:
        known = _as_known_error(error, arguments[0])
        if known is None:
            message = f"{type(error).__name__}: {error}".splitlines()[0]
            return _report_error(
                f"{message} (a bug in jaxformer; --debug shows where)", 1, arguments
            )
        return _report_error(
            known.message(as_flag), known.exit_code, arguments, already=known.already_reported
        )


def entry_point() -> None:
    """The installed command."""
    if sys.argv[1:2] == ["train"]:
        reexec_with_huge_pages()
    sys.exit(main(sys.argv[1:]))


def _run(command: str, arguments: Sequence[str]) -> int:
    if command not in COMMANDS:
        raise UsageError(f"there is no command {command}: use {' or '.join(COMMANDS)}")
    check_requested_platform()
    arguments = [_with_hyphens(argument) for argument in arguments]
    with stopped_at_once() if command == "train" else contextlib.nullcontext():
        return importlib.import_module(COMMANDS[command]).run(arguments) or 0


def _with_hyphens(argument: str) -> str:
    """Returns a flag as it is written everywhere else: --init_from is read as --init-from is."""
    flag, equals, value = argument.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else argument


def _as_known_error(error: Exception, command: str) -> JaxformerError | None:
    """Returns what an error means to the user; None where only a bug can explain it."""
    if isinstance(error, JaxformerError):
        return error
    if is_out_of_memory(error):
        advice = "free some, or use a smaller model"
        if command == "train":
            advice = "use a smaller --batch-size, more --accumulation, or --dtype bfloat16"
        return ResourceError(f"out of memory: {advice}")
    processes = sys.modules.get("jaxformer.distributed.processes")
    if processes is not None:
        explained: JaxformerError | None = processes.explain_loss(error)
        if explained is not None:
            return explained
    full = (errno.ENOSPC, errno.EDQUOT)
    if isinstance(error, OSError) and (error.errno in full or error.filename is not None):
        return ResourceError(f"{error.filename or 'a file'}: {error.strerror}")
    return None


def _report_error(
    message: str, code: int, arguments: Sequence[str], *, already: bool = False
) -> int:
    """Prints an error unless that is done already, ends the other processes, returns ``code``."""
    if "--debug" in arguments:
        traceback.print_exc()
    if not already:
        print(f"jaxformer: {message}", file=sys.stderr)
    _leave_processes(code, message, already_reported=already)
    return code


def _leave_processes(code: int, message: str = "", *, already_reported: bool = False) -> None:
    """Leaves the other processes of the run, if there are any."""
    processes = sys.modules.get("jaxformer.distributed.processes")
    if processes is not None:
        processes.leave(code, message, already_reported=already_reported)
