"""Files that are complete and on the disk before they appear under their name.

A file or folder is written under a temporary name beside its own, synced, renamed, and the rename
is synced. A process that is killed at any moment leaves the old file, or the new one, and perhaps
a temporary one (``is_temporary``).
"""

import contextlib
import functools
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

from jaxformer.errors import ResourceError
from jaxformer.execution.cores import count_cores

# Directory entries, journal and rounding to blocks, beside the data itself.
SPARE_BYTES = 1 << 20
# Large enough that the interpreter's lock is seldom taken while a training step runs.
BUFFER_BYTES = 2 << 20
# A disk is seldom faster than what so many cores hash.
MOST_THREADS = 8

Result = TypeVar("Result")


def atomic_write(
    path: str | Path,
    size: int,
    write: Callable[[BinaryIO], None],
    check: Callable[[Path], None],
) -> str:
    """Writes a file that exists under its name only once all of it is on the disk and correct.

    It is read back from the disk before it is renamed. Whatever fails, the temporary file is
    removed, and a file that already had the name is left as it was.

    Args:
        path: the file's name.
        size: about how many bytes it will have.
        write: writes it.
        check: reads it under its temporary name, and raises if it is not what was written.

    Returns:
        The SHA-256 of what the disk holds.

    Raises:
        ResourceError: the folder is missing, the disk is full or may not be written.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ResourceError.could_not("write", path, "it is a folder; name a file in it")
        free = shutil.disk_usage(path.parent).free
        if free < size + SPARE_BYTES:
            raise ResourceError.could_not(
                "write",
                path,
                f"it needs {_mebibytes(size)} and {_mebibytes(SPARE_BYTES)} to spare, and "
                f"{_mebibytes(free)} are free there; free some space or choose another disk",
            )
        found = _write_and_rename(path, write, functools.partial(_read_back, check))
        assert found is not None
        return found
    except OSError as error:
        reason = f"{error.strerror or error}; check the folder, its permissions and the space on "
        raise ResourceError.could_not("write", path, f"{reason}its disk") from error
    except MemoryError as error:
        reason = "not enough memory for its largest array"
        raise ResourceError.could_not("write", path, reason) from error


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Writes a small file atomically, and compares what the disk gives back.

    Raises:
        ResourceError: it cannot be written, or reads back as something else.
    """

    def write(file: BinaryIO) -> None:
        file.write(data)

    def check(temporary: Path) -> None:
        if temporary.read_bytes() != data:
            raise read_back_error(path)

    atomic_write(path, len(data), write, check)


def atomic_write_text(path: Path, text: str) -> None:
    """Writes a small UTF-8 file atomically; its reader must be able to tell damage from content.

    Raises:
        OSError: it cannot be written.
    """

    def write(file: BinaryIO) -> None:
        file.write(text.encode("utf-8"))

    _write_and_rename(path, write)


def read_back_error(path: str | Path) -> ResourceError:
    """Returns the error for a disk that does not give back what was written to it."""
    return ResourceError.could_not(
        "write",
        Path(path),
        "the disk did not give back what was written to it; the file was removed, try another disk",
    )


def _write_and_rename(
    path: Path,
    write: Callable[[BinaryIO], None],
    check: Callable[[Path], str] | None = None,
) -> str | None:
    """Returns what ``check`` makes of the file under its temporary name."""
    temporary = temporary_path(path)
    found = None
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            # The check then reads what the disk holds, not what memory remembers.
            if check is not None and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if check is not None:
            found = check(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_path(path.parent)
    return found


def _read_back(check: Callable[[Path], None], temporary: Path) -> str:
    """Checks a file, and hashes it meanwhile, so that the disk is read once."""
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(sha256_of_file, temporary)
        check(temporary)
        return whole.result()


def temporary_path(path: Path) -> Path:
    """Returns the path that a file or folder has until it is complete, beside its own."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def is_temporary(path: Path) -> bool:
    """Whether the name is one that a file or folder has until it is complete."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def sync_path(path: Path) -> None:
    """Returns once a file, or a folder's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Returns once all files below a folder, and their names, are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync_path(Path(parent, name))
        sync_path(Path(parent))


def list_files(folder: Path, start: Path) -> dict[str, int]:
    """Returns the size in bytes of every file below a folder, by its path relative to ``start``.

    Anything that is neither a folder nor a regular file, such as a link, has the size -1.
    """

    def walk(place: Path) -> Iterator[os.DirEntry[str]]:
        with os.scandir(place) as inside:
            for entry in inside:
                if entry.is_dir(follow_symlinks=False):
                    yield from walk(Path(entry.path))
                else:
                    yield entry

    found = {
        Path(os.path.relpath(entry.path, start)).as_posix(): entry.stat(follow_symlinks=False)
        for entry in (walk(folder) if folder.is_dir() else ())
    }
    return {
        name: facts.st_size if stat.S_ISREG(facts.st_mode) else -1
        for name, facts in sorted(found.items())
    }


def sha256_of_file(path: Path, *, follow_links: bool = False) -> str:
    """Returns the SHA-256 of a file's content, in hexadecimal digits.

    Raises:
        OSError: it cannot be read, or it is a link and ``follow_links`` is False.
    """
    found = hashlib.sha256()
    buffer = bytearray(BUFFER_BYTES)
    view = memoryview(buffer)
    # A pipe would otherwise wait for its other end for ever.
    flags = os.O_RDONLY | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)
    with open(os.open(path, flags), "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(view[:count])
    return found.hexdigest()


def on_all_cores(function: Callable[[str], Result], names: Iterable[str]) -> dict[str, Result]:
    """Returns the result for each name, in order, of a function that hashes or waits for a disk.

    Neither needs Python meanwhile, so threads run it side by side.
    """
    names = list(names)
    with ThreadPoolExecutor(min(count_cores(), MOST_THREADS)) as pool:
        return dict(zip(names, pool.map(function, names), strict=True))


def free_bytes(folder: Path) -> int:
    """Returns how many bytes are free on the disk where a folder is, or is to be created."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    return shutil.disk_usage(place).free


def describe_space(folder: Path, need: int) -> str:
    """Says how many of the ``need`` bytes are free where a folder is, or is to be created."""
    return f"it needs {_mebibytes(need)}, and {_mebibytes(free_bytes(folder))} are free there"


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


def check_space(folder: Path, need: int) -> None:
    """Checks that what is to be written fits on the disk.

    Args:
        folder: where it is to be; it need not exist.
        need: in bytes.

    Raises:
        ResourceError: it does not fit; the message says what is needed and what is free.
    """
    if need > free_bytes(folder):
        raise ResourceError(describe_space(folder, need))
