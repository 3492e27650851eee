"""How a process ends that JAX's runtime aborts, or that is interrupted while it waits there."""

import signal
import subprocess
import sys

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


# The runtime waits as a mutex does: a signal does not bring the main thread back to Python.
WAITS = """
import ctypes, signal
from jaxformer.cli import train
signal.signal(signal.SIGINT, signal.default_int_handler)
lock, mutex = ctypes.CDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
with train._interrupted_at_once():
    lock(mutex)
    print("waits", flush=True)
    {then}
"""


@pytest.mark.parametrize("then", ["lock(mutex)", "while True: pass"])
def test_an_interrupt_ends_a_process_whatever_its_main_thread_does(then):
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "waits\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "jaxformer: stopped\n")


def test_an_interrupt_is_left_to_whoever_asks_for_it_later():
    program = """
import os, signal, time
from jaxformer.cli import train
before = signal.getsignal(signal.SIGINT)
with train._interrupted_at_once():
    signal.signal(signal.SIGINT, lambda *_: print("noted", flush=True))
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.2)
assert signal.getsignal(signal.SIGINT) is before
assert signal.set_wakeup_fd(-1) == -1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "noted\n", "")
