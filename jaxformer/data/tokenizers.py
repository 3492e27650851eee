"""Text to ids and back with a Hugging Face ``tokenizer.json``."""

import importlib.util
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxformer.char_data import CharTokenizer
from jaxformer.data.encoding import PIECE_CHARACTERS, cut_text, encode_piece
from jaxformer.errors import Setting, TextError, UsageError
from jaxformer.hardware.invocation import install
from jaxformer.storage.local_files import LocalFile

MAX_BYTES = 256 << 20
END_OF_TEXT = "<|endoftext|>"


class HuggingFaceTokenizer:
    """The tokenizer of a ``tokenizer.json``, run by the package ``tokenizers``.

    Args:
        path: the file.
        text: what it would hold, where there is none.

    Attributes:
        path: as given.

    Raises:
        UsageError: the package is not installed.
        TextError: the file is not such a tokenizer.
        CheckpointError: it is missing.
        ResourceError: it cannot be read.
    """

    def __init__(self, path: Path, text: str | None = None):
        if importlib.util.find_spec("tokenizers") is None:
            raise UsageError(
                f"{path} needs the package tokenizers: {install('hf')}, or give and "
                "get ids with --prompt-ids"
            )
        import tokenizers

        self.path = path
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(_read(path) if text is None else text)
        # The package raises nothing more special.
        except Exception as error:
            reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            raise TextError(f"{path} is no tokenizer: {reason}") from error

    def vocabulary_size(self) -> int:
        """Returns the number of tokens, added ones included."""
        return int(self._tokenizer.get_vocab_size())

    def encode(
        self, text: str, *, unknown: str = "error", around_every_text: bool = True
    ) -> np.ndarray:
        """Returns the ids of the text's tokens, (T,) int32, with those around every text.

        A long text is encoded in pieces, which bounds the memory that it takes.

        Args:
            text: any text.
            unknown: not used; the tokenizer's own settings decide about unknown characters.
            around_every_text: False for a text that has them already, as of a chat template.
        """
        if len(text) <= PIECE_CHARACTERS:
            encoded = self._tokenizer.encode(text, add_special_tokens=around_every_text)
            return np.array(encoded.ids, np.int32)
        first, last = self.around_every_text() if around_every_text else ([], [])
        pieces = (encode_piece(self._tokenizer, piece) for piece in cut_text(text))
        return np.concatenate([np.array(first, np.int32), *pieces, np.array(last, np.int32)])

    def around_every_text(self) -> tuple[list[int], list[int]]:
        """Returns the ids that stand before and after the tokens of every text."""
        alone = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        for place in range(len(whole) - len(alone) + 1):
            if whole[place : place + len(alone)] == alone:
                return whole[:place], whole[place + len(alone) :]
        return [], []

    def to_json(self) -> str:
        """Returns it as a ``tokenizer.json`` has it."""
        return str(self._tokenizer.to_str())

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, without special tokens."""
        return str(self._tokenizer.decode([int(i) for i in ids]))


class TokenNumbers:
    """Stands for a tokenizer that is unknown: the text of an id is its number.

    Args:
        size: how many different ids there are.
    """

    def __init__(self, size: int):
        self._size = size

    def vocabulary_size(self) -> int:
        """Returns how many different ids there are."""
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids whose numbers stand in the text, int32 (T,)."""
        return np.array([int(word) for word in text.split()], np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the numbers, each after a space."""
        return "".join(f" {int(i)}" for i in ids)


def tokenizer_in(folder: Path, vocabulary: str | None) -> CharTokenizer | HuggingFaceTokenizer:
    """Returns a run's tokenizer: of its characters, or of the ``tokenizer.json`` in its folder."""
    if vocabulary is None:
        return HuggingFaceTokenizer(folder / "tokenizer.json")
    return CharTokenizer(vocabulary)


def byte_tokenizer() -> str:
    """Returns a ``tokenizer.json`` of UTF-8's bytes: id i is byte i, and 256 ends a text."""
    byte_level = {"add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    described = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": 256, "content": END_OF_TEXT, **special, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", **byte_level},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", **byte_level},
        "model": {
            "type": "BPE",
            "vocab": {**_byte_characters(), END_OF_TEXT: 256},
            "merges": [],
        },
    }
    return json.dumps(described)


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in GPT-2's tokenizer: itself where it can be seen."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    characters = {byte: chr(byte) for byte in seen}
    characters |= {byte: chr(256 + n) for n, byte in enumerate(hidden)}
    return {characters[byte]: byte for byte in range(256)}


def _read(path: Path) -> str:
    file = LocalFile(path)
    if file.size > MAX_BYTES:
        raise TextError(f"{path} has {file.size} bytes, where a tokenizer has at most 256 MiB")
    return file.bytes(0, file.size).decode()


def load_tokenizer(
    name: str,
) -> tuple[CharTokenizer | HuggingFaceTokenizer | None, Path | bytes | None]:
    """Returns the tokenizer that ``--tokenizer`` names, and its file or what would be in it.

    Args:
        name: a ``tokenizer.json``, a folder that has one, ``chars``, or ``bytes``.

    Returns:
        None and None for ``chars``, which knows its vocabulary once it has seen the text.

    Raises:
        UsageError: there is no such file, or the package ``tokenizers`` is not installed.
        TextError: the file is no tokenizer.
    """
    if name == "chars":
        return None, None
    if name == "bytes":
        text = byte_tokenizer()
        return HuggingFaceTokenizer(Path(name), text), text.encode()
    path = Path(name)
    if path.is_dir():
        path /= "tokenizer.json"
    if not path.is_file():
        raise UsageError(
            Setting("tokenizer", value=name),
            f": there is no {path}; give a tokenizer.json, a folder with one, chars, or bytes",
        )
    return HuggingFaceTokenizer(path), path
