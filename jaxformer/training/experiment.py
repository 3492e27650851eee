"""What a run trains on and starts from: completed settings, token ids, initial arrays."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxformer.char_data import CharTokenizer, train_validation_split
from jaxformer.checkpoints import Arrays
from jaxformer.config import TransformerLMConfig
from jaxformer.data.corpora import Corpus
from jaxformer.data.token_folders import TOKENIZER, TokenCorpus, check_same_tokenizer
from jaxformer.data.tokenizers import TokenNumbers, load_tokenizer
from jaxformer.errors import TextError, UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.token_data import TokenSplit
from jaxformer.training.config import TrainConfig

# Ids to validate with, which always lie on the devices.
MOST_EVALUATED = 1 << 24


class Tokenizer(Protocol):
    """Converts text to token ids and back."""

    def vocabulary_size(self) -> int:
        """Returns how many different ids there are."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text, int32."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids."""
        ...


@dataclasses.dataclass(frozen=True)
class WarmStart:
    """A model of another run or project that a run starts from, in place of random weights.

    Attributes:
        source: where it was read, for the record.
        model: its settings.
        arrays: ``parameters`` by path; also ``mu``, ``nu`` and ``step`` if the run continues with
            the state of its optimizer.
        tokenizer: of its text.
        files: by name, copied into the run's folder, where readers of the run need them: a
            ``tokenizer.json`` and what else lies beside the weights.
        about: written with every checkpoint of the run, so that it can go back where it came from:
            ``origin`` and ``token_ids``.
    """

    source: str
    model: TransformerLMConfig
    arrays: Arrays
    tokenizer: Tokenizer
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """How many optimizer steps its arrays have behind them."""
        return int(self.arrays.get("step", 0))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's settings, completed by its corpus, and the token ids that it trains on.

    Attributes:
        config: with ``model.vocab_size`` set.
        corpus: the text, or the folder of tokens.
        tokenizer: of the corpus's characters, the one that the settings name, or that of the model
            it starts from.
        train_ids: of the first 90 % of the text, int32; or a split on the disk that is too large
            for the devices.
        validation_ids: of the rest, int32.
        start: what it starts from; None for random weights.
        files: by name, copied into the run's folder.
    """

    config: TrainConfig
    corpus: Corpus | TokenCorpus
    tokenizer: Tokenizer
    train_ids: np.ndarray | TokenSplit
    validation_ids: np.ndarray
    start: WarmStart | None = None
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        corpus: Corpus | TokenCorpus,
        *,
        start: WarmStart | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Experiment":
        """Encodes the corpus and completes the settings.

        Args:
            config: the settings; those of the model are ``start.model`` or differ from it on
                purpose.
            corpus: the text, or the folder of tokens.
            start: what to start from.
            tokenizer: of a resumed run; default that of ``start``, the one that the settings name,
                or one of the corpus's own characters.

        Raises:
            TextError: a split is shorter than a window, or holds what the tokenizer does not know.
            UsageError: the vocabulary does not fit ``model.vocab_size``, or there are two
                tokenizers.
        """
        files = {} if start is None else start.files
        if isinstance(corpus, TokenCorpus):
            if start is not None:
                check_same_tokenizer(corpus, start.tokenizer, start.source)
            elif corpus.tokenizer_file is not None:
                files = {TOKENIZER: corpus.tokenizer_file}
            known = tokenizer or (corpus.tokenizer if start is None else start.tokenizer)
            size = corpus.vocab_size
            train_ids, validation_ids = _read_splits(corpus, config)
        else:
            if tokenizer is None:
                tokenizer, more = _choose_tokenizer(config, corpus, start)
                files = {**files, **more}
            known, size = tokenizer, tokenizer.vocabulary_size()
            train_ids, validation_ids = train_validation_split(
                tokenizer.encode(corpus.text), config.window
            )
            if config.eval_tokens is not None:
                validation_ids = validation_ids[: max(config.eval_tokens, config.window) + 1]
        vocab_size = config.model.vocab_size or size
        if vocab_size < size:
            is_text = isinstance(known, CharTokenizer) and start is None
            raise UsageError(
                f"--vocab-size {vocab_size} is less than the {size} "
                + (f"characters of {corpus.name}" if is_text else "tokens of the tokenizer")
            )
        model = dataclasses.replace(config.model, vocab_size=vocab_size)
        config = dataclasses.replace(config, model=model)
        return cls(config, corpus, known, train_ids, validation_ids, start, files)

    @property
    def is_streamed(self) -> bool:
        """Whether the ids to train on stay on the disk, and not on the devices."""
        return isinstance(self.train_ids, TokenSplit)

    @property
    def vocabulary(self) -> str | None:
        """The characters in the order of their ids; None if tokens are not characters."""
        tokenizer = self.tokenizer
        return "".join(tokenizer.vocabulary) if isinstance(tokenizer, CharTokenizer) else None

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes of UTF-8 a token stands for on average; None if unknown, or characters."""
        if isinstance(self.corpus, TokenCorpus):
            return self.corpus.bytes_per_token
        if self.vocabulary is not None:
            return None
        ids = self.validation_ids
        return len(self.tokenizer.decode(ids).encode()) / len(ids)

    @property
    def sample_prompt(self) -> np.ndarray:
        """The ids that a text sample begins with: a new line, or the first token."""
        tokenizer = self.tokenizer
        is_unknown = isinstance(tokenizer, TokenNumbers)
        if is_unknown or (
            isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.vocabulary
        ):
            return np.zeros(1, np.int32)
        ids = np.asarray(tokenizer.encode("\n"), np.int32)
        return ids if len(ids) else np.zeros(1, np.int32)

    @contextlib.contextmanager
    def execution_settings(self) -> Iterator[None]:
        """Makes models run as the settings say while they are traced; numbers do not change."""
        with (
            rematerialization(self.config.remat),
            attention_kernel(self.config.attention_kernel),
            scanned_layers(self.config.scan_layers),
        ):
            yield


def _choose_tokenizer(
    config: TrainConfig, corpus: Corpus, start: WarmStart | None
) -> tuple[Tokenizer, Mapping[str, Path]]:
    """The tokenizer of a text, and the files that a run keeps of it."""
    if start is not None:
        if config.tokenizer is not None:
            raise UsageError(
                f"{start.source} has a tokenizer of its own: leave out --tokenizer, or give "
                "another one with --meta"
            )
        return start.tokenizer, {}
    named, file = (None, None) if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if named is None:
        return CharTokenizer.train_from_text(corpus.text), {}
    return named, {} if file is None else {TOKENIZER: file}


def _read_splits(
    corpus: TokenCorpus, config: TrainConfig
) -> tuple[np.ndarray | TokenSplit, np.ndarray]:
    """The ids of a folder: those that fit on a device, and the split that does not."""
    if config.tokenizer is not None:
        raise UsageError(
            f"{corpus.name} holds tokens, and brings its tokenizer: leave out --tokenizer"
        )
    for name, split in (("training", corpus.train), ("validation", corpus.validation)):
        if len(split) <= config.window:
            raise TextError(
                f"the {name} split of {corpus.name} has {len(split):,} tokens, a window needs "
                f"{config.window + 1:,}: give more text, a larger --val-fraction to jaxformer "
                "tokenize, or a smaller --block-size"
            )
    count = len(corpus.validation)
    if config.eval_tokens is not None:
        count = min(count, max(config.eval_tokens, config.window) + 1)
    if count > max(config.resident_tokens, MOST_EVALUATED):
        raise UsageError(
            f"the validation split of {corpus.name} has {count:,} tokens, which take long to "
            f"evaluate: say how many with --eval-tokens, at most {MOST_EVALUATED - 1:,}"
        )
    validation_ids = corpus.validation.read(0, count)
    if len(corpus.train) > config.resident_tokens:
        return corpus.train, validation_ids
    return corpus.train.read(0, len(corpus.train)), validation_ids
