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
from jaxformer.data.tokenizers import load_tokenizer
from jaxformer.errors import UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.training.config import TrainConfig


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
        corpus: the text.
        tokenizer: of the corpus's characters, the one that the settings name, or that of the model
            it starts from.
        train_ids: of the first 90 % of the text, int32.
        validation_ids: of the rest, int32.
        start: what it starts from; None for random weights.
        files: by name, copied into the run's folder.
    """

    config: TrainConfig
    corpus: Corpus
    tokenizer: Tokenizer
    train_ids: np.ndarray
    validation_ids: np.ndarray
    start: WarmStart | None = None
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        corpus: Corpus,
        *,
        start: WarmStart | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> "Experiment":
        """Encodes the corpus and completes the settings.

        Args:
            config: the settings; those of the model are ``start.model`` or differ from it on
                purpose.
            corpus: the text.
            start: what to start from.
            tokenizer: of a resumed run; default that of ``start``, the one that the settings name,
                or one of the corpus's own characters.

        Raises:
            TextError: a split is shorter than a window, or holds what the tokenizer does not know.
            UsageError: the vocabulary does not fit ``model.vocab_size``, or there are two
                tokenizers.
        """
        files = {} if start is None else start.files
        if tokenizer is None and start is not None:
            if config.tokenizer is not None:
                raise UsageError(
                    f"{start.source} has a tokenizer of its own: leave out --tokenizer, or give "
                    "another one with --meta"
                )
            tokenizer = start.tokenizer
        if tokenizer is None and config.tokenizer is not None:
            tokenizer, file = load_tokenizer(config.tokenizer)
            files = {} if file is None else {"tokenizer.json": file}
        if tokenizer is None:
            tokenizer = CharTokenizer.train_from_text(corpus.text)
        train_ids, validation_ids = train_validation_split(
            tokenizer.encode(corpus.text), config.window
        )
        size = config.model.vocab_size or tokenizer.vocabulary_size()
        if size < tokenizer.vocabulary_size():
            raise UsageError(
                f"--vocab-size {size} is less than the {tokenizer.vocabulary_size()} "
                + (
                    f"characters of {corpus.name}"
                    if isinstance(tokenizer, CharTokenizer) and start is None
                    else "tokens of the tokenizer"
                )
            )
        model = dataclasses.replace(config.model, vocab_size=size)
        config = dataclasses.replace(config, model=model)
        return cls(config, corpus, tokenizer, train_ids, validation_ids, start, files)

    @property
    def vocabulary(self) -> str | None:
        """The characters in the order of their ids; None if tokens are not characters."""
        tokenizer = self.tokenizer
        return "".join(tokenizer.vocabulary) if isinstance(tokenizer, CharTokenizer) else None

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes of UTF-8 a token stands for on average; None for characters."""
        if self.vocabulary is not None:
            return None
        ids = self.validation_ids
        return len(self.tokenizer.decode(ids).encode()) / len(ids)

    @property
    def sample_prompt(self) -> np.ndarray:
        """The ids that a text sample begins with: a new line, or the first token."""
        tokenizer = self.tokenizer
        if isinstance(tokenizer, CharTokenizer) and "\n" not in tokenizer.vocabulary:
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
