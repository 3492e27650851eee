"""Datasets of the Hugging Face hub: fetched at one commit, if the user wants it.

A name is ``OWNER/NAME@COMMIT``, perhaps with the path of a file or folder in it, or a pattern of
paths. The hub lists the files of the commit with their hashes; each is compared with its own, and
stays in the user's cache, so that the same command needs no network again.
"""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import os
import re
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePosixPath

from jaxformer.data.sources import READABLE
from jaxformer.errors import ResourceError, Setting, TextError, UsageError
from jaxformer.hardware.user_folders import user_cache
from jaxformer.storage.downloads import copy_response, open_address
from jaxformer.storage.durable_files import atomic_write_text, check_space, temporary_path

NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{40})(/(?P<inside>.+))?")
MOST_LISTED = 256 << 20
LISTING = ".listing.json"
MOST_NAMES = 8


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a dataset.

    Attributes:
        path: in the dataset.
        size: in bytes.
        sha256: of it; None for one that Git holds itself.
        blob: its name in Git, the SHA-1 of its size and bytes.
    """

    path: str
    size: int
    sha256: str | None
    blob: str


def fetch_sources(
    names: Sequence[Path],
    begin: Callable[[int, list[str]], None] = lambda size, left_out: None,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[Path, ...]:
    """Returns sources, with the files of datasets in place of their names.

    Args:
        names: files and folders that are here, and datasets.
        begin: called for each dataset with the bytes to fetch, and the files that are no texts.
        advance: called with the bytes that were fetched since the last call.

    Raises:
        UsageError: a name is not exact, or says nothing that is there.
        TextError: a file is not the one that the hub has listed.
        ResourceError: the hub could not be reached, or the disk is full.
    """
    found: list[Path] = []
    for name in names:
        if name.exists():
            found.append(name)
        else:
            found += _fetch_dataset(name, begin, advance)
    return tuple(found)


def _fetch_dataset(
    name: Path, begin: Callable[[int, list[str]], None], advance: Callable[[int], None]
) -> list[Path]:
    matched = NAME.fullmatch(str(name))
    if matched is None:
        raise UsageError(
            f"{name} is not here, and ",
            Setting("download"),
            " wants a dataset with its commit, "
            "OWNER/NAME@COMMIT, 40 hexadecimal digits: nothing unknown is fetched",
        )
    repository, commit = matched["repository"], matched["commit"]
    folder = user_cache() / "datasets" / repository.replace("/", "--") / commit
    listed = _list_files(f"{repository}/tree/{commit}", folder)
    chosen = _choose(listed, matched["inside"], str(name))
    missing = [file for file in chosen if not _is_here(folder, file)]
    size = sum(file.size for file in missing)
    begin(size, sorted({file.path for file in listed} - {file.path for file in chosen}))
    check_space(folder, size)
    for file in missing:
        place = f"{repository}/resolve/{commit}/{urllib.parse.quote(file.path)}"
        _fetch(f"{_hub()}/datasets/{place}", folder, file, advance)
    return [folder / file.path for file in chosen]


def _is_here(folder: Path, file: HubFile) -> bool:
    # It has its name only once its hash was compared.
    path = folder / file.path
    return path.is_file() and path.stat().st_size == file.size


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _list_files(place: str, folder: Path) -> list[HubFile]:
    """Returns all files of a commit, as the hub lists them."""
    kept = folder / LISTING
    if kept.is_file():
        with contextlib.suppress(ValueError, TypeError):
            return [HubFile(**file) for file in json.loads(kept.read_bytes())]
    files: list[HubFile] = []
    address: str | None = f"{_hub()}/api/datasets/{place}?recursive=true"
    while address is not None:
        with open_address(address) as response:
            files += _parse(response.read(MOST_LISTED), address)
            following = re.search(r'<([^>]+)>;\s*rel="next"', response.headers.get("Link", ""))
        address = urllib.parse.urljoin(address, following[1]) if following else None
    files.sort(key=lambda file: file.path)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_text(kept, json.dumps([dataclasses.asdict(file) for file in files]))
    return files


def _parse(data: bytes, where: str) -> list[HubFile]:
    files = []
    try:
        for entry in json.loads(data):
            if entry["type"] == "file":
                sha256 = entry["lfs"]["oid"] if entry.get("lfs") else None
                path = PurePosixPath(entry["path"])
                files.append(HubFile(str(path), int(entry["size"]), sha256, entry["oid"]))
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise TextError(f"{where} gives no list of files") from error
    for file in files:
        if ".." in file.path.split("/") or file.path.startswith("/") or "\\" in file.path:
            raise TextError(f"{where} lists {file.path!r}, which is no path in a dataset")
    return files


def _choose(files: list[HubFile], inside: str | None, name: str) -> list[HubFile]:
    """Returns the files that a name says, of which the texts are taken."""
    wanted = files
    if inside is not None:
        wanted = [
            file
            for file in files
            if file.path == inside
            or file.path.startswith(f"{inside}/")
            or fnmatch.fnmatchcase(file.path, inside)
        ]
    found = [file for file in wanted if READABLE.search(file.path) or file.path == inside]
    if not found:
        raise UsageError(f"{name} has no text, JSONL or Parquet: {_shorten(f.path for f in files)}")
    # Files of one split differ in their numbers alone.
    kinds = list(dict.fromkeys(re.sub(r"\d+", "*", file.path) for file in found))
    if inside is None and len(kinds) > 1:
        raise UsageError(
            f"{name} has several splits or settings: name one, such as {name}/{kinds[0]}, of "
            f"{_shorten(kinds)}"
        )
    return found


def _fetch(address: str, folder: Path, file: HubFile, advance: Callable[[int], None]) -> None:
    """Fetches a file, which gets its name once its hash is that of the list."""
    path = folder / file.path
    digest = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    expected = file.blob
    if file.sha256 is not None:
        digest, expected = hashlib.sha256(), file.sha256

    def note(piece: bytes) -> None:
        digest.update(piece)
        advance(len(piece))

    temporary = temporary_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open_address(address) as response, temporary.open("wb") as data:
            copy_response(response, data, path.parent, note)
            os.fsync(data.fileno())
        if digest.hexdigest() != expected:
            raise TextError(
                f"{address} is not the file that the hub has listed: its hash is "
                f"{digest.hexdigest()}, not {expected}"
            )
        temporary.replace(path)
    except OSError as error:
        raise ResourceError(f"cannot write to {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _shorten(names: Iterable[str]) -> str:
    found = list(names)
    return ", ".join(found[:MOST_NAMES]) + (", …" if len(found) > MOST_NAMES else "")
