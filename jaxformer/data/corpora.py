"""The texts to train on, by name or by path."""

import codecs
import hashlib
import itertools
import json
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from jaxformer.data.conversations import is_conversation
from jaxformer.errors import ResourceError, Setting, TextError, UsageError
from jaxformer.hardware.memory import host_memory
from jaxformer.hardware.user_folders import user_cache

TINY_SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
TINY_SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/"
    "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/data/tinyshakespeare/input.txt"
)
NAMES = ("python-docs", "tiny-shakespeare")
# Files that hold records or are compressed.
PACKED = re.compile(r"\.(jsonl|ndjson|parquet|arrow|gz|zst)$", re.IGNORECASE)
# Memory for each byte of a file: the byte, its character, and its id in four bytes.
BYTES_PER_BYTE = 6
# By so many first lines a file of records is known, whatever its name is.
TELLING_LINES = 3


@dataclass(frozen=True)
class Corpus:
    """A text, what it is called, and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_corpus(name: str, *, encoding: str = "utf-8", download: bool = False) -> Corpus:
    """Returns the corpus of a name, or the text file at a path.

    ``python-docs`` is the text of ``pydoc_data.topics``, which every CPython has; it differs a
    little between Python versions, so its hash is kept with the model. ``tiny-shakespeare`` is
    looked for in JAXFORMER_DATA_DIR, then in the user's cache folder; it is downloaded only if
    ``download`` is true, and its hash is pinned.

    Raises:
        UsageError: there is no such name or file, or it is too large for this machine.
        TextError: the text is empty, cannot be decoded, or is not the pinned one.
        ResourceError: the download failed.
    """
    if name == "python-docs":
        return _corpus(name, _python_docs())
    if name == "tiny-shakespeare":
        text = _tiny_shakespeare(download).decode("utf-8")
        return _corpus(name, text)
    path = Path(name)
    if path.is_dir():
        raise UsageError(
            Setting("data", value=name),
            ": is a folder, not a text file, and holds no tokens: jaxformer tokenize "
            "makes such a folder of texts",
        )
    if not path.is_file():
        what = "does not exist"
        if path.exists():
            what = "is a device or a pipe, not a text file"
        raise UsageError(
            Setting("data", value=name), f": {what}; known names are {', '.join(NAMES)}"
        )
    _check_is_text(path)
    return _corpus(str(path), _read_text(path, encoding))


def _check_is_text(path: Path) -> None:
    """Rejects by its name what is no plain text."""
    if path.suffix == ".bin":
        raise TextError(
            f"{path} is no text: if it holds the ids of tokens, give its folder, ",
            Setting("data", value=str(path.parent)),
        )
    if PACKED.search(path.name):
        raise TextError(
            f"{path} is no plain text: make a folder of tokens of it, with jaxformer tokenize "
            f"{path} --tokenizer T --out FOLDER, and give ",
            Setting("data", value="FOLDER"),
        )


def _corpus(name: str, text: str) -> Corpus:
    if not text:
        raise TextError(f"{name} is empty: give a text file with something in it")
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise TextError(
            f"{name} holds half a character, U+{ord(text[error.start]):04X}, at position "
            f"{error.start}: give its ",
            Setting("encoding"),
        ) from None
    return Corpus(name, text, hashlib.sha256(data).hexdigest())


def _python_docs() -> str:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UsageError(
            "this Python was packaged without pydoc_data, the text of python-docs: give ",
            Setting("data", value="FILE"),
        ) from None
    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _read_text(path: Path, encoding: str) -> str:
    try:
        # A byte order mark is a sign of the encoding, not a character to learn.
        utf_8 = codecs.lookup(encoding).name == "utf-8"
        if path.stat().st_size * BYTES_PER_BYTE > host_memory():
            raise UsageError(
                Setting("data", value=str(path)),
                f": {path.stat().st_size / 2**30:,.1f} GiB of text need "
                f"{BYTES_PER_BYTE} times as much memory, and there are "
                f"{host_memory() / 2**30:,.1f} GiB: give a part of it",
            )
        data = path.read_bytes()
        text = data.decode("utf-8-sig" if utf_8 else encoding)
    except OSError as error:
        raise ResourceError(f"cannot read {path}: {error.strerror}") from error
    except LookupError:
        raise UsageError(
            Setting("encoding", value=encoding), ": Python knows no such encoding"
        ) from None
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not {encoding}: byte 0x{data[error.start]:02x} at offset {error.start}; "
            "give its ",
            Setting("encoding"),
            ", such as latin-1",
        ) from None
    except UnicodeError as error:
        raise TextError(
            f"{path} is not {encoding} ({error}): give its ", Setting("encoding")
        ) from None
    if _holds_records(text):
        raise TextError(
            f"{path} holds records of JSON, not a plain text: give it a name that ends in .jsonl, "
            "make a folder of tokens of it, with jaxformer tokenize FILE.jsonl --tokenizer T --out "
            "FOLDER, and give ",
            Setting("data", value="FOLDER"),
        )
    if "\0" in text:
        raise TextError(
            f"{path} has a NUL at position {text.index(chr(0))} and is no text: if it holds ids of "
            "tokens, give its folder, ",
            Setting("data", value=str(path.parent)),
            *(("; give a text's ", Setting("encoding")) if utf_8 else ()),
        )
    return text.replace("\r\n", "\n")


def _holds_records(text: str) -> bool:
    """Whether the first lines are objects of JSON with a text, or with a prompt and an answer."""
    if not text.startswith("{"):
        return False
    # Lines are not split off a whole text, of which there may be gigabytes.
    lines = (match[0] for match in re.finditer(r".+", text))
    try:
        records = [json.loads(line) for line in itertools.islice(lines, TELLING_LINES)]
    # Braces may be nested deeper than Python goes.
    except (ValueError, RecursionError):
        return False
    return all(isinstance(r, dict) and ("text" in r or is_conversation(r)) for r in records)


def _tiny_shakespeare(download: bool) -> bytes:
    cache = user_cache()
    folders = [Path(os.environ["JAXFORMER_DATA_DIR"])] if "JAXFORMER_DATA_DIR" in os.environ else []
    for folder in (*folders, cache):
        path = folder / "tiny-shakespeare.txt"
        if path.is_file():
            return _pinned(path.read_bytes(), str(path))
    if not download:
        raise UsageError(
            "tiny-shakespeare is not on this machine: put tiny-shakespeare.txt into the folder "
            "that JAXFORMER_DATA_DIR names, or fetch it (1.1 MB) with ",
            Setting("download"),
        )
    try:
        with urllib.request.urlopen(TINY_SHAKESPEARE_URL, timeout=60) as response:
            data = response.read(2_000_000)
    except OSError as error:
        raise ResourceError(f"could not fetch {TINY_SHAKESPEARE_URL}: {error}") from error
    data = _pinned(data, TINY_SHAKESPEARE_URL)
    cache.mkdir(parents=True, exist_ok=True)
    temporary = cache / f"tiny-shakespeare.txt.{os.getpid()}"
    temporary.write_bytes(data)
    temporary.replace(cache / "tiny-shakespeare.txt")
    return data


def _pinned(data: bytes, where: str) -> bytes:
    digest = hashlib.sha256(data).hexdigest()
    if digest != TINY_SHAKESPEARE_SHA256:
        raise TextError(
            f"{where} is not the tiny-shakespeare that jaxformer knows: its SHA-256 is "
            f"{digest[:16]}…, not {TINY_SHAKESPEARE_SHA256[:16]}…"
        )
    return data
