"""Files read by position, and files that take their name only once they are whole."""

import contextlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError

# Directory entries, journal and rounding to blocks, beside the data itself.
SPARE_BYTES = 1 << 20


def safe_repr(value: object) -> str:
    """Something found in a file, fit for a one-line message: printable, quoted and short."""
    text = ascii(value)
    return text if len(text) <= 120 else f"{text[:100]}...{text[-10:]}"


class LocalFile:
    """A regular file that is read by position, with plain reads, and must not change meanwhile.

    Plain reads, as pages of a mapped file count as the process's own memory and end it with
    SIGBUS where the file is cut short while it is open.

    Args:
        path: the file.

    Raises:
        CheckpointError: there is no such file, or it is a folder or a device.
        ResourceError: it may not be looked at.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._state = self._identity(os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"{self.path} does not exist; check the path") from None
        except (OSError, ValueError) as error:
            raise self._unreadable(error) from error
        if not stat.S_ISREG(self._state[0]):
            raise CheckpointError(f"{self.path} is not a regular file; name the file itself")
        self.size = self._state[1]

    def array(self, offset: int, count: int) -> np.ndarray:
        """``count`` bytes from ``offset`` on, as a uint8 array that the caller owns.

        Raises:
            CheckpointError: the file has changed since it was opened.
            ResourceError: it cannot be read, or there is not enough memory.
        """
        try:
            # Opening a pipe would wait for its other end for ever, so a changed file is not opened.
            if self._identity(os.stat(self.path)) != self._state:
                raise CheckpointError(f"{self.path} changed while it was being read; try again")
            with self.path.open("rb", buffering=0) as file:
                if self._identity(os.fstat(file.fileno())) != self._state:
                    raise CheckpointError(f"{self.path} changed while it was being read; try again")
                data = np.fromfile(file, np.uint8, count, offset=offset)
        except OSError as error:
            raise self._unreadable(error) from error
        except MemoryError as error:
            raise ResourceError(
                f"{self.path}: not enough memory for an array of {count / 2**20:.1f} MiB; "
                "free some and try again"
            ) from error
        if data.size != count:
            raise CheckpointError(f"{self.path} ended early: fetch the file again")
        return data

    def bytes(self, offset: int, count: int) -> bytes:
        """The same, as bytes."""
        return self.array(offset, count).tobytes()

    def _unreadable(self, error: Exception) -> ResourceError:
        reason = getattr(error, "strerror", None) or error
        return ResourceError(
            f"{self.path} cannot be read: {reason}; check the path and its permissions"
        )

    @staticmethod
    def _identity(state: os.stat_result) -> tuple[int, ...]:
        return state.st_mode, state.st_size, state.st_ino, state.st_dev, state.st_mtime_ns


def atomic_write(
    path: str | Path,
    size: int,
    write: Callable[[BinaryIO], None],
    check: Callable[[Path], None],
) -> None:
    """Writes a file that exists under its name only once all of it is on the disk and correct.

    It is written under a temporary name in the same folder, synced, read back from the disk,
    renamed, and the folder synced. Whatever fails, the temporary is removed and a file that
    already had the name is left as it was.

    Args:
        path: the file's name.
        size: about how many bytes it will have.
        write: writes it.
        check: reads it under its temporary name and raises if it is not what was written.

    Raises:
        ResourceError: the folder is missing, the disk is full or may not be written.
    """
    path = Path(path)
    folder = path.parent
    try:
        if path.is_dir():
            raise ResourceError(f"{path} is a folder; name a file in it")
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        free = shutil.disk_usage(folder).free
        if free < size + SPARE_BYTES:
            raise ResourceError(
                f"{path} needs {(size + SPARE_BYTES) / 2**20:.1f} MiB and {free / 2**20:.1f} MiB "
                f"are free in {folder}; free some space or choose another disk"
            )
        try:
            with temporary.open("wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
                # The check then reads what the disk holds, not what memory remembers.
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            check(temporary)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(folder)
    except OSError as error:
        raise ResourceError(
            f"could not write {path}: {error.strerror or error}; check the folder, its permissions "
            "and the space on its disk"
        ) from error
    except MemoryError as error:
        raise ResourceError(
            f"could not write {path}: not enough memory for its largest array"
        ) from error


def sync_folder(folder: Path) -> None:
    """Makes a rename in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def differs(path: Path) -> ResourceError:
    """The error for a disk that does not give back what was written to it."""
    return ResourceError(
        f"{path.parent}: the disk did not give back what was written to it; "
        "the file was removed, try another disk"
    )
