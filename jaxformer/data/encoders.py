"""What makes ids of texts for a folder: a ``tokenizer.json``, characters, or bytes."""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxformer.data.encoding import Piece, encode_piece
from jaxformer.data.tokenizers import END_OF_TEXT, HuggingFaceTokenizer, byte_tokenizer
from jaxformer.errors import TextError, UsageError

# In the order in which they are looked for.
ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]", "<|im_end|>")


@dataclass(frozen=True)
class EncoderSpec:
    """An encoder, as it is given to other processes.

    Attributes:
        kind: tokenizer, chars or bytes.
        vocab_size: every id is below it.
        end_of_text: the id after every document; None for none.
        vocabulary: of characters.
        tokenizer: of a ``tokenizer.json``, its text.
        opening: ids that stand before every text that a model is given.
    """

    kind: str
    vocab_size: int
    end_of_text: int | None
    vocabulary: str | None = None
    tokenizer: str | None = None
    opening: Sequence[int] = ()

    def about(self) -> dict[str, Any]:
        """Returns what the index of a folder says of it."""
        found: dict[str, Any] = {"vocab_size": self.vocab_size, "end_of_text": self.end_of_text}
        if self.vocabulary is not None:
            found["vocabulary"] = self.vocabulary
        if self.tokenizer is not None:
            found["tokenizer_sha256"] = hashlib.sha256(self.tokenizer.encode()).hexdigest()
        return found


class Encoder(Protocol):
    """Makes ids of pieces of text."""

    end_of_text: int | None
    opening: Sequence[int]

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """Returns the ids of each piece."""
        ...


class _Tokens:
    def __init__(self, spec: EncoderSpec):
        import tokenizers

        self.end_of_text, self.opening = spec.end_of_text, spec.opening
        self._tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer or "")
        # A file may ask for texts of one length.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        whole = [n for n, piece in enumerate(pieces) if not (piece.before or piece.after)]
        texts = [pieces[n].text for n in whole]
        encoded = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        found = {n: np.array(e.ids, np.int64) for n, e in zip(whole, encoded, strict=True)}
        return [
            found[n] if n in found else encode_piece(self._tokenizer, piece)
            for n, piece in enumerate(pieces)
        ]


class _Characters:
    def __init__(self, spec: EncoderSpec):
        self.end_of_text, self.opening = spec.end_of_text, spec.opening
        self._codes = np.array([ord(c) for c in spec.vocabulary or ""], np.uint32)

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [
            np.searchsorted(self._codes, np.frombuffer(piece.text.encode("utf-32-le"), "<u4"))
            for piece in pieces
        ]


class _Bytes:
    def __init__(self, spec: EncoderSpec):
        self.end_of_text, self.opening = spec.end_of_text, spec.opening

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        return [np.frombuffer(piece.text.encode(), np.uint8).astype(np.int64) for piece in pieces]


def make_encoder(spec: EncoderSpec) -> Encoder:
    """Returns the encoder."""
    kinds: dict[str, type[_Tokens | _Characters | _Bytes]] = {
        "tokenizer": _Tokens,
        "chars": _Characters,
        "bytes": _Bytes,
    }
    return kinds[spec.kind](spec)


def of_characters(texts: Iterator[str], end_of_text: str | None = None) -> EncoderSpec:
    """Returns the encoder of the texts' characters, sorted; documents simply follow each other.

    Args:
        texts: all of them.
        end_of_text: ``none``, or None, which is the same here.

    Raises:
        UsageError: another token was asked for.
        TextError: there is no text.
    """
    if end_of_text not in (None, "none"):
        raise UsageError(
            f"--end-of-text {end_of_text}: characters have no such token; leave it out, or take "
            "another --tokenizer"
        )
    found: set[str] = set()
    for text in texts:
        found |= set(text)
    if not found:
        raise TextError("there is no text in what was given")
    vocabulary = "".join(sorted(found))
    return EncoderSpec("chars", len(vocabulary), None, vocabulary=vocabulary)


def of_bytes(end_of_text: str | None = None) -> EncoderSpec:
    """Returns the encoder of UTF-8's bytes: id i is byte i, and 256 is the end of a text.

    Args:
        end_of_text: the token after every document, ``none``, or None for id 256.

    Raises:
        UsageError: the token is not the one of id 256.
    """
    if end_of_text not in (None, "none", END_OF_TEXT):
        raise UsageError(
            f"--end-of-text {end_of_text} is no token: bytes have {END_OF_TEXT}, or none"
        )
    end = None if end_of_text == "none" else 256
    return EncoderSpec("bytes", 257, end, tokenizer=byte_tokenizer())


def of_tokenizer(path: Path, end_of_text: str | None, model_end: int | None = None) -> EncoderSpec:
    """Returns the encoder of a ``tokenizer.json``.

    Args:
        path: the file.
        end_of_text: the token after every document, ``none``, or None for the one that its
            tokenizer_config.json names, that ``model_end`` is, or that is known to mean this.
        model_end: the id of that token by the settings of a model, if they name one.

    Raises:
        UsageError: there is no such token.
        TextError: the file is no tokenizer.
    """
    tokenizer = HuggingFaceTokenizer(path)
    end = end_of_text or _configured(path.with_name("tokenizer_config.json"))
    opening = tuple(tokenizer.around_every_text()[0])
    return dataclasses.replace(from_json(tokenizer.to_json(), end, model_end), opening=opening)


def from_json(text: str, end_of_text: str | None, model_end: int | None = None) -> EncoderSpec:
    """Returns the encoder of a tokenizer; see ``of_tokenizer``."""
    import tokenizers

    vocabulary = tokenizers.Tokenizer.from_str(text).get_vocab(with_added_tokens=True)
    size = max(vocabulary.values()) + 1
    if end_of_text == "none":
        return EncoderSpec("tokenizer", size, None, tokenizer=text)
    ends = tuple(name for name, number in vocabulary.items() if number == model_end)
    names = (*ends, *ENDS_OF_TEXT) if end_of_text is None else (end_of_text,)
    known = next((name for name in names if name in vocabulary), None)
    if known is None:
        what = (
            "no token that ends a text is known"
            if end_of_text is None
            else (f"--end-of-text {end_of_text} is no token")
        )
        raise UsageError(f"{what}: name one of the tokenizer with --end-of-text, or none")
    return EncoderSpec("tokenizer", size, vocabulary[known], tokenizer=text)


def _configured(path: Path) -> str | None:
    try:
        found = json.loads(path.read_bytes()).get("eos_token")
    except (OSError, ValueError, AttributeError):
        return None
    found = found.get("content") if isinstance(found, dict) else found
    return found if isinstance(found, str) else None


def train_bpe(texts: Iterator[str], size: int, end_of_text: str | None = None) -> EncoderSpec:
    """Returns a tokenizer of so many tokens like GPT-2's, trained on texts.

    Args:
        texts: all of them.
        size: how many tokens.
        end_of_text: the token after every document, ``none``, or None for GPT-2's.

    Raises:
        UsageError: the package ``tokenizers`` is not installed, the size is below 257, or there is
            no such token.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UsageError("--train-bpe needs a package: pip install 'jaxformer[hf]'") from None
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if size < len(alphabet) + 1:
        raise UsageError(f"--train-bpe must be at least {len(alphabet) + 1}: got {size}")
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    return from_json(made.to_str(), END_OF_TEXT if end_of_text is None else end_of_text)
