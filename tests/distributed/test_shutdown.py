"""How a process ends that JAX's runtime aborts, or that is interrupted while it waits there."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

PROGRAM = """
import os
from jaxformer.distributed import shutdown
shutdown.explain_aborts(lambda: "process 0 has died")
{more}
os.abort()
"""


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ("", 9, "jaxformer: process 0 has died\n"),
        # It has said why it leaves, and the others knew it before it had ended.
        ("shutdown.end_aborts_with(3)", 3, ""),
    ],
)
def test_an_abort_has_a_line_unless_the_process_is_leaving(more, code, words):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(more=more)], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, words)


BEFORE = "jaxformer: stopped before the run began: its folder is as it was\n"

# The runtime waits as a mutex does: a signal does not bring the main thread back to Python.
WAITS = """
import ctypes, signal
from jaxformer.cli.early_signals import stopped_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
with stopped_at_once():
    lock(mutex)
    print("waits", flush=True)
    {then}
"""


@pytest.mark.parametrize(
    ("then", "number", "code"),
    [
        ("lock(mutex)", signal.SIGINT, 130),
        ("while True: pass", signal.SIGINT, 130),
        ("lock(mutex)", signal.SIGTERM, 143),
    ],
)
def test_a_signal_ends_a_process_whatever_its_main_thread_does(then, number, code):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (code, BEFORE)


def test_an_interrupt_is_left_to_whoever_asks_for_it_later():
    program = """
import os, signal, time
from jaxformer.cli.early_signals import stopped_at_once
before = signal.getsignal(signal.SIGINT)
with stopped_at_once():
    signal.signal(signal.SIGINT, lambda *_: print("noted", flush=True))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
assert signal.getsignal(signal.SIGINT) is before
assert signal.set_wakeup_fd(-1) == -1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "noted\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_before_it_has_begun_says_so(empty_folder, number, code):
    os.mkfifo("settings.toml")
    command = [sys.executable, "-m", "jaxformer", "train", "--config", "settings.toml"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        pipe = open_once_read("settings.toml")
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        os.close(pipe)
    finally:
        process.kill()
    assert (process.returncode, out, err) == (code, "", BEFORE)
    assert not (empty_folder / "runs").exists()


def open_once_read(pipe, seconds=20):
    """Opens a pipe for writing, once another process reads it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        time.sleep(0.01)
    pytest.fail("nobody reads it")
