"""Reports as JSON files."""

import dataclasses
from pathlib import Path

from jaxformer.errors import CheckpointError
from jaxformer.parity.report.report import Report
from jaxformer.storage.durable_files import atomic_write_bytes
from jaxformer.storage.local_files import LocalFile
from jaxformer.storage.strict_json import parse_json

# Far more than any report: a node has about 3 kB.
MAX_BYTES = 256 << 20


def save_json(report: Report, path: str | Path) -> None:
    """Writes a report as a JSON file, atomically.

    Attention maps are left out, because they are much larger than all else.

    Raises:
        ResourceError: the folder is missing or not writable, or the disk is full.
    """
    nodes = tuple(dataclasses.replace(node, maps=None) for node in report.nodes)
    write_text(path, dataclasses.replace(report, nodes=nodes).to_json() + "\n")


def load_report(path: str | Path) -> Report:
    """Reads a file that ``save_json`` wrote, of this version or of an older one.

    Raises:
        CheckpointError: there is no such file, or it is not a complete report.
        UnsafeFileError: it names a key twice, or holds more entries than any report.
        ResourceError: the file is not readable.
    """
    file = LocalFile(path)
    if file.size > MAX_BYTES:
        raise CheckpointError(
            f"{path} has {file.size / 2**20:.0f} MiB, more than any parity report; check the path"
        )
    values = parse_json(file.bytes(0, file.size), str(path))
    try:
        return Report.from_dict(values)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}; write it again with jaxformer verify --json"
        ) from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a text file atomically and reads it back.

    Raises:
        ResourceError: the file cannot be written, or reads back as something else.
    """
    atomic_write_bytes(path, text.encode("utf-8", "backslashreplace"))
