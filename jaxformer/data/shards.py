"""Shards of token ids as they are written: cut at a fixed length, resumable, hashed."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import TextError
from jaxformer.storage.durable_files import BUFFER_BYTES, atomic_write_text, sync_path

PROGRESS = "progress.json"
DOCUMENTS = np.dtype("<u8")


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
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        dtype: np.dtype,
        shard_tokens: int,
        state: dict[str, Any] | None = None,
    ):
        self._folder, self._name, self._dtype = folder, name, dtype
        self._shard_tokens = shard_tokens
        state = state or {"tokens": 0, "documents": 0, "bytes": 0, "shards": [], "open": [0, 0]}
        self.shards: list[dict[str, Any]] = list(state["shards"])
        self.tokens, self.documents = state["tokens"], state["documents"]
        self.bytes = state["bytes"]
        self._finish_renames()
        self._open(*state["open"])

    @property
    def state(self) -> dict[str, Any]:
        """How far the split is, as JSON; true once ``sync`` has returned."""
        return {
            **{name: getattr(self, name) for name in ("tokens", "documents", "bytes", "shards")},
            "open": [self._count, self._begun],
        }

    def add(self, ids: np.ndarray, begins: np.ndarray, text_bytes: int) -> None:
        """Appends ids.

        Args:
            ids: (T,), of the dtype.
            begins: where documents begin among them.
            text_bytes: of UTF-8, which the ids stand for.
        """
        self.tokens += len(ids)
        self.documents += len(begins)
        self.bytes += text_bytes
        done = 0
        while done < len(ids):
            part = ids[done : done + self._shard_tokens - self._count]
            inside = begins[(begins >= done) & (begins < done + len(part))] - done + self._count
            for file, digest, data in (
                (self._ids, self._ids_hash, part.tobytes()),
                (self._places, self._places_hash, inside.astype(DOCUMENTS).tobytes()),
            ):
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
        for file in (self._ids, self._places):
            file.flush()
            os.fsync(file.fileno())

    def commit(self) -> None:
        """Gives the shards that are complete their names, once ``state`` is stored."""
        self._finish_renames()

    def finish(self) -> None:
        """Closes the last shard."""
        if self._count:
            self._close()
        else:
            self._discard()

    def _paths(self, number: int) -> tuple[Path, Path]:
        stem = f"{self._name}-{number:05}"
        return self._folder / f"{stem}.bin", self._folder / f"{stem}.documents"

    def _open(self, count: int, begun: int) -> None:
        self._count, self._begun = count, begun
        paths = self._paths(len(self.shards))
        sizes = (count * self._dtype.itemsize, begun * DOCUMENTS.itemsize)
        self._ids, self._places = (
            _reopen(_part(path), size) for path, size in zip(paths, sizes, strict=True)
        )
        self._ids_hash, self._places_hash = (_hash(_part(path)) for path in paths)

    def _close(self) -> None:
        self.sync()
        self._ids.close()
        self._places.close()
        ids, places = self._paths(len(self.shards))
        self.shards.append(
            {
                "file": ids.name,
                "tokens": self._count,
                "sha256": self._ids_hash.hexdigest(),
                "documents": {
                    "file": places.name,
                    "count": self._begun,
                    "sha256": self._places_hash.hexdigest(),
                },
            }
        )

    def _discard(self) -> None:
        self._ids.close()
        self._places.close()
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
