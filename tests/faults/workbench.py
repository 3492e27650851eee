"""Where faults are injected: tiny runs, the command here and in other processes, snapshots."""

import atexit
import contextlib
import dataclasses
import io
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.errors import JaxformerError
from tests.faults.forks import Fork, Zygote
from tests.support.tiny import DROPOUT, ROOT, TEXT, TINY

# The rate is a function of the step alone, wherever a run is cut and however far it is to go.
FLAGS = [*TINY, *map(str, DROPOUT), "--decay-steps", "5000", "--sample-tokens", "0"]
SELDOM = ["--eval-interval", "1000000", "--checkpoint-interval", "1000000"]
# What Python runs where its imports matter.
FRESH = ("-m", "jaxformer")
FOREVER = ["--steps", "1000000"]


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def summary(self) -> str:
        """The end of what it said."""
        return f"exit code {self.code}: {self.err[-300:] or self.out[-300:]}"

    def is_rejected(self, *codes: int) -> bool:
        """Whether it ended with one of these codes and one line."""
        lines = self.err.splitlines()
        return (
            self.code in codes
            and len(lines) == 1
            and lines[0].startswith("jaxformer: ")
            and "a bug in jaxformer" not in lines[0]
        )


class Workbench:
    """A folder to work in, and what every fault needs.

    Args:
        folder: made if need be.
        seed: of all that is random.
        reference_steps: how far the run goes that nothing happens to.
    """

    _count = 0

    def __init__(self, folder: Path, seed: int, reference_steps: int = 4000):
        # A shell's background ignores it, and whatever is started here would inherit that.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.folder = Path(folder)
        self.seed = seed
        self.reference_steps = reference_steps
        self.folder.mkdir(parents=True, exist_ok=True)
        self.text = self.folder / "text.txt"
        self.text.write_text(TEXT, encoding="utf-8")
        self._reference: dict[int, float] = {}
        self._zygote: Zygote | None = None

    def random(self, name: str) -> random.Random:
        """A generator of one fault's own: the same whichever others are run."""
        return random.Random(f"{self.seed} {name}")

    def train(self, out: Path, *more: object, text: Path | None = None) -> list[str]:
        """The arguments of a run on a text; default the one of all runs."""
        data = str(self.text if text is None else text)
        return ["train", "--data", data, "--out", str(out), *FLAGS, *map(str, more)]

    def call(self, arguments: Sequence[object], folder: Path | None = None) -> Done:
        """A command in this process, from the argument parser on."""
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.chdir(folder or self.folder),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                code = main([str(a) for a in arguments])
            except SystemExit as stop:
                code = int(stop.code or 0)
        return Done(code, out.getvalue(), err.getvalue())

    def resume(self, out: Path, *more: object) -> Done:
        """Goes on with a run in this process."""
        return self.call(["train", "--out", out, "--resume", *more])

    def start(self, arguments: Sequence[object], *program: str, **changes: str) -> "Process":
        """The same command in a process of its own, computing as this one does.

        Args:
            arguments: of the command.
            program: what Python runs, to its first import; default a fork, which has them behind
                it.
            changes: of the environment; not for a fork.
        """
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            **changes,
        }
        # The commands' own cache is part of what is tried: a kill may cut an entry.
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        Workbench._count += 1
        out, err = (self.folder / f".{name}-{Workbench._count}" for name in ("out", "err"))
        given = [str(a) for a in arguments]
        if not program:
            if self._zygote is None:
                self._zygote = Zygote(environment)
                atexit.register(self.close)
            return Process(Fork(self._zygote, given, out, err), out, err)
        with out.open("wb") as out_file, err.open("wb") as err_file:
            command = [sys.executable, *program, *given]
            popen = subprocess.Popen(command, env=environment, stdout=out_file, stderr=err_file)
        return Process(popen, out, err)

    def close(self) -> None:
        """Ends the process that is forked, if there is one."""
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None

    def reference(self) -> dict[int, float]:
        """The training losses of a run that nothing happened to, by step."""
        if not self._reference:
            out = self.folder / "reference"
            process = self.start(self.train(out, *SELDOM, "--steps", self.reference_steps))
            done = process.wait(600)
            assert done.code == 0, done.summary
            self._reference = losses(out)
        return self._reference

    def check_losses(self, out: Path) -> str:
        """What is wrong with the losses of a run, which must be the reference's to the bit."""
        found, expected = losses(out), self.reference()
        shared = found.keys() & expected.keys()
        wrong = sorted(step for step in shared if found[step] != expected[step])
        missing = sorted(set(range(1, max(found, default=0) + 1)) - found.keys())
        if wrong or missing:
            return f"{out}: losses of steps {wrong[:5]} differ, {missing[:5]} are missing"
        return ""

    def copy(self, source: Path, name: str) -> Path:
        """A fresh copy of a folder."""
        target = self.folder / name
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(source, target)
        return target


class Process:
    """A command that runs.

    Args:
        popen: the process.
        out: where its standard output goes.
        err: where its standard error goes.
    """

    def __init__(self, popen: "subprocess.Popen[bytes] | Fork", out: Path, err: Path):
        self.popen = popen
        self._files = (out, err)

    def signal(self, number: int) -> None:
        """Sends a signal, if the process is still there."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)

    def wait(self, seconds: float = 300) -> Done:
        """Waits for its end; one that does not come is one by SIGKILL."""
        try:
            code = self.popen.wait(seconds)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            code = self.popen.wait()
        out, err = (file.read_text(errors="replace") for file in self._files)
        for file in self._files:
            file.unlink()
        return Done(code, out, err)

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> bool:
        """Waits until something is so; False where the process or the time ends before."""
        end = time.monotonic() + seconds
        while self.popen.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                if condition():
                    return True
            time.sleep(0.003)
        return False


def losses(out: Path) -> dict[int, float]:
    """The training losses in a run's metrics.jsonl, by step; a line cut short is left out."""
    found = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (out / "metrics.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                if "train_loss" in record:
                    found[record["step"]] = record["train_loss"]
    return found


def durable(out: Path) -> list[int]:
    """The steps whose checkpoint has its name and its manifest."""
    found = []
    with contextlib.suppress(OSError):
        for path in (out / "checkpoints").iterdir():
            if path.name.isdigit() and (path / "MANIFEST.json").exists():
                found.append(int(path.name))
    return sorted(found)


def unreadable(out: Path) -> list[str]:
    """What is wrong with each durable checkpoint that cannot be restored."""
    checkpoints, wrong = CheckpointFolder(out / "checkpoints"), []
    for step in durable(out):
        try:
            checkpoints.restore(step)
        except JaxformerError as error:
            wrong.append(f"step {step}: {error}")
    return wrong


def state_hash(out: Path, step: int) -> str:
    """The hash of a saved state, as its manifest has it."""
    manifest: dict[str, Any] = json.loads(
        (out / "checkpoints" / str(step) / "MANIFEST.json").read_text()
    )
    return str(manifest["state_sha256"])


def snapshot(folder: Path) -> dict[str, tuple[int, int, int, bytes]]:
    """Every file, folder and link below: kind and mode, size, time of change, content."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        about = path.lstat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path)] = (about.st_mode, about.st_size, about.st_mtime_ns, content)
    return found


def changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths that are not as they were."""
    paths = before.keys() | after.keys()
    return sorted(path for path in paths if before.get(path) != after.get(path))


@contextlib.contextmanager
def unchanged(folder: Path, tally: Any, check: Any) -> Iterator[None]:
    """What happens within must change no file."""
    before = snapshot(folder)
    yield
    paths = changed(before, snapshot(folder))
    tally.files_changed += len(paths)
    check.that(not paths, f"changed {', '.join(paths[:5])}")


def words(line: str) -> list[str]:
    """A command line as a list."""
    return shlex.split(line)
