"""The runtime's way to end a process that has lost another one is ``abort``; this gives it words.

JAX's coordination client calls ``abort`` from a thread of its own, as soon as it cannot reach the
coordinator, so neither an exception nor a handler of Python's ``signal`` comes into it. A handler
set through the C library does: it runs in the thread that aborts.
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
_before: Any = None


def end_with(why: Callable[[], str | None]) -> None:
    """From now on an abort is explained in one line, and ends with the code of ``DeviceError``.

    Args:
        why: gives the line; None lets the process abort, as for a fault of the runtime's own.
    """
    global _why, _before
    _why = why
    if _before is None:
        _before = _signal(signal.SIGABRT, ctypes.cast(_handler, ctypes.c_void_p))


def quiet_runtime() -> None:
    """Keeps the runtime's own words away; to be called before JAX is imported.

    Its log tells each loss of a process over dozens of lines, and gloo greets on standard output.
    """
    # At 1, JAX's own choice, it may come from a parent that imported JAX.
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1") == "1":
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "4"
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.fileno() == 1:
        sys.stdout.flush()
        ours = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors)
        ours.reconfigure(
            line_buffering=sys.stdout.line_buffering, write_through=sys.stdout.write_through
        )
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.close(nowhere)
        sys.stdout = ours


def restore() -> None:
    """An abort is an abort again."""
    global _before
    if _before is not None:
        _signal(signal.SIGABRT, ctypes.c_void_p(_before or None))
        _before = None


def show(message: str) -> None:
    """One line on standard error, as refusals are, and the cursor that a progress bar hides."""
    if sys.stdout.isatty():
        print("\x1b[?25h", flush=True)
    print(f"jaxformer: {message}", file=sys.stderr, flush=True)


def flush() -> None:
    """What was printed goes out, whoever may read it."""
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
    line = None if _why is None else _why()
    if line is not None:
        show(line)
        os._exit(DeviceError.exit_code)
    show("the JAX runtime aborted this process (--debug shows its log)")
    restore()
