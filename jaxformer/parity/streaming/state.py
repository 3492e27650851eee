"""What a comparison block by block has found so far, in a folder, so that it can be resumed."""

import contextlib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError, UsageError
from jaxformer.hardware.user_folders import user_cache
from jaxformer.porting.formats.safetensors_files import read_safetensors, write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.storage.durable_files import atomic_write_text

# The file that says which comparison a folder belongs to, and the name of the notes beside arrays.
KEY, NOTES = "comparison.json", "notes"


def default_folder(key: Mapping[str, Any]) -> Path:
    """Returns the folder of a comparison, by what it compares."""
    paths = json.dumps([key["reference"]["path"], key["candidate"]["path"]])
    return user_cache() / "verify" / hashlib.sha256(paths.encode()).hexdigest()[:16]


def describe_files(path: Path, files: Sequence[Path]) -> dict[str, Any]:
    """Returns what changes when a checkpoint does: sizes and times of its files."""
    found = {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
    return {"path": str(path.absolute()), "files": found}


class State:
    """Arrays and notes of finished parts, in a folder.

    Args:
        folder: is made if it is missing, and removed by ``remove``.
        key: what is compared and how; a folder with another key is emptied.

    Attributes:
        note: whether the folder held parts of this comparison or of another, in words; "" if none.

    Raises:
        UsageError: the folder holds other files.
        ResourceError: it cannot be written.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any]):
        self.folder = folder
        file = folder / KEY
        wanted = json.dumps(key, indent=1, sort_keys=True, default=str)
        try:
            if folder.exists() and not file.is_file() and any(folder.iterdir()):
                raise UsageError(f"--state {folder} holds other files: name a new folder")
            found = file.read_text(encoding="utf-8") if file.is_file() else None
            self.note = ""
            if found is not None and found != wanted:
                self.note = f"; {folder} held another comparison, which was removed"
                self.remove()
            elif any(folder.glob(self._file("*").name)):
                self.note = f"; resumed from {folder}"
            folder.mkdir(parents=True, exist_ok=True)
            if found != wanted:
                atomic_write_text(file, wanted)
        except OSError as error:
            raise ResourceError(f"{folder} cannot be written: {error.strerror}") from error

    def load(self, name: str) -> tuple[list[np.ndarray], Any] | None:
        """Returns the arrays and notes of a finished part; None if it is not there, or damaged."""
        file = self._file(name)
        if not file.is_file():
            return None
        try:
            tensors, metadata = read_safetensors(file)
            arrays = [tensors[str(place)].read() for place in range(len(tensors))]
            return arrays, json.loads(metadata[NOTES])
        except (CheckpointError, KeyError, ValueError):
            # A damaged part is computed again.
            return None

    def save(self, name: str, arrays: Sequence[np.ndarray], notes: Any = None) -> None:
        """Keeps the arrays and notes of a finished part."""
        tensors = {str(place): StoredTensor.of(array) for place, array in enumerate(arrays)}
        write_safetensors(self._file(name), tensors, {NOTES: json.dumps(notes)})

    def remove(self) -> None:
        """Removes the files, and the folder if nothing else is in it."""
        for file in (*self.folder.glob("*.safetensors"), self.folder / KEY):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.folder.rmdir()

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"
