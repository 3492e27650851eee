"""A process that is one side of benchmarks/peers.py, as the process that times it sees it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import measure
from peer_sides import UnableError


class Worker:
    """A process that has one side, and does one thing at a time."""

    def __init__(self, name: str, weights: Path, caches: Path):
        begin = time.perf_counter()
        self.name = name
        caches.mkdir()
        self.errors = caches / "errors"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *worker_command(name, weights)],
                env=os.environ | environment(caches),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            )  # fmt: skip
        try:
            self.first = self._answer()
        except Exception:
            self.end()
            raise
        self.first_step = time.perf_counter() - begin

    def ask(self, what: str, **settings: Any) -> Any:
        """Returns what the side answers.

        Raises:
            UnableError: it cannot do it.
        """
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **settings}) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.errors.read_text().splitlines()
            raise UnableError(said[-1] if said else f"exit code {self.process.wait()}")
        answer = json.loads(line)
        if "cannot" in answer:
            raise UnableError(answer["cannot"])
        return answer["done"]

    def end(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.communicate()


def worker_command(name: str, weights: Path) -> list[str]:
    """Returns the arguments of Python with which a script is a side."""
    return [sys.argv[0], *sys.argv[1:], "--worker", name, "--weights", str(weights)]


def environment(caches: Path) -> dict[str, str]:
    """Returns what makes a process run on the CPU and compile all anew."""
    return {
        "PYTHONPATH": measure.python_path(),
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_COMPILATION_CACHE_DIR": str(caches / "jax"),
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "torch"),
    }
