"""Fetches one file over the network, if the user wants it and its SHA-256 is known."""

import contextlib
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxformer.errors import CheckpointError
from jaxformer.storage.downloads import copy_response, open_address


def is_address(source: str) -> bool:
    """Whether a source is a network address and not a path."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]*://", source) is not None


@contextlib.contextmanager
def fetch_file(
    address: str, sha256: str, folder: Path, progress: Callable[[int], None]
) -> Iterator[Path]:
    """Fetches a file into a temporary folder, which is removed afterwards.

    Args:
        address: https; plain http only of this machine.
        sha256: of the file.
        folder: in which the temporary folder is created.
        progress: called after every piece with its size in bytes.

    Raises:
        UsageError: the address is neither https nor of this machine.
        CheckpointError: the file has another SHA-256.
        ResourceError: it could not be fetched.
    """
    place = tempfile.TemporaryDirectory(prefix=".download.", dir=folder)
    with place as kept, open_address(address) as response:
        path = Path(kept) / "checkpoint"
        digest = hashlib.sha256()

        def note(piece: bytes) -> None:
            digest.update(piece)
            progress(len(piece))

        with path.open("wb") as file:
            copy_response(response, file, folder, note)
        if digest.hexdigest() != sha256.lower():
            raise CheckpointError(
                f"{address} is not the file that was meant: its SHA-256 is "
                f"{digest.hexdigest()}, not {sha256.lower()}"
            )
        yield path
