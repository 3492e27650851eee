"""Files that are on the disk for good, and what they hold."""

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from jaxformer.errors import ResourceError

# Large enough that the interpreter's lock is seldom taken while a step is made.
BUFFER = 2 << 20


def write_durably(path: Path, text: str) -> None:
    """Writes a file under a temporary name, syncs it to the disk and renames it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Returns once a file or a folder's list of names is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Returns once all files below a folder, and their names, are on the disk."""
    for parent, _, names in os.walk(folder):
        for name in names:
            sync(Path(parent, name))
        sync(Path(parent))


def is_temporary(path: Path) -> bool:
    """Whether the name is one that is taken until a file or folder is whole."""
    return path.name.startswith(".") and path.name.endswith(".tmp")


def entries(folder: Path, start: Path) -> dict[str, int]:
    """The size of all that is below a folder and is none itself, by its path from ``start``.

    What is no file of its own, such as a link, has the size -1.
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


def digest(path: Path) -> str:
    """The SHA-256 of a file; a link is none."""
    found = hashlib.sha256()
    buffer = bytearray(BUFFER)
    view = memoryview(buffer)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            found.update(view[:count])
    return found.hexdigest()


def space(folder: Path, need: int) -> tuple[int, str]:
    """How many bytes are free where a folder is or is to be; and that beside the need, in words."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    return free, f"it needs {need / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free there"


def check_space(folder: Path, need: int) -> None:
    """Checks that what is to be written fits on the disk.

    Args:
        folder: where it is to be; it need not exist.
        need: in bytes.

    Raises:
        ResourceError: it does not; the message says what is needed and what is free.
    """
    free, words = space(folder, need)
    if need > free:
        raise ResourceError(words)
