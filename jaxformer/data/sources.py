"""Files of documents, read in pieces: text, JSONL, Parquet, folders of Hugging Face datasets."""

import codecs
import contextlib
import gzip
import importlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxformer.data.chat import ChatTemplate
from jaxformer.data.compressed import count_bytes, import_package, open_file, skip_bytes
from jaxformer.data.conversations import is_conversation, read_turns
from jaxformer.data.encoding import CONTEXT_CHARACTERS, PIECE_CHARACTERS, Piece, cut_text, find_cut
from jaxformer.errors import ResourceError, TextError, UsageError

BLOCK_BYTES = 1 << 20
# How far the place between the splits of a text is moved to the end of a line.
MOST_MOVED_BYTES = 1 << 16
RECORDS_AT_ONCE = 256
RECORDS = re.compile(r"\.(jsonl|ndjson)(\.gz|\.zst)?$", re.IGNORECASE)
# What is taken of a dataset on the hub, where other files explain it.
READABLE = re.compile(r"\.((txt|jsonl|ndjson)(\.gz|\.zst)?|parquet)$", re.IGNORECASE)
# JSON may write half a surrogate pair, which is no character, and Python reads it.
MAY_BE_HALF_A_PAIR = re.compile(rb"\\u[dD]|\xed")
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@.*)?")


class Part(NamedTuple):
    """A piece of a document, and what becomes of it.

    Attributes:
        piece: the text.
        split: train or val.
        begins: whether a document begins here.
        ends: whether a document ends here, and the token that ends a text follows.
        counts: whether its tokens are targets.
        opens: whether the tokens that stand before every text come first.
    """

    piece: Piece
    split: str
    begins: bool
    ends: bool
    counts: bool = True
    opens: bool = False


@dataclass(frozen=True)
class Source:
    """A file, or the folder of a Hugging Face dataset.

    Attributes:
        path: where it is.
        field: of a record that has its text.
        val_fraction: the share of it that is for validation: of a text its end, of records every
            so many-th from the first on.
        has_answers: whether its records are conversations, of which answers alone are targets.
        template: writes their messages.
    """

    path: Path
    field: str
    val_fraction: float
    has_answers: bool = False
    template: ChatTemplate | None = None

    def size(self) -> int:
        """Returns its bytes on the disk."""
        return sum(file.stat().st_size for file in self._files())

    def _files(self) -> list[Path]:
        return _arrow_files(self.path) if self.path.is_dir() else [self.path]

    def parts(self, advance: Callable[[int], None] = lambda count: None) -> Iterator[Part]:
        """Yields the pieces of its documents, in order; the same ones every time.

        Args:
            advance: called with the bytes of the disk that were read since the last call.

        Raises:
            TextError: it is damaged, is no UTF-8, or a record has no text.
            UsageError: it needs a package that is not installed.
        """
        try:
            if self.path.is_dir() or self.path.suffix.lower() == ".parquet":
                yield from self._split_records(self._columns(advance))
            elif self.has_answers:
                yield from self._conversations(advance)
            elif RECORDS.search(self.path.name):
                yield from self._split_records(self._lines(advance))
            else:
                yield from self._text(advance)
        except OSError as error:
            if isinstance(error, gzip.BadGzipFile):
                raise TextError(f"{self.path} is damaged: {error}") from error
            raise ResourceError(f"cannot read {self.path}: {error.strerror or error}") from error
        except EOFError as error:
            raise TextError(f"{self.path} is cut short: fetch it again") from error

    def _split_records(self, texts: Iterator[str]) -> Iterator[Part]:
        for number, text in enumerate(texts):
            split = self._split_of(number)
            pieces = list(cut_text(text)) if text else []
            for place, piece in enumerate(pieces):
                yield Part(piece, split, place == 0, place == len(pieces) - 1)

    def _split_of(self, number: int) -> str:
        every = round(1 / self.val_fraction) if self.val_fraction else 0
        return "val" if every and number % every == 0 else "train"

    def _conversations(self, advance: Callable[[int], None]) -> Iterator[Part]:
        """Yields the parts of records; what messages end with, their template has written."""
        for count, (number, record) in enumerate(self._records(advance)):
            try:
                turns = read_turns(record, self.template)
            except (ValueError, TextError) as error:
                raise TextError(f"line {number} of {self.path} {error}") from None
            pieces = [(p, turn.counts) for turn in turns if turn.text for p in cut_text(turn.text)]
            is_chat = "messages" in record
            for place, (piece, counts) in enumerate(pieces):
                ends = place == len(pieces) - 1 and not is_chat
                opens = place == 0 and not is_chat
                yield Part(piece, self._split_of(count), place == 0, ends, counts, opens)

    def _lines(self, advance: Callable[[int], None]) -> Iterator[str]:
        for number, record in self._records(advance):
            try:
                text = record[self.field]
            except (LookupError, TypeError):
                raise TextError(
                    f"line {number} of {self.path} has no {self.field!r}: name the field of the "
                    "text with --field"
                ) from None
            yield self._as_text(text, f"line {number}")

    def _records(self, advance: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """Yields the records of a file of JSON, each with the number of its line."""
        file, raw = open_file(self.path)
        place = 0
        with raw, file:
            for number, line in enumerate(file, 1):
                advance(raw.tell() - place)
                place = raw.tell()
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError):
                    raise TextError(f"line {number} of {self.path} is no JSON") from None
                if MAY_BE_HALF_A_PAIR.search(line) and not _is_text(record):
                    raise TextError(
                        f"line {number} of {self.path} has half a surrogate pair and is no text"
                    )
                yield number, record

    def _columns(self, advance: Callable[[int], None]) -> Iterator[str]:
        arrow = import_package("pyarrow", self.path)
        for file in self._files():
            try:
                for batch in _batches(file, self.field):
                    for number, text in enumerate(batch.to_pylist()):
                        yield self._as_text(text, f"record {number}")
            except (arrow.ArrowKeyError, KeyError) as error:
                raise TextError(
                    f"{file} has no {self.field!r}: name the field of the text with --field"
                ) from error
            except arrow.ArrowInvalid as error:
                reason = str(error).splitlines()[0][:200].rstrip(".")
                raise TextError(f"{file} cannot be read: {reason}") from error
            advance(file.stat().st_size)

    def _as_text(self, text: Any, where: str) -> str:
        if not isinstance(text, str):
            raise TextError(
                f"{where} of {self.path} has no text in {self.field!r}: name its field with --field"
            )
        return text

    def _text(self, advance: Callable[[int], None]) -> Iterator[Part]:
        size = count_bytes(self.path)
        boundary = size
        if self.val_fraction:
            boundary = self._boundary(int(size * (1 - self.val_fraction)))
        file, raw = open_file(self.path)
        with raw, file:
            for split, begin, end in (("train", 0, boundary), ("val", boundary, size)):
                place = raw.tell()
                for part in _cut_stream(self._decode(file, begin, end), split):
                    advance(raw.tell() - place)
                    place = raw.tell()
                    yield part

    def _boundary(self, place: int) -> int:
        """The end of the line at a byte, or of its character if the line is long."""
        file, raw = open_file(self.path)
        with raw, file:
            skip_bytes(file, place)
            block = file.read(MOST_MOVED_BYTES)
        line = block.find(b"\n") + 1
        if line:
            return place + line
        return place + next((i for i, byte in enumerate(block) if byte & 0xC0 != 0x80), len(block))

    def _decode(self, file: BinaryIO, begin: int, end: int) -> Iterator[str]:
        """Yields the text between two bytes, in blocks, with line ends as Unix has them."""
        decoder = codecs.getincrementaldecoder("utf-8")()
        done, held = begin, ""
        while done < end:
            data = file.read(min(BLOCK_BYTES, end - done))
            if not data:
                raise TextError(f"{self.path} was cut short while it was read")
            try:
                text = held + decoder.decode(data, final=done + len(data) == end)
            except UnicodeDecodeError as error:
                raise TextError(
                    f"{self.path} is not utf-8: byte 0x{error.object[error.start]:02x} near offset "
                    f"{done + error.start}"
                ) from None
            if "\0" in text:
                raise TextError(
                    f"{self.path} has a NUL near offset {done + text.index(chr(0))} and is no text"
                )
            if not done:
                text = text.removeprefix("\N{BYTE ORDER MARK}")
            done += len(data)
            # A carriage return waits for what follows it.
            held = "\r" if text.endswith("\r") and done < end else ""
            yield text.removesuffix(held).replace("\r\n", "\n")


def find_sources(names: Sequence[Path], field: str, val_fraction: float) -> list[Source]:
    """Returns the files that are named, and those in folders, in order.

    Raises:
        UsageError: one does not exist, or a folder holds nothing.
    """
    found: list[Path] = []
    for name in names:
        if name.is_dir() and not (name / "state.json").is_file():
            if (name / "dataset_dict.json").is_file():
                raise UsageError(f"{name} has several splits: name one, such as {name / 'train'}")
            inside = sorted(path for path in name.rglob("*") if path.is_file())
            found += [path for path in inside if not path.name.startswith(".")]
        elif name.exists():
            found.append(name)
        else:
            hint = ""
            if HUB_NAME.fullmatch(str(name)):
                hint = (
                    "; a dataset of the Hugging Face hub is fetched with --download, as "
                    "OWNER/NAME@COMMIT"
                )
            raise UsageError(f"{name} does not exist{hint}")
    if not found:
        raise UsageError(f"{', '.join(map(str, names))}: there is no file")
    return [Source(p, field, val_fraction, _has_answers(p, field)) for p in found]


def _has_answers(path: Path, field: str) -> bool:
    """Whether the first record of a file of JSON is a conversation, and has no text in its field.

    What cannot be read is rejected when its turn comes.
    """
    if path.is_dir() or not RECORDS.search(path.name):
        return False
    source = Source(path, field, 0.0)
    with contextlib.suppress(TextError, OSError, EOFError):
        first = next((record for _, record in source._records(lambda count: None)), None)
        return first is not None and is_conversation(first) and field not in first
    return False


def _cut_stream(blocks: Iterator[str], split: str) -> Iterator[Part]:
    """Yields the pieces of one document that comes in blocks."""
    text, before, begins = "", "", True
    for block in blocks:
        text += block
        # What follows a cut must be known too.
        while len(text) > PIECE_CHARACTERS + CONTEXT_CHARACTERS:
            end = find_cut(text, 0, PIECE_CHARACTERS)
            piece = Piece(text[:end], before, text[end : end + CONTEXT_CHARACTERS])
            yield Part(piece, split, begins, False)
            before = (before + text[:end])[-CONTEXT_CHARACTERS:]
            text, begins = text[end:], False
    if text:
        yield Part(Piece(text, before), split, begins, True)


def _is_text(record: Any) -> bool:
    """Returns whether all strings of a record can be written."""
    try:
        json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _arrow_files(folder: Path) -> list[Path]:
    """The files of a dataset that was saved by the package ``datasets``, in order."""
    try:
        state = json.loads((folder / "state.json").read_bytes())
        return [folder / Path(file["filename"]).name for file in state["_data_files"]]
    except (ValueError, LookupError, TypeError) as error:
        raise TextError(f"{folder / 'state.json'} does not say where its data is") from error


def _batches(file: Path, field: str) -> Iterator[Any]:
    """Yields one column of a file of Parquet or Arrow, in parts."""
    if file.suffix.lower() == ".parquet":
        parquet = importlib.import_module("pyarrow.parquet")
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(RECORDS_AT_ONCE, columns=[field]):
                yield batch.column(field)
        return
    arrow = importlib.import_module("pyarrow")
    with arrow.OSFile(str(file)) as data, arrow.ipc.open_stream(data) as stream:
        for batch in stream:
            yield batch.column(field)
