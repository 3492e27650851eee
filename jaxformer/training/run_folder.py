"""A run's folder: its settings, its lock, and what counts as its checkpoints."""

import dataclasses
import fcntl
import json
import os
import signal
import socket
import types
import uuid
from pathlib import Path
from typing import Any

from jaxformer.errors import CheckpointError, DirectoryInUseError, ResourceError, UsageError
from jaxformer.training.checkpoints import CheckpointFolder, write_durably
from jaxformer.training.config import TrainConfig

# What a resumed run may not change: the state would no longer be that of the same experiment.
FIXED = ("model", "data", "encoding", "seed", "batch_size", "accumulation", "dtype")


class RunFolder:
    """The folder of one run, held by one process at a time.

    Args:
        path: of the folder; made if need be.
        resume: whether to go on with the run that is there.

    Raises:
        UsageError: it holds a run and ``resume`` is False.
        CheckpointError: ``resume`` is True and it holds none.
        DirectoryInUseError: another process holds it.
        ResourceError: it cannot be written to.
    """

    def __init__(self, path: Path, *, resume: bool):
        self.path = Path(path)
        self.checkpoints = CheckpointFolder(self.path / "checkpoints")
        started = (self.path / "config.json").exists() or bool(self.checkpoints.steps())
        if started and not resume:
            raise UsageError(
                f"{self.path} already holds a run: go on with --resume, or give another --out"
            )
        if resume and not self.checkpoints.steps():
            raise CheckpointError(
                f"{self.path} holds no checkpoint to resume: start a run without --resume"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / ".lock").open("a+", encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"cannot write to {self.path}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "another process"
            self._lock.close()
            raise DirectoryInUseError(
                f"{self.path} is in use by {holder}: wait for it, or give another --out"
            ) from None
        self._lock.seek(0)
        self._lock.truncate()
        self._lock.write(f"{socket.gethostname()}, process {os.getpid()}, run {uuid.uuid4().hex}")
        self._lock.flush()

    def write_config(self, config: TrainConfig) -> None:
        """Keeps the settings beside the checkpoints."""
        write_durably(self.path / "config.json", json.dumps(config.to_dict(), indent=1))

    def close(self) -> None:
        """Lets go of the folder."""
        self._lock.close()


def stored_config(path: Path) -> TrainConfig | None:
    """The settings of the run in a folder, or None where there is no run.

    Raises:
        CheckpointError: they cannot be read.
    """
    file = Path(path) / "config.json"
    if not file.exists():
        return None
    try:
        return TrainConfig.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error


def check_resumable(
    before: dict[str, Any], config: TrainConfig, vocabulary: str, corpus_sha256: str
) -> list[str]:
    """Compares a checkpoint's manifest with what is asked for now.

    Returns:
        What was changed and may be, one line each.

    Raises:
        UsageError: something changed that a resumed run must keep; all of it is named.
    """
    changes = dict(_differences(before["config"], config.to_dict()))
    if before["vocabulary"] != vocabulary:
        changes["vocabulary"] = f"{len(before['vocabulary'])} -> {len(vocabulary)} characters"
    if before["corpus"]["sha256"] != corpus_sha256:
        changes["corpus"] = f"SHA-256 {before['corpus']['sha256'][:12]} -> {corpus_sha256[:12]}"
    refused = {
        name: change
        for name, change in changes.items()
        if name.partition(".")[0] in (*FIXED, "vocabulary", "corpus")
    }
    if refused:
        listed = "; ".join(f"{name}: {change}" for name, change in refused.items())
        raise UsageError(f"a resumed run must keep {listed}")
    return [f"{name}: {change}" for name, change in changes.items()]


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Any:
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            for inner, change in _differences(old, new):
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
            os._exit(128 + number)
        self.received = number
