"""Gives a message and an exit code to the way in which JAX's runtime ends a process: ``abort``.

JAX's coordination client calls ``abort`` from a thread of its own, as soon as it cannot reach the
coordinator. Neither an exception nor a handler of Python's ``signal`` sees that. A handler set
through the C library does: it runs in the thread that aborts.
"""

import contextlib
import ctypes
import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from jaxformer.errors import DeviceError

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_why: Callable[[], str | None] | None = None
_code: int | None = None
_before: Any = None


def explain_aborts(why: Callable[[], str | None]) -> None:
    """Makes an abort print one line and end with the exit code of ``DeviceError``.

    Args:
        why: returns the line, or None to let the process abort, for an error of the runtime.
    """
    global _why, _before
    _why = why
    if _before is None:
        _before = _signal(signal.SIGABRT, ctypes.cast(_handler, ctypes.c_void_p))


def end_aborts_with(code: int) -> None:
    """Makes an abort end this process with a code and without a word.

    For a process that is leaving and has said why: once the others know, the coordinator may be
    gone before it has ended itself.
    """
    global _code
    _code = code


def quiet_runtime() -> None:
    """Silences the runtime's own messages; it must be called before JAX is imported.

    Its log reports each loss of a process over dozens of lines, and gloo prints a greeting on
    standard output.
    """
    # At 1, JAX's own choice, it may come from a parent that imported JAX.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "4"
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        stdout.reconfigure(
            line_buffering=sys.stdout.line_buffering, write_through=sys.stdout.write_through
        )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        sys.stdout = stdout


def restore_abort() -> None:
    """Undoes ``explain_aborts``."""
    global _before
    if _before is not None:
        _signal(signal.SIGABRT, ctypes.c_void_p(_before or None))
        _before = None


def print_error(message: str) -> None:
    """Prints an error in one line, as the command does, and shows a cursor that was hidden."""
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)
    print(f"jaxformer: {message}", file=sys.stderr, flush=True)


def flush_output() -> None:
    """Flushes standard output and error; a reader that has left does not matter."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _signal(number: int, handler: Any) -> int:
    function = ctypes.CDLL(None).signal
    function.restype = ctypes.c_void_p
    function.argtypes = (ctypes.c_int, ctypes.c_void_p)
    return function(number, handler) or 0


@_HANDLER
def _handler(number: int) -> None:
    if _code is not None:
        flush_output()
        os._exit(_code)
    line = None if _why is None else _why()
    if line is not None:
        print_error(line)
        os._exit(DeviceError.exit_code)
    print_error("the JAX runtime aborted this process (--debug shows its log)")
    restore_abort()
