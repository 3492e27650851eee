"""A run's folder: its settings, its lock, and what counts as its checkpoints."""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import socket
import types
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.distributed import processes
from jaxformer.errors import CheckpointError, DirectoryInUseError, ResourceError, UsageError
from jaxformer.storage.durable_files import atomic_write_text
from jaxformer.training.config import TrainConfig

# What a resumed run may not change: the state would no longer be that of the same experiment.
FIXED = (
    "model", "data", "encoding", "seed", "batch_size", "accumulation", "dtype",
    "vocabulary", "corpus",
)  # fmt: skip


class RunFolder:
    """The folder of one run, held by one run at a time: by its first process, for all of them.

    Used as a context manager: a fresh run that leaves without a step to show takes away all that
    it made. All processes make it together, and what is refused is refused in all of them.

    Args:
        path: of the folder; made if need be.
        resume: whether to go on with the run that is there.

    Attributes:
        resumed: whether there is a checkpoint to go on from. A run that was cut off before its
            first one starts over.

    Raises:
        UsageError: it holds a run and ``resume`` is False.
        CheckpointError: ``resume`` is True and it holds none, or not every process can see it.
        DirectoryInUseError: another process holds it.
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
        if self.resumed:
            check_shared(self.checkpoints.folder)

    def _claim(self, resume: bool) -> bool:
        """Takes the folder; says whether there is a checkpoint to go on from."""
        self._held_a_run = holds_run(self.path)
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        # The lock comes first: a run that goes on is no run to resume.
        lock = self._acquire() if (self.path / ".lock").exists() else None
        if self._held_a_run and not resume:
            raise UsageError(
                f"{self.path} already holds a run: go on with --resume, or give another --out"
            )
        if resume and not self._held_a_run:
            raise CheckpointError(f"{self.path} holds no run: start one without --resume")
        resumed = resume and bool(self.checkpoints.steps())
        if resume and not resumed and self.checkpoints.others():
            raise CheckpointError(
                f"{self.checkpoints.folder} holds no checkpoint that can be used: start a new run"
            )
        self._lock = lock or self._acquire()
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
                f"{self.path} is in use by {holder}: wait for it, or give another --out"
            ) from None
        except OSError as error:
            raise ResourceError(f"cannot write to {self.path}: {error.strerror}") from error
        return lock

    def begin(self, config: TrainConfig, files: Sequence[Path] = ()) -> None:
        """Writes the settings, and who holds the folder: from here on it is this run's.

        Args:
            config: the settings.
            files: copied into the folder.
        """
        processes.on_primary(lambda: self._begin(config, files))

    def seen_by(self) -> list[bool]:
        """Which processes see that the run has begun, in their order."""
        config = self.path / "config.json"
        return [bool(seen) for (seen,) in processes.all_gather_ints([int(config.exists())])]

    def _begin(self, config: TrainConfig, files: Sequence[Path]) -> None:
        assert self._lock is not None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"{socket.gethostname()}, process {os.getpid()}, run {uuid.uuid4().hex}")
        self._lock.flush()
        atomic_write_text(self.path / "config.json", json.dumps(config.to_dict(), indent=1))
        self._copied = [self.path / file.name for file in files]
        for file, copy in zip(files, self._copied, strict=True):
            atomic_write_text(copy, file.read_text(encoding="utf-8"))

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        """Lets go of the folder, once nothing is written to it."""
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
        for name in ("config.json", "metrics.jsonl", ".lock"):
            (self.path / name).unlink(missing_ok=True)
        for copy in self._copied:
            copy.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def check_shared(path: Path) -> None:
    """Checks that every process sees in a folder what the first one sees there.

    Raises:
        CheckpointError: one does not; raised in all of them.
    """

    def names() -> list[str]:
        return sorted(p.name for p in path.iterdir()) if path.is_dir() else []

    first = processes.broadcast(names())

    def check() -> None:
        unseen = set(first) - set(names())
        if unseen:
            raise CheckpointError(
                f"{socket.gethostname()} does not see {path / min(unseen)}, which process 0 sees: "
                "put the run's folder on storage that all hosts share"
            )

    processes.all_or_raise(check)


def holds_run(path: Path) -> bool:
    """Whether a folder holds a run, however far it came."""
    names = ("config.json", "metrics.jsonl", "checkpoints")
    return any((Path(path) / name).exists() for name in names)


def stored_config(path: Path) -> TrainConfig:
    """The settings of the run in a folder.

    Raises:
        CheckpointError: there is no run, or its settings cannot be read.
    """
    if not holds_run(path):
        raise CheckpointError(f"{path} holds no run: start one without --resume")
    file = Path(path) / "config.json"
    try:
        return TrainConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def stored_vocabulary(path: Path) -> tuple[bool, str | None]:
    """Whether a run started from another model, and the characters of its newest checkpoint."""
    checkpoints = CheckpointFolder(Path(path) / "checkpoints")
    for step in reversed(checkpoints.steps()):
        with contextlib.suppress(CheckpointError):
            manifest = checkpoints.manifest(step)
            return bool(manifest.get("init_from")), manifest.get("vocabulary")
    return False, None


def check_settings(before: dict[str, Any], config: TrainConfig) -> dict[str, str]:
    """Compares the settings of a run, as a plain dict, with those asked for now.

    Returns:
        What was changed and may be, by name.

    Raises:
        UsageError: something changed that a resumed run must keep; all of it is named.
    """
    return _refuse_fixed(dict(differences(before, config.to_dict())))


def check_resumable(
    before: dict[str, Any], config: TrainConfig, vocabulary: str | None, corpus_sha256: str
) -> list[str]:
    """Compares a checkpoint's manifest with what is asked for now.

    Returns:
        What was changed and may be, one line each.

    Raises:
        UsageError: something changed that a resumed run must keep; all of it is named.
        CheckpointError: the manifest has no settings.
    """
    # Read back, so that JSON's lists are tuples again and settings since added have their defaults.
    try:
        settings = TrainConfig.from_dict(before["config"]).to_dict()
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the manifest of step {before['step']} has no settings that can be read: {error}"
        ) from error
    changes = dict(differences(settings, config.to_dict()))
    characters, corpus = before.get("vocabulary"), before.get("corpus")
    if characters != vocabulary:
        changes["vocabulary"] = " -> ".join(
            "tokens of a tokenizer" if known is None else f"{len(known)} characters"
            for known in (characters, vocabulary)
        )
    if corpus is None:
        raise UsageError(
            "this folder holds a ported model and no run: start one with --init-from, in another"
        )
    digest = corpus.get("sha256", "")
    if digest != corpus_sha256:
        changes["corpus"] = f"SHA-256 {digest[:12]} -> {corpus_sha256[:12]}"
    return [f"{name}: {change}" for name, change in _refuse_fixed(changes).items()]


def _refuse_fixed(changes: dict[str, str]) -> dict[str, str]:
    refused = [
        f"{name} ({change})" for name, change in changes.items() if name.partition(".")[0] in FIXED
    ]
    if refused:
        raise UsageError(
            f"a resumed run must keep {', '.join(refused)}: leave that out, or start a new run"
        )
    return changes


def differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What differs between two settings, as plain dicts: its name, and both values."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for inner, change in differences(old, new):
                yield f"{name}.{inner}", change
        elif old != new:
            yield name, f"{old} -> {new}"


@dataclasses.dataclass
class StopSignal:
    """Notes the first SIGINT or SIGTERM; a second one ends the process at once.

    Used as a context manager: outside it the handlers that were there are back.
    """

    received: int | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: types.FrameType | None) -> None:
        if self.received is not None:
            processes.leave_at_once(128 + number)
        self.received = number
