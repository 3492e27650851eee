"""Files that are read by position and may not change meanwhile."""

import os
import stat
from pathlib import Path

import numpy as np

from jaxformer.errors import CheckpointError, ResourceError


def safe_repr(value: object) -> str:
    """Returns a value found in a file as text for a one-line message: printable and short."""
    text = ascii(value)
    return text if len(text) <= 120 else f"{text[:100]}...{text[-10:]}"


class LocalFile:
    """A regular file that is read by position, with plain reads, and may not change meanwhile.

    It is not mapped into memory: mapped pages count as the process's own memory, and the process
    ends with SIGBUS if the file is cut short while it is open.

    Args:
        path: the file.

    Raises:
        CheckpointError: there is no such file, or it is a folder or a device.
        ResourceError: its permissions do not allow it.
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
        """Returns ``count`` bytes from ``offset`` on, as a uint8 array that the caller owns.

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
        """Returns ``count`` bytes from ``offset`` on; raises what ``array`` raises."""
        return self.array(offset, count).tobytes()

    def _unreadable(self, error: Exception) -> ResourceError:
        reason = getattr(error, "strerror", None) or error
        return ResourceError(
            f"{self.path} cannot be read: {reason}; check the path and its permissions"
        )

    @staticmethod
    def _identity(state: os.stat_result) -> tuple[int, ...]:
        return state.st_mode, state.st_size, state.st_ino, state.st_dev, state.st_mtime_ns
