"""Answers of other machines: https alone, and no other way after a redirect."""

import contextlib
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import BinaryIO

from jaxformer.errors import ResourceError, UsageError
from jaxformer.storage.durable_files import SPARE_BYTES, free_bytes

CHUNK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60


@contextlib.contextmanager
def open_address(address: str) -> Iterator[HTTPResponse]:
    """Opens what an address gives.

    Args:
        address: https; plain http only of this machine.

    Raises:
        UsageError: the address is neither https nor of this machine.
        ResourceError: it could not be fetched, from the first byte to the last.
    """
    _check(address)
    opener = urllib.request.build_opener(_OnlySafeRedirects)
    try:
        with opener.open(address, timeout=TIMEOUT_SECONDS) as response:
            yield response
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise ResourceError(f"could not fetch {address}: {error}") from error


def copy_response(
    response: HTTPResponse, file: BinaryIO, folder: Path, note: Callable[[bytes], None]
) -> None:
    """Writes all of an answer to a file.

    Args:
        response: what ``open_address`` gave.
        file: open for writing.
        folder: in which it lies.
        note: called with each piece.

    Raises:
        ResourceError: the disk is full.
    """
    while piece := response.read(CHUNK_BYTES):
        if free_bytes(folder) < len(piece) + SPARE_BYTES:
            raise ResourceError(f"{folder} has no room for {response.url}: free some space")
        file.write(piece)
        note(piece)


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
