"""A run's folder: its lock, its settings, and its checkpoints."""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.distributed import processes
from jaxformer.errors import (
    CheckpointError,
    DirectoryInUseError,
    JaxformerError,
    ResourceError,
    Setting,
    UsageError,
)
from jaxformer.storage.durable_files import atomic_write_bytes, atomic_write_text
from jaxformer.training.config import TrainConfig
from jaxformer.training.config_files import to_toml

# Names the checkpoint that a run starts from, until it has one of its own.
START = "init_from.txt"


class RunFolder:
    """The folder of one run, locked by its primary process for all of them.

    Used as a context manager: a fresh run that ends before its first step removes all that it made.
    All processes construct it together, and an error is raised in all of them.

    Args:
        path: of the folder; made if need be.
        resume: whether to continue with the run that is there.

    Attributes:
        resumed: whether there is a checkpoint to continue from.
        starts_over: whether there is a run to continue, and no checkpoint of it: it was cut off
            before its first one, or somebody has removed them.

    Raises:
        UsageError: the folder holds a run and ``resume`` is False.
        CheckpointError: ``resume`` is True and the folder holds no run, or not every process can
            see it.
        DirectoryInUseError: another run has locked it.
        ResourceError: it cannot be written to.
    """

    def __init__(self, path: Path, *, resume: bool):
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints")
        self._held_a_run = True
        self._made: list[Path] = []
        self._copied: list[Path] = []
        self._lock: TextIO | None = None
        self.resumed = processes.on_primary(lambda: self._claim(resume))
        self.starts_over = resume and not self.resumed
        if self.resumed:
            check_shared(self.checkpoints.folder)

    def _claim(self, resume: bool) -> bool:
        """Locks the folder; returns whether there is a checkpoint to continue from."""
        self._held_a_run = holds_run(self.path)
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        # The lock comes first: a run that is still training cannot be resumed.
        lock = self._acquire() if (self.path / ".lock").exists() else None
        try:
            resumed = self._check(resume)
        except JaxformerError:
            if lock is not None:
                lock.close()
            raise
        self._lock = lock or self._acquire()
        return resumed

    def _check(self, resume: bool) -> bool:
        """Checks that a run may begin or resume; returns whether it does from a checkpoint."""
        if self._held_a_run and not resume:
            raise UsageError(
                f"{self.path} already holds a run: continue it with ",
                Setting("resume"),
                ", or give another ",
                Setting("out"),
            )
        if resume and not self._held_a_run:
            raise CheckpointError(
                f"{self.path} holds no run: start one without ", Setting("resume")
            )
        resumed = resume and bool(self.checkpoints.steps())
        if resume and not resumed and self.checkpoints.others():
            raise CheckpointError(
                f"{self.checkpoints.folder} holds no checkpoint that can be used: start a new run"
            )
        if resume:
            check_start(self.path)
            self.checkpoints.check_writable()
        return resumed

    def _acquire(self) -> TextIO:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a+", encoding="utf-8")
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            lock.close()
            raise DirectoryInUseError(
                f"{self.path} is in use by {holder}: wait for it, or give another ", Setting("out")
            ) from None
        except FileExistsError:
            raise ResourceError(
                f"cannot write to {self.path}: it is a file, not a folder: give another ",
                Setting("out"),
            ) from None
        except OSError as error:
            raise ResourceError(f"cannot write to {self.path}: {error.strerror}") from error
        return lock

    def begin(
        self,
        config: TrainConfig,
        files: Mapping[str, Path | bytes] | None = None,
        source: str | None = None,
    ) -> None:
        """Writes the settings and the owner of the lock: from here on the folder is this run's.

        Args:
            config: the settings.
            files: copied into the folder, by the names of the copies.
            source: the checkpoint that a fresh run starts from, if it starts from one.
        """
        start = {} if source is None else {START: source.encode()}
        processes.on_primary(lambda: self._begin(config, {**(files or {}), **start}))

    def seen_by(self) -> list[bool]:
        """Returns whether each process sees the run's settings, in the order of processes."""
        config = self.path / "config.json"
        return [bool(seen) for (seen,) in processes.all_gather_ints([int(config.exists())])]

    def _begin(self, config: TrainConfig, files: Mapping[str, Path | bytes]) -> None:
        assert self._lock is not None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"{socket.gethostname()}, process {os.getpid()}, run {uuid.uuid4().hex}")
        self._lock.flush()
        atomic_write_text(self.path / "config.json", json.dumps(config.to_dict(), indent=1))
        atomic_write_text(self.path / "config.toml", to_toml(config))
        self._copied = [self.path / name for name in files]
        for name, file in files.items():
            data = file if isinstance(file, bytes) else file.read_bytes()
            atomic_write_bytes(self.path / name, data)

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        """Unlocks the folder, once nothing is written to it."""
        self.checkpoints.settle()
        if self._lock is None:
            return
        metrics = self.path / "metrics.jsonl"
        made_steps = metrics.exists() and metrics.stat().st_size > 0
        if not (self._held_a_run or made_steps or self.checkpoints.steps()):
            self._discard()
        self._lock.close()

    def _discard(self) -> None:
        for name in ("checkpoints", "tensorboard", "profile"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        for name in ("config.json", "config.toml", "metrics.jsonl", "samples.jsonl", ".lock"):
            (self.path / name).unlink(missing_ok=True)
        for copy in self._copied:
            copy.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def check_start(path: Path) -> None:
    """Checks that a run can go on without the weights of the checkpoint that it started from.

    Raises:
        CheckpointError: it has saved none, or somebody has removed them: it would go on from drawn
            ones.
    """
    start = Path(path) / START
    if start.is_file() and not CheckpointFolder(Path(path) / "checkpoints").steps():
        source = start.read_text(encoding="utf-8")
        raise CheckpointError(
            f"{path} has no checkpoint, and it started from the weights of {source}: "
            "start a new run with ",
            Setting("init_from", value=source),
        )


def check_shared(path: Path) -> None:
    """Checks that every process sees in a folder what the primary one sees there.

    Raises:
        CheckpointError: a process does not; raised in all of them.
    """

    def names() -> list[str]:
        return sorted(p.name for p in path.iterdir()) if path.is_dir() else []

    first = processes.broadcast(names())

    def check() -> None:
        missing = set(first) - set(names())
        if missing:
            raise CheckpointError(
                f"{socket.gethostname()} does not see {path / min(missing)}, which process 0 sees: "
                "put the run's folder on storage that all hosts share"
            )

    processes.all_or_raise(check)


def holds_run(path: Path) -> bool:
    """Returns whether a folder holds a run, with or without a checkpoint."""
    names = ("config.json", "metrics.jsonl", "checkpoints")
    return any((Path(path) / name).exists() for name in names)


def is_in_use(path: Path) -> bool:
    """Returns whether a process trains in a folder, that is, holds its lock."""
    file = Path(path) / ".lock"
    if not file.exists():
        return False
    with file.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def stored_config(path: Path) -> TrainConfig:
    """Returns the settings of the run in a folder.

    Raises:
        CheckpointError: there is no run, or its settings cannot be read.
    """
    if not holds_run(path):
        raise CheckpointError(f"{path} holds no run: start one without ", Setting("resume"))
    file = Path(path) / "config.json"
    try:
        return TrainConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def stored_vocabulary(path: Path) -> tuple[bool, str | None]:
    """Returns whether a run brought its tokenizer, and the characters of its newest checkpoint."""
    checkpoints = CheckpointFolder(Path(path) / "checkpoints")
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):
            manifest = checkpoints.manifest(step)
            settings = manifest.get("config")
            named = isinstance(settings, dict) and settings.get("tokenizer")
            return bool(manifest.get("init_from") or named), manifest.get("vocabulary")
    return False, None
