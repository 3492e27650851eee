"""Fetches one file over the network, if the user wants it and its SHA-256 is known."""

import contextlib
import hashlib
import re
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxformer.errors import CheckpointError, ResourceError, UsageError
from jaxformer.storage.durable_files import SPARE_BYTES, free_bytes

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60


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
    _check(address)
    opener = urllib.request.build_opener(_OnlySafeRedirects)
    try:
        place = tempfile.TemporaryDirectory(prefix=".download.", dir=folder)
        with place as kept, opener.open(address, timeout=TIMEOUT_SECONDS) as response:
            path = Path(kept) / "checkpoint"
            digest = hashlib.sha256()
            with path.open("wb") as file:
                while piece := response.read(CHUNK_BYTES):
                    if free_bytes(Path(kept)) < len(piece) + SPARE_BYTES:
                        raise ResourceError(f"{folder} has no room for {address}: free some space")
                    file.write(piece)
                    digest.update(piece)
                    progress(len(piece))
            if digest.hexdigest() != sha256.lower():
                raise CheckpointError(
                    f"{address} is not the file that was meant: its SHA-256 is "
                    f"{digest.hexdigest()}, not {sha256.lower()}"
                )
            yield path
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise ResourceError(f"could not fetch {address}: {error}") from error


class _OnlySafeRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req, fp, code, msg, headers, newurl):  # type: ignore[no-untyped-def]
        _check(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check(address: str) -> None:
    parts = urllib.parse.urlsplit(address)
    here = parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    if parts.scheme != "https" and not here:
        raise UsageError(
            f"{address} is not fetched: give the https address of one file, such as "
            "https://HOST/…/model.safetensors"
        )
