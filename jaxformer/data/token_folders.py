"""A folder of token ids as something to train on: its ids, its tokenizer, what is known of it."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.char_data import CharTokenizer
from jaxformer.data.tokenizers import HuggingFaceTokenizer, TokenNumbers
from jaxformer.errors import TextError
from jaxformer.storage.durable_files import sha256_of_file
from jaxformer.token_data import TokenFolder, TokenSplit

TOKENIZER = "tokenizer.json"
Tokenizer = CharTokenizer | HuggingFaceTokenizer | TokenNumbers


@dataclass(frozen=True)
class TokenCorpus:
    """A folder of token ids.

    Attributes:
        name: its path.
        sha256: tells it from others; see ``TokenFolder.fingerprint``.
        train: the ids to train on.
        validation: the ids to validate with.
        tokenizer: that made the ids; ``TokenNumbers`` if it is unknown.
        tokenizer_file: its ``tokenizer.json``, if it has one.
        bytes_per_token: of UTF-8, in the validation split, if that is known.
    """

    name: str
    sha256: str
    train: TokenSplit
    validation: TokenSplit
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    bytes_per_token: float | None

    @property
    def vocab_size(self) -> int:
        """How many different ids there may be."""
        return self.train.vocab_size


def open_tokens(path: Path, vocabulary: str | None = None) -> TokenCorpus:
    """Opens a folder of token ids.

    Args:
        path: of the folder.
        vocabulary: the characters of nanoGPT's ``meta.pkl``, if there is one.

    Raises:
        TextError: it is damaged, or its tokenizer is not the one that made its ids.
        UsageError: its tokenizer needs a package that is not installed.
    """
    folder = TokenFolder(path, None if vocabulary is None else len(vocabulary))
    file = folder.path / TOKENIZER if (folder.path / TOKENIZER).is_file() else None
    vocabulary = folder.index.get("vocabulary", vocabulary)
    tokenizer: Tokenizer = TokenNumbers(folder.vocab_size)
    if isinstance(vocabulary, str):
        tokenizer, file = CharTokenizer(vocabulary), None
    elif file is not None:
        expected = folder.index.get("tokenizer_sha256")
        if expected is not None and sha256_of_file(file, follow_links=True) != expected:
            raise TextError(
                f"{file} is not the tokenizer that made the ids of {path}: put that back, or make "
                "the folder again"
            )
        tokenizer = HuggingFaceTokenizer(file)
    if tokenizer.vocabulary_size() > folder.vocab_size:
        raise TextError(
            f"the tokenizer of {path} has {tokenizer.vocabulary_size()} tokens, and its ids are of "
            f"{folder.vocab_size}: they do not belong together"
        )
    counts = folder.index.get("splits", {}).get("val", {})
    known = counts.get("bytes") and counts.get("tokens")
    return TokenCorpus(
        str(path),
        folder.fingerprint(),
        folder.train,
        folder.val,
        tokenizer,
        file,
        counts["bytes"] / counts["tokens"] if known else None,
    )


def check_same_tokenizer(corpus: TokenCorpus, tokenizer: Any, source: str) -> None:
    """Checks that a model and a folder have the same tokenizer.

    Args:
        corpus: the folder; one whose tokenizer is unknown passes.
        tokenizer: of the model.
        source: the model's name.

    Raises:
        TextError: they have not.
    """
    known = corpus.tokenizer
    if isinstance(known, TokenNumbers) or _rules(known) == _rules(tokenizer):
        return
    raise TextError(
        f"the ids of {corpus.name} were made by another tokenizer than that of {source}: make the "
        "folder with the tokenizer of the model"
    )


def _rules(tokenizer: Any) -> Any:
    """What decides about the ids of a text: not how it is cut or filled up."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        return getattr(tokenizer, "vocabulary", None)
    rules: dict[str, Any] = json.loads(tokenizer.to_json())
    return {k: v for k, v in rules.items() if k not in ("truncation", "padding", "post_processor")}
