"""A folder of tokens from its settings: begun, gone on with, and checked."""

import contextlib
import dataclasses
import fcntl
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxformer.data import encoders
from jaxformer.data.chat import ChatTemplate, find_template
from jaxformer.data.encoders import EncoderSpec
from jaxformer.data.shards import PROGRESS, read_progress, write_progress
from jaxformer.data.sources import Source, find_sources
from jaxformer.data.token_folders import TOKENIZER, check_hashes, find_tokenizer
from jaxformer.data.tokenization import Tokenization, tokenize
from jaxformer.errors import DirectoryInUseError, ResourceError, TextError, UsageError
from jaxformer.storage.durable_files import atomic_write_text, is_temporary
from jaxformer.token_data import INDEX, TokenFolder

ENCODER = ".encoder.json"
IDS_AT_ONCE = 1 << 20


@dataclasses.dataclass(frozen=True)
class TokenSettings:
    """The settings of a folder of tokens.

    Attributes:
        sources: files and folders of texts.
        out: the folder to make.
        tokenizer: a ``tokenizer.json``, a folder that has one, ``chars`` or ``bytes``.
        train_bpe: in its place, the size of a tokenizer to train on the texts.
        val: files and folders to validate with.
        val_fraction: the share of the sources to validate with, if there is no ``val``.
        field: of records.
        end_of_text: the token after every document, or ``none``.
        model_end: the id of that token by the settings of a model that has the tokenizer, for one
            that names none itself.
        shard_tokens: ids of a shard.
        workers: processes.
    """

    sources: tuple[Path, ...]
    out: Path
    tokenizer: str | None = None
    train_bpe: int | None = None
    val: tuple[Path, ...] = ()
    val_fraction: float = 0.0005
    field: str = "text"
    end_of_text: str | None = None
    model_end: int | None = None
    shard_tokens: int = 1 << 26
    workers: int = 1


def make_folder(
    settings: TokenSettings, report: Callable[[int, int, int], None] = lambda *numbers: None
) -> dict[str, Any]:
    """Makes a folder of tokens, or the rest of one that was begun; returns its index.

    Args:
        settings: of the folder.
        report: called with the bytes of the sources, those read since the last call, and all
            tokens so far.

    Raises:
        JaxformerError: it cannot be made; what is done stays, and the same call goes on from there.
    """
    if (settings.tokenizer is None) == (settings.train_bpe is None):
        raise UsageError("one of --tokenizer and --train-bpe says what makes tokens of the texts")
    fraction = 0.0 if settings.val else settings.val_fraction
    files = _files_beside(settings.tokenizer)
    sources = [
        (_with_template(s, files), None)
        for s in find_sources(settings.sources, settings.field, fraction)
    ]
    found = find_sources(settings.val, settings.field, 0.0) if settings.val else []
    validation = [_with_template(source, files) for source in found]
    pairs: list[tuple[Source, str | None]] = [*sources, *((s, "val") for s in validation)]
    total = sum(source.size() for source, _ in pairs)
    stored = _as_json(settings, pairs)
    _check_free(settings.out)
    with _locked(settings.out):
        for path in _leftovers(settings.out):
            path.unlink()
        if (settings.out / INDEX).exists():
            # All is made; the command was killed before it had removed what it needed for that.
            if (read_progress(settings.out) or {}).get("settings") != stored:
                raise _holds_tokens(settings.out)
            index: dict[str, Any] = json.loads((settings.out / INDEX).read_bytes())
        else:
            _forget_vain_beginning(settings.out, stored)
            spec = _begin(settings, stored, [source for source, _ in sources], pairs)
            what = Tokenization(
                pairs, spec, settings.out, settings.shard_tokens, settings.workers, stored
            )
            index = tokenize(what, lambda done, tokens: report(total, done, tokens))
        for name in (ENCODER, ".lock", PROGRESS):
            (settings.out / name).unlink(missing_ok=True)
    return index


def _forget_vain_beginning(folder: Path, stored: dict[str, Any]) -> None:
    """Removes what was begun with other settings, if no token was made by them."""
    begun = read_progress(folder)
    if begun is None or begun["settings"] == stored or begun["position"] != [0, 0]:
        return
    # The progress last: what a command leaves that is killed here, the next one removes.
    for name in (ENCODER, TOKENIZER, PROGRESS):
        (folder / name).unlink(missing_ok=True)


def _begin(
    settings: TokenSettings,
    stored: dict[str, Any],
    sources: list[Source],
    pairs: list[tuple[Source, str | None]],
) -> EncoderSpec:
    """Begins a folder, unless it was begun before; returns what encodes its texts."""
    if read_progress(settings.out) is not None:
        return _read_encoder(settings.out / ENCODER)
    spec = _choose_encoder(settings, sources, pairs)
    if spec.tokenizer is not None:
        atomic_write_text(settings.out / TOKENIZER, spec.tokenizer)
    atomic_write_text(settings.out / ENCODER, json.dumps(dataclasses.asdict(spec)))
    write_progress(settings.out, {"settings": stored, "position": [0, 0], "splits": {}})
    return spec


def _files_beside(tokenizer: str | None) -> dict[str, Path]:
    """The files beside a tokenizer, by name, one of which may have a chat template."""
    if tokenizer is None or not Path(tokenizer).exists():
        return {}
    path = Path(tokenizer)
    return {p.name: p for p in (path if path.is_dir() else path.parent).iterdir() if p.is_file()}


def _with_template(source: Source, files: dict[str, Path]) -> Source:
    """The source with the template that writes its messages, if there is one."""
    if not source.has_answers or find_template(files) is None:
        return source
    return dataclasses.replace(source, template=ChatTemplate(files))


def _check_free(folder: Path) -> None:
    """Checks that a folder holds nothing but what this command has begun there."""
    if not folder.is_dir() or (folder / PROGRESS).exists():
        return
    if (folder / INDEX).exists():
        raise _holds_tokens(folder)
    known = {".lock", ENCODER, TOKENIZER, *(path.name for path in _leftovers(folder))}
    others = {path.name for path in folder.iterdir()} - known
    if others:
        raise UsageError(f"{folder} is not empty ({min(others)}): give another --out")


def _leftovers(folder: Path) -> list[Path]:
    """What a killed command was writing."""
    written = (ENCODER, TOKENIZER, PROGRESS, INDEX)
    return [path for name in written for path in folder.glob(f".{name}.*") if is_temporary(path)]


def _holds_tokens(folder: Path) -> UsageError:
    return UsageError(f"{folder} holds tokens already: give another --out")


def _as_json(settings: TokenSettings, pairs: list[tuple[Source, str | None]]) -> dict[str, Any]:
    """What must stay the same while a folder is made."""
    kept = {
        name: getattr(settings, name)
        for name in (
            "tokenizer", "train_bpe", "val_fraction", "field", "end_of_text", "shard_tokens",
        )
    }  # fmt: skip
    return {**kept, "sources": [[str(s.path), s.size(), split] for s, split in pairs]}


def _choose_encoder(
    settings: TokenSettings, sources: list[Source], pairs: list[tuple[Source, str | None]]
) -> EncoderSpec:
    def texts(chosen: list[Source], wanted: str | None) -> Iterator[str]:
        for source in chosen:
            for part in source.parts():
                if wanted in (None, part.split):
                    yield part.piece.text

    end = settings.end_of_text
    if settings.train_bpe is not None:
        return encoders.train_bpe(texts(sources, "train"), settings.train_bpe, end)
    assert settings.tokenizer is not None
    if settings.tokenizer == "chars":
        return encoders.of_characters(texts([source for source, _ in pairs], None), end)
    if settings.tokenizer == "bytes":
        return encoders.of_bytes(end)
    path = Path(settings.tokenizer)
    path = path / TOKENIZER if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"--tokenizer {settings.tokenizer}: there is no {path}; give a tokenizer.json, a "
            "folder with one, chars or bytes"
        )
    return encoders.of_tokenizer(path, end, settings.model_end)


def _read_encoder(path: Path) -> EncoderSpec:
    try:
        return EncoderSpec(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise TextError(f"{path} is damaged: remove the folder and begin again") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Makes a folder if need be, and lets nobody else write to it."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DirectoryInUseError(
            f"{folder} is in use by another process: wait for it, or give another --out"
        ) from None
    except OSError as error:
        raise ResourceError(f"cannot write to {folder}: {error.strerror}") from error
    try:
        yield
    finally:
        lock.close()
        if not (folder / PROGRESS).exists() and not (folder / INDEX).exists():
            # A command that fails before its first token leaves nothing behind.
            for name in (".lock", ENCODER, TOKENIZER):
                if made or name == ".lock":
                    (folder / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                folder.rmdir() if made else None


def check_folder(path: Path) -> dict[str, Any]:
    """Reads every file of a folder of tokens, and returns its index.

    Raises:
        TextError: a file is damaged or missing, or an id is outside of the vocabulary.
    """
    folder = TokenFolder(path)
    if not folder.index:
        raise UsageError(f"{path} has no {INDEX}, which has the hashes of its files")
    find_tokenizer(folder)
    check_hashes(folder)
    for split in (folder.train, folder.val):
        for start in range(0, len(split), IDS_AT_ONCE):
            split.read(start, min(IDS_AT_ONCE, len(split) - start))
    return folder.index
