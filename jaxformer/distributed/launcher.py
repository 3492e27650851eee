"""Starts the processes of a run on this machine, and again when one is lost; free of JAX.

Other machines have their own launchers (SLURM, Kubernetes), which do the same for several hosts.
"""

import contextlib
import math
import signal
import socket
import subprocess
import time
import types
from collections.abc import Callable, Iterator, Sequence

from jaxformer.errors import DeviceError

# What a process ends with that has lost another one.
LOST = DeviceError.exit_code
# Seconds that the others have to end by themselves, once a process is lost.
GRACE = 10.0
POLL_SECONDS = 0.05
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_processes(
    command: Sequence[str],
    count: int,
    *,
    restarts: int,
    resume: Callable[[], Sequence[str] | None],
    report: Callable[[str], None],
) -> int:
    """Runs a command in several processes of this machine, until all of them have ended.

    SIGINT, SIGTERM and SIGHUP are passed on to all of them, and nothing is started again after one;
    a second one kills what still runs.

    Args:
        command: its words; with several processes each gets --coordinator, --num-processes and
            --process-id besides.
        count: how many processes.
        restarts: how often all are started again after one was lost: it was killed by a signal, or
            does not answer the others.
        resume: returns the command that goes on with what is saved; None if nothing can.
        report: is called with a line on each loss.

    Returns:
        The exit code: 0 if all are done, otherwise that of the first process that has another one.
    """
    running: list[subprocess.Popen[bytes]] = []
    with _signals_passed_on(running) as received:
        for restart in range(restarts + 1):
            _start(command, count, running)
            try:
                codes = _wait(running, received)
            finally:
                _kill(running)
            loss = _describe_loss(codes)
            if loss is None or received:
                break
            left = restarts - restart
            again = resume() if left else None
            if again is None:
                why = "no restart is left" if not left else "nothing is saved from which to go on"
                report(f"{loss}; {why}")
                break
            report(f"{loss}; all are started again, restart {restart + 1} of {restarts}")
            command = again
    code = next((code for code in codes if code), 0)
    return 128 - code if code < 0 else code


def _start(command: Sequence[str], count: int, running: list[subprocess.Popen[bytes]]) -> None:
    """Starts all processes, each in a group of its own, which the terminal sends no signals."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running.clear()
    for index in range(count):
        place = [] if count == 1 else [
            "--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count),
            "--process-id", str(index),
        ]  # fmt: skip
        running.append(subprocess.Popen([*command, *place], process_group=0))


def _wait(running: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> list[int]:
    """Returns the exit codes, once all have ended or the others are not to be waited for.

    Some time after a loss, or after the first end that follows a signal, they are not; nor after a
    second signal. What has not ended then has the code of the signal, or 0 without one.
    """
    end = math.inf
    while True:
        codes = [process.poll() for process in running]
        if received:
            is_ending = codes.count(None) < len(codes)
        else:
            is_ending = _describe_loss(codes) is not None
        if is_ending:
            end = min(end, time.monotonic() + GRACE)
        if None not in codes or len(received) > 1 or time.monotonic() > end:
            unended = -received[0] if received else 0
            return [unended if code is None else code for code in codes]
        time.sleep(POLL_SECONDS)


def _describe_loss(codes: Sequence[int | None]) -> str | None:
    """Returns what was lost, in words, by the exit codes so far; None if nothing was."""
    for index, code in enumerate(codes):
        if code is not None and code < 0:
            return f"process {index} was ended by signal {-code} ({signal.strsignal(-code)})"
    # A single process has none to lose: its error is about a device.
    if len(codes) > 1 and LOST in codes:
        return "a process does not answer"
    return None


def _kill(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _signals_passed_on(running: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Passes signals on to the processes; gives the list of those that came."""
    received: list[int] = []

    def pass_on(number: int, _frame: types.FrameType | None) -> None:
        received.append(number)
        for process in running:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in FORWARDED}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
