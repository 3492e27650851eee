"""Runs of several real processes on this machine."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

from tests.support.quick_compiling import flags_for_devices
from tests.support.tiny import ROOT, train_arguments

PEER_TIMEOUT = 10


class Processes:
    """A run of ``count`` processes with so many devices each; ended at the latest on leaving."""

    def __init__(
        self,
        count,
        devices,
        *arguments,
        connect=120,
        folders=(),
        coordinator=False,
        module="jaxformer",
    ):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ,
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            "XLA_FLAGS": flags_for_devices(devices),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        joined = [
            "--coordinator", f"127.0.0.1:{port}", "--num-processes", count,
            "--connect-timeout", connect, "--peer-timeout", PEER_TIMEOUT, "--process-id",
        ]  # fmt: skip
        command = [sys.executable, "-m", module, *arguments, "--devices", devices]
        if count == 1 and not coordinator:
            joined = []
        self.running = [
            subprocess.Popen(
                [str(part) for part in (*command, *joined, *([i] if joined else []))],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
                cwd=folders[i] if folders else None,
            )
            for i in range(count)
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()

    def ends(self, *codes, seconds=240, but=()):
        """Waits until all (``but`` some) have ended; returns what they wrote, by process."""
        end = time.monotonic() + seconds
        outputs = {
            i: process.communicate(timeout=max(1, end - time.monotonic()))
            for i, process in enumerate(self.running)
            if i not in but
        }
        assert {self.running[i].returncode for i in outputs} == set(codes), outputs
        return outputs

    def wait_for(self, condition, seconds=240):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for process in self.running:
                assert process.poll() is None, process.communicate()
            with contextlib.suppress(FileNotFoundError):
                if condition():
                    return
            time.sleep(0.02)
        raise AssertionError("it did not happen")


def run(count, devices, *arguments, codes=(0,), **more):
    """Runs ``Processes`` to their end; returns what each process wrote."""
    with Processes(count, devices, *arguments, **more) as processes:
        return processes.ends(*codes)


def fresh(text, out, *more):
    """The arguments of a tiny run whose devices are counted by ``Processes``."""
    arguments = train_arguments(text, out, *more)
    at = arguments.index("--devices")
    return arguments[:at] + arguments[at + 2 :]


def lines(text):
    """The lines that a process wrote itself, without the log of the runtime."""
    return [line for line in text.splitlines() if not re.match(r"[IWE]\d{4} ", line)]
