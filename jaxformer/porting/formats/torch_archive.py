"""The zip archive of a PyTorch checkpoint: the place of each entry, checked before it is read.

The standard library's zipfile builds objects for as many entries as a file claims, lets entries
overlap, and unpacks compressed ones; PyTorch writes no such archive.
"""

import struct
import zlib
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.storage.local_files import LocalFile, safe_repr

# More than twice the tensors that MAX_OBJECTS of the pickle leaves room for.
MAX_ENTRIES = 250_000
MAX_DIRECTORY_BYTES = 64 << 20
# A tensor takes some 250 bytes of the pickle.
MAX_PICKLE_BYTES = 32 << 20
CHUNK_BYTES = 1 << 20
END, END_64, LOCATOR_64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
IN_EXTRA = 0xFFFFFFFF


class Entry(NamedTuple):
    """An entry of the archive.

    Attributes:
        name: decoded.
        raw_name: as the directory has it.
        header: the place of its local header, in bytes from the start of the file.
        size: of its data, in bytes.
        crc: its checksum, or 0 where there is none.
        end: the place of what follows it.
    """

    name: str
    raw_name: bytes
    header: int
    size: int
    crc: int
    end: int


class TorchArchive:
    """The entries of a checkpoint as ``torch.save`` writes it since PyTorch 1.6.

    Args:
        file: the archive.

    Raises:
        CheckpointError: it is cut short or damaged, big-endian, or not a checkpoint.
        UnsafeFileError: its entries are compressed, overlap, have the same name or a path outside
            the archive, or it is a TorchScript program.
    """

    def __init__(self, file: LocalFile):
        self.file = file
        self.path = file.path
        self._verified: set[str] = set()
        self.entries = self._read_directory()
        names = [n for n in self.entries if n.count("/") == 1 and n.endswith("/data.pkl")]
        if len(names) != 1:
            raise CheckpointError(
                f"{self.path} is not a PyTorch checkpoint: it holds {len(names)} data.pkl where "
                "there must be one; name a file made by torch.save"
            )
        self.root = names[0].removesuffix("data.pkl")
        if any(
            n.startswith((f"{self.root}code/", f"{self.root}constants.pkl")) for n in self.entries
        ):
            raise UnsafeFileError(
                f"{self.path} is a TorchScript program, which is never run; load it where it was "
                "made, if you trust it, and save its state_dict alone"
            )
        order = self.entries.get(f"{self.root}byteorder")
        if order is not None and self.small(order, 16) != b"little":
            raise CheckpointError(
                f"{self.path} was saved on a big-endian machine, which is unsupported; "
                "load it with PyTorch and save it again on a common one"
            )

    def pickle(self) -> bytes:
        """Returns the pickle that describes the tensors."""
        return self.small(self.entries[f"{self.root}data.pkl"], MAX_PICKLE_BYTES)

    def storage(self, key: str) -> Entry:
        """Returns the entry with the data of a storage."""
        entry = self.entries.get(f"{self.root}data/{key}")
        if entry is None:
            raise self.incomplete(f"the data of storage {safe_repr(key)} is missing")
        return entry

    def small(self, entry: Entry, limit: int) -> bytes:
        """Reads an entry that may have at most ``limit`` bytes."""
        if entry.size > limit:
            raise UnsafeFileError(
                f"{self.path}: {safe_repr(entry.name)} has {entry.size} bytes, where a checkpoint "
                f"has at most {limit}; do not use this file"
            )
        return self.read(entry, 0, entry.size).tobytes()

    def read(self, entry: Entry, offset: int, count: int) -> np.ndarray:
        """Reads ``count`` bytes of an entry as uint8; its checksum is compared the first time."""
        start = self._start(entry)
        if (offset, count) == (0, entry.size):
            data = self.file.array(start, count)
            self._compare(entry, zlib.crc32(data.data))
            return data
        if entry.name not in self._verified:
            crc = 0
            for place in range(0, entry.size, CHUNK_BYTES):
                chunk = self.file.array(start + place, min(CHUNK_BYTES, entry.size - place))
                crc = zlib.crc32(chunk.data, crc)
            self._compare(entry, crc)
        return self.file.array(start + offset, count)

    def incomplete(self, why: str) -> CheckpointError:
        """Returns the error for an archive that is cut short or damaged."""
        return CheckpointError(f"{self.path} is not a complete PyTorch file: {why}; fetch it again")

    def _compare(self, entry: Entry, crc: int) -> None:
        # torch.serialization.set_crc32_options(False) leaves zeros.
        if entry.crc and crc != entry.crc:
            raise CheckpointError(
                f"{self.path} is damaged: {safe_repr(entry.name)} does not have its checksum; "
                "fetch it again"
            )
        self._verified.add(entry.name)

    def _start(self, entry: Entry) -> int:
        """Returns where an entry's data begins; its local header must agree with the directory."""
        header = self.file.bytes(entry.header, 30 + len(entry.raw_name))
        signature, flags, method = struct.unpack_from("<4s2xHH", header)
        name_size, extra_size = struct.unpack_from("<HH", header, 26)
        start = entry.header + 30 + name_size + extra_size
        if (signature, method, header[30:]) != (b"PK\x03\x04", 0, entry.raw_name) or flags & 1:
            raise UnsafeFileError(
                f"{self.path}: {safe_repr(entry.name)} is one thing in the archive's directory and "
                "another in its place; do not use this file"
            )
        if start + entry.size > entry.end:
            raise self.incomplete(f"{safe_repr(entry.name)} does not end where it must")
        return start

    def _read_directory(self) -> dict[str, Entry]:
        count, size, start = self._find_directory()
        if count > MAX_ENTRIES or size > MAX_DIRECTORY_BYTES:
            raise UnsafeFileError(
                f"{self.path} claims {count} entries, where a checkpoint has at most "
                f"{MAX_ENTRIES}; do not use this file"
            )
        directory = self.file.bytes(start, size)
        entries = []
        at = 0
        for _ in range(count):
            try:
                entry, at = self._read_entry(directory, at)
            except (struct.error, UnicodeDecodeError):
                raise self.incomplete("its directory is damaged") from None
            entries.append(entry)
        if at != size:
            raise self.incomplete("its directory is longer than its entries")
        entries.sort(key=lambda entry: entry.header)
        result: dict[str, Entry] = {}
        for entry, end in zip(entries, [*(e.header for e in entries[1:]), start], strict=True):
            if entry.header + 30 + len(entry.raw_name) + entry.size > end:
                raise UnsafeFileError(
                    f"{self.path}: {safe_repr(entry.name)} overlaps what follows it; "
                    "do not use this file"
                )
            if entry.name in result:
                raise UnsafeFileError(
                    f"{self.path} holds {safe_repr(entry.name)} twice; do not use this file"
                )
            result[entry.name] = entry._replace(end=end)
        return result

    def _find_directory(self) -> tuple[int, int, int]:
        """Returns the number of entries, and size and place of the directory."""
        tail_start = max(0, self.file.size - 22 - 20 - 65535)
        tail = self.file.bytes(tail_start, self.file.size - tail_start)
        place = tail.rfind(END)
        if place < 0 or place + 22 > len(tail):
            raise self.incomplete("the directory at its end is missing")
        count, size, start, comment = struct.unpack_from("<10xHLLH", tail, place)
        if place + 22 + comment != len(tail):
            raise self.incomplete("something follows its directory")
        end = tail_start + place
        if place >= 20 and tail[place - 20 : place - 16] == LOCATOR_64:
            (end,) = struct.unpack_from("<8xQ", tail, place - 20)
            if end + 56 > self.file.size:
                raise self.incomplete("its directory is damaged")
            record = self.file.bytes(end, 56)
            if record[:4] != END_64:
                raise self.incomplete("its directory is damaged")
            count, size, start = struct.unpack_from("<32xQQQ", record)
        if start + size != end:
            raise self.incomplete("its directory is not where it must be")
        return count, size, start

    def _read_entry(self, directory: bytes, at: int) -> tuple[Entry, int]:
        (
            signature,
            flags,
            method,
            crc,
            packed,
            size,
            name_size,
            extra_size,
            comment_size,
            header,
        ) = struct.unpack_from("<4s4xHH4xLLLHHH8xL", directory, at)
        after_name = at + 46 + name_size
        after = after_name + extra_size + comment_size
        if signature != b"PK\x01\x02" or after > len(directory):
            raise self.incomplete("its directory is damaged")
        raw_name = directory[at + 46 : after_name]
        name = raw_name.decode("utf-8")
        extra = directory[after_name : after_name + extra_size]
        size, packed, header = _wide(extra, [size, packed, header])
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or "\\" in name or name.startswith("/") or "\0" in name:
            raise UnsafeFileError(
                f"{self.path} holds an entry called {safe_repr(name)}, which leads elsewhere; "
                "do not use this file"
            )
        if method or flags & 1 or packed != size:
            # What is stored takes as much room in the file as in memory: it cannot be a bomb.
            raise UnsafeFileError(
                f"{self.path}: {safe_repr(name)} is compressed or encrypted, as PyTorch never "
                "does; do not use this file"
            )
        return Entry(name, raw_name, header, size, crc, 0), after


def _wide(extra: bytes, fields: list[int]) -> list[int]:
    """Replaces sizes and places beyond 4 GiB, which are in the entry's extra field."""
    if IN_EXTRA not in fields:
        return fields
    at = 0
    while at + 4 <= len(extra):
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{fields.count(IN_EXTRA)}Q", extra, at + 4))
            return [next(wide) if field == IN_EXTRA else field for field in fields]
        at += 4 + size
    return fields
