"""A folder of token ids as something to train on: its ids, its tokenizer, what is known of it."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxformer.char_data import CharTokenizer
from jaxformer.data.tokenizers import HuggingFaceTokenizer, TokenNumbers
from jaxformer.errors import TextError
from jaxformer.storage.durable_files import sha256_of_file
from jaxformer.token_data import TokenFolder, TokenSplit

TOKENIZER = "tokenizer.json"
# A folder of at most so many tokens is compared with its hashes when it is opened.
MOST_COMPARED = 1 << 24
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
        tokenizer_sha256: of the tokenizer's file or characters; None if it is unknown.
        unchecked: the folder, where it is too large to be compared with its hashes at once.
    """

    name: str
    sha256: str
    train: TokenSplit
    validation: TokenSplit
    tokenizer: Tokenizer
    tokenizer_file: Path | None
    bytes_per_token: float | None
    tokenizer_sha256: str | None = None
    unchecked: TokenFolder | None = None

    @property
    def parts(self) -> tuple[tuple["TokenCorpus", float], ...]:
        """This folder, and its share: all."""
        return ((self, 1.0),)

    @property
    def vocab_size(self) -> int:
        """How many different ids there may be."""
        return self.train.vocab_size


@dataclass(frozen=True)
class TokenMixture:
    """Folders of token ids, all of one tokenizer, that are mixed.

    Attributes:
        parts: each with its share of the batches; shares add up to 1.
    """

    parts: tuple[tuple[TokenCorpus, float], ...]

    @property
    def name(self) -> str:
        """The folders, each with its share."""
        return ", ".join(f"{part.name}:{share:.4g}" for part, share in self.parts)

    @property
    def sha256(self) -> str:
        """Tells the mixture from others, also of the same folders in other shares."""
        named = [(part.sha256, share) for part, share in self.parts]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()

    @property
    def tokenizer(self) -> Tokenizer:
        """Of all folders."""
        return self.parts[0][0].tokenizer

    @property
    def tokenizer_file(self) -> Path | None:
        """Its ``tokenizer.json``, if it has one."""
        return self.parts[0][0].tokenizer_file

    @property
    def vocab_size(self) -> int:
        """How many different ids there may be."""
        return self.parts[0][0].vocab_size


def mix_tokens(parts: Sequence[tuple[TokenCorpus, float]]) -> TokenMixture:
    """Returns the mixture of folders.

    Raises:
        TextError: their ids were not made by the same tokenizer.
    """
    first = parts[0][0]
    for other, _ in parts[1:]:
        if (other.tokenizer_sha256, other.vocab_size) != (first.tokenizer_sha256, first.vocab_size):
            raise TextError(
                f"{first.name} and {other.name} cannot be mixed: their ids were made by "
                f"different tokenizers ({_describe(first)}, and {_describe(other)})"
            )
    total = sum(share for _, share in parts)
    return TokenMixture(tuple((part, share / total) for part, share in parts))


def _describe(corpus: TokenCorpus) -> str:
    digest = corpus.tokenizer_sha256
    known = "an unknown one" if digest is None else f"SHA-256 {digest[:12]}"
    return f"{known} of {corpus.vocab_size:,} tokens"


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
    is_small = len(folder.train) + len(folder.val) <= MOST_COMPARED
    if is_small:
        check_hashes(folder)
    file, digest = find_tokenizer(folder)
    vocabulary = folder.index.get("vocabulary", vocabulary)
    tokenizer: Tokenizer = TokenNumbers(folder.vocab_size)
    if isinstance(vocabulary, str):
        tokenizer, file = CharTokenizer(vocabulary), None
        digest = hashlib.sha256(vocabulary.encode()).hexdigest()
    elif file is not None:
        tokenizer = HuggingFaceTokenizer(file)
    if tokenizer.vocabulary_size() > folder.vocab_size:
        raise TextError(
            f"the tokenizer of {path} has {tokenizer.vocabulary_size()} tokens, and its ids are of "
            f"{folder.vocab_size}: they do not belong together"
        )
    counts = folder.index.get("splits", {}).get("val", {})
    # A loss of answers alone is not that of all the text.
    known = counts.get("bytes") and counts.get("tokens") and not folder.val.has_answers
    return TokenCorpus(
        str(path),
        folder.fingerprint(),
        folder.train,
        folder.val,
        tokenizer,
        file,
        counts["bytes"] / counts["tokens"] if known else None,
        digest,
        None if is_small else folder,
    )


def find_tokenizer(folder: TokenFolder) -> tuple[Path | None, str | None]:
    """Returns the ``tokenizer.json`` in a folder and its SHA-256; None if it has none.

    Raises:
        TextError: it is not the one that made the ids, or that one is missing.
    """
    file = folder.path / TOKENIZER
    expected = folder.index.get("tokenizer_sha256")
    digest = sha256_of_file(file, follow_links=True) if file.is_file() else None
    if expected not in (None, digest):
        what = "is missing" if digest is None else "is not the tokenizer that made the ids"
        raise TextError(f"{file} {what}: put that back, or make the folder again")
    return (None if digest is None else file), digest


def check_hashes(folder: TokenFolder, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Reads every file of a folder but the tokenizer, and compares it with its SHA-256.

    Args:
        folder: with an index; one of nanoGPT has no hashes.
        is_stopped: asked before each file; where it is true, the rest is left out.

    Raises:
        TextError: one is damaged.
    """
    expected = {}
    for split in folder.index.get("splits", {}).values():
        for shard in split["shards"]:
            for about in (shard, shard.get("documents", {}), shard.get("answers", {})):
                expected[about.get("file")] = about.get("sha256")
    for name, digest in expected.items():
        if is_stopped():
            return
        file = folder.path / str(name)
        if digest and sha256_of_file(file, follow_links=True) != digest:
            raise TextError(f"{file} is damaged: its SHA-256 is another; make the folder again")


def check_same_tokenizer(corpus: TokenCorpus | TokenMixture, tokenizer: Any, source: str) -> None:
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
