"""Processes that cost no imports: forks of one that has imported everything and begun nothing.

Before the fork there is no backend of JAX and only one thread, so that a fork continues as a new
process does once its imports are done.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent


class Zygote:
    """The process that is forked.

    Args:
        environment: of it and of all its forks.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forks"],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **request: Any) -> Any:
        """The answer to a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.communicate()


class Fork:
    """A command in a fork, with as much of ``subprocess.Popen`` as is needed."""

    def __init__(self, zygote: Zygote, arguments: Sequence[str], out: Path, err: Path):
        self._zygote = zygote
        self._code: int | None = None
        self.pid: int = zygote.ask(arguments=list(arguments), out=str(out), err=str(err))

    def poll(self) -> int | None:
        """Its exit code, or the negative of the signal that ended it; None while it runs."""
        if self._code is None:
            self._code = self._zygote.ask(poll=self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end.

        Raises:
            subprocess.TimeoutExpired: it does not come in time.
        """
        end = time.monotonic() + (timeout or 3600)
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout or 3600)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    """Answers requests: starts forks, and says how they ended."""
    import importlib

    for name in (
        "jaxformer.cli.main", "jaxformer.training.loop", "jaxformer.training.startup",
        "jaxformer.checkpoints", "jaxformer.hardware.compilation_cache", "orbax.checkpoint",
        "matplotlib.figure", "jaxformer.training.parallel.mesh", "jax.experimental.multihost_utils",
    ):  # fmt: skip
        importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = None if pid == 0 else os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                _run(request)
        print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any]) -> None:
    from jaxformer.cli.main import main

    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(main(request["arguments"]))


if __name__ == "__main__":
    serve()
