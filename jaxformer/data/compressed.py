"""Files that may be compressed, with gzip or zstandard, as streams of bytes."""

import gzip
import importlib
import importlib.util
import io
from pathlib import Path
from typing import Any, BinaryIO

from jaxformer.errors import UsageError

BLOCK_BYTES = 1 << 20
COMPRESSED_BYTES = 1 << 14


def open_file(path: Path) -> tuple[BinaryIO, BinaryIO]:
    """Returns a file as it is read, which may be compressed, and as it is on the disk."""
    raw = path.open("rb")
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=raw), raw  # type: ignore[return-value]
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(raw, import_package("zstandard", path))), raw
    return raw, raw


class _ZstdReader(io.RawIOBase):
    """Reads frames of zstandard; other readers of it take the end of a cut file for its end."""

    def __init__(self, raw: BinaryIO, zstandard: Any):
        self._raw, self._zstandard = raw, zstandard
        self._frame: Any = None
        self._data = self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._data:
            rest = self._rest or self._raw.read(COMPRESSED_BYTES)
            if not rest:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            self._data = self._frame.decompress(rest)
            self._rest = self._frame.unused_data if self._frame.eof else b""
        count = min(len(buffer), len(self._data))
        buffer[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def count_bytes(path: Path) -> int:
    """Returns how many bytes a file has once it is no longer compressed."""
    file, raw = open_file(path)
    with raw, file:
        if file is raw:
            return path.stat().st_size
        return sum(len(block) for block in iter(lambda: file.read(BLOCK_BYTES), b""))


def skip_bytes(file: BinaryIO, count: int) -> None:
    """Reads so many bytes, and leaves them."""
    while count > 0 and (data := file.read(min(count, BLOCK_BYTES))):
        count -= len(data)


def import_package(name: str, path: Path) -> Any:
    """Returns a package that a file needs.

    Raises:
        UsageError: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise UsageError(f"{path} needs the package {name}: pip install 'jaxformer[data]'")
    return importlib.import_module(name)
