"""Text to ids and back with a Hugging Face ``tokenizer.json``."""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from jaxformer.char_data import CharTokenizer
from jaxformer.errors import TextError, UsageError
from jaxformer.storage.local_files import LocalFile

MAX_BYTES = 256 << 20


class HuggingFaceTokenizer:
    """The tokenizer of a ``tokenizer.json``, run by the package ``tokenizers``.

    Args:
        path: the file.

    Raises:
        UsageError: the package is not installed.
        TextError: the file is not such a tokenizer.
        CheckpointError: it is missing.
        ResourceError: it cannot be read.
    """

    def __init__(self, path: Path):
        if importlib.util.find_spec("tokenizers") is None:
            raise UsageError(
                f"{path} needs the package tokenizers: pip install 'jaxformer[hf]', or give and "
                "get ids with --prompt-ids"
            )
        import tokenizers

        file = LocalFile(path)
        if file.size > MAX_BYTES:
            raise TextError(f"{path} has {file.size} bytes, where a tokenizer has at most 256 MiB")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(file.bytes(0, file.size).decode())
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

        Args:
            text: any text.
            unknown: not used; the tokenizer's own settings decide about unknown characters.
            around_every_text: False for a text that has them already, as of a chat template.
        """
        encoded = self._tokenizer.encode(text, add_special_tokens=around_every_text)
        return np.array(encoded.ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, without special tokens."""
        return str(self._tokenizer.decode([int(i) for i in ids]))


def tokenizer_in(folder: Path, vocabulary: str | None) -> CharTokenizer | HuggingFaceTokenizer:
    """Returns a run's tokenizer: of its characters, or of the ``tokenizer.json`` in its folder."""
    if vocabulary is None:
        return HuggingFaceTokenizer(folder / "tokenizer.json")
    return CharTokenizer(vocabulary)
