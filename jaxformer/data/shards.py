"""Shards of token ids as they are written: cut at a fixed length, resumable, hashed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import TextError
from jaxformer.storage.durable_files import BUFFER_BYTES, atomic_write_text, sync_path
from jaxformer.token_data import ANSWERS, DOCUMENTS

PROGRESS = "progress.json"


class SplitWriter:
    """Writes the shards of one split; every shard but the last has the same number of ids.

    An open shard is a ``.part`` file that grows. ``state`` says how far it is known to be on the
    disk; what a killed process wrote beyond that is cut off when its folder is opened again.

    Args:
        folder: where the shards are.
        name: of the split.
        dtype: of the ids.
        shard_tokens: how many ids a shard has.
        state: of a split that was begun before.
        has_answers: whether a file beside each shard says which ids are targets.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
        has_answers: bool = False,
    ):
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_tokens = shard_tokens
        self._has_answers = has_answers
        state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": [], "open": [0, 0]}
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.tokens, self.documents = state["tokens"], state["documents"]
        self.bytes, self.answers = state["bytes"], state.get("answers", 0)
        self._count = self._begun = 0
        self._finish_renames()
        self._open(*state["open"])

    @property
    def state(self) -> dict[str, Any]:
        """How far the split is, as JSON; true once ``sync`` has returned."""
        return {
            **{
                name: getattr(self, name)
                for name in ("tokens", "documents", "bytes", "answers", "shards")
            },
            "open": [self._count, self._begun],
        }

    def add(
        self,
        ids: np.ndarray,
        begins: np.ndarray,
        text_bytes: int,
        counts: np.ndarray | None = None,
    ) -> None:
        """Appends ids.

        Args:
            ids: (T,), of the dtype.
            begins: where documents begin among them.
            text_bytes: of UTF-8, which the ids stand for.
            counts: which ids are targets; default all.
        """
        counts = np.ones(len(ids), bool) if counts is None else counts
        self.answers += int(counts.sum())
        self.tokens += len(ids)
        self.documents += len(begins)
        self.bytes += text_bytes
        done = 0
        while done < len(ids):
            part = ids[done : done + self._shard_tokens - self._count]
            inside = begins[(begins >= done) & (begins < done + len(part))] - done + self._count
            targets = counts[done : done + len(part)].astype(ANSWERS)
            written: tuple[np.ndarray, ...] = (part, inside.astype(DOCUMENTS), targets)
            # The last of them has no file where every id is a target.
            for array, file, digest in zip(written, self._files, self._hashes, strict=False):
                data = array.tobytes()
                file.write(data)
                digest.update(data)
            self._count += len(part)
            self._begun += len(inside)
            done += len(part)
            if self._count == self._shard_tokens:
                self._close()
                self._open(0, 0)

    def sync(self) -> None:
        """Returns once all that ``state`` says is on the disk."""
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Gives the shards that are complete their names, once ``state`` is stored."""
        self._finish_renames()

    def finish(self) -> None:
        """Closes the last shard."""
        if self._count:
            self._close()
            self._count, self._begun = 0, 0
        else:
            self._discard()

    def _paths(self, number: int) -> list[Path]:
        kinds = ("bin", "documents", "answers")[: 3 if self._has_answers else 2]
        return [self._folder / f"{self._name}-{number:05}.{kind}" for kind in kinds]

    def _open(self, count: int, begun: int) -> None:
        self._count, self._begun = count, begun
        paths = self._paths(len(self.shards))
        sizes = (count * self._dtype.itemsize, begun * DOCUMENTS.itemsize, count * ANSWERS.itemsize)
        self._files = [_reopen(_part(path), size) for path, size in zip(paths, sizes, strict=False)]
        self._hashes = [_hash(_part(path)) for path in paths]

    def _close(self) -> None:
        self.sync()
        for file in self._files:
            file.close()
        ids, places, *answers = (
            {"file": path.name, "sha256": digest.hexdigest()}
            for path, digest in zip(self._paths(len(self.shards)), self._hashes, strict=True)
        )
        shard = {**ids, "tokens": self._count, "documents": {**places, "count": self._begun}}
        if answers:
            shard["answers"] = answers[0]
        self.shards.append(shard)

    def _discard(self) -> None:
        for file in self._files:
            file.close()
        for path in self._paths(len(self.shards)):
            _part(path).unlink()

    def _finish_renames(self) -> None:
        for number in range(len(self.shards)):
            for path in self._paths(number):
                if _part(path).exists():
                    _part(path).replace(path)
        sync_path(self._folder)


def write_progress(folder: Path, progress: dict[str, Any]) -> None:
    """Stores how far a folder is."""
    atomic_write_text(folder / PROGRESS, json.dumps(progress))


def read_progress(folder: Path) -> dict[str, Any] | None:
    """Returns how far a folder is; None if it was not begun.

    Raises:
        TextError: the file is damaged.
    """
    path = folder / PROGRESS
    if not path.exists():
        return None
    try:
        progress: dict[str, Any] = json.loads(path.read_bytes())
        return {name: progress[name] for name in ("settings", "position", "splits")}
    except (ValueError, LookupError, TypeError) as error:
        raise TextError(f"{path} is damaged: remove the folder and begin again") from error


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _reopen(path: Path, size: int) -> Any:
    """Opens a file to append to it after so many bytes, and cuts off the rest."""
    if not size:
        return path.open("wb")
    found = path.stat().st_size if path.exists() else 0
    if found < size:
        raise TextError(
            f"{path} has {found:,} bytes, not {size:,}: remove the folder and begin again"
        )
    os.truncate(path, size)
    return path.open("ab")


def _hash(path: Path) -> Any:
    found = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(BUFFER_BYTES), b""):
            found.update(block)
    return found
