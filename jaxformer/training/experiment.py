"""What a run trains on and starts from: completed settings, token ids, initial arrays."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxformer.char_data import CharTokenizer, train_validation_split
from jaxformer.checkpoints import Arrays
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_optimizers import OPTIMIZERS
from jaxformer.data.corpora import Corpus
from jaxformer.data.token_folders import TOKENIZER, TokenCorpus, TokenMixture, check_same_tokenizer
from jaxformer.data.tokenizers import TokenNumbers, load_tokenizer
from jaxformer.errors import Setting, TextError, UsageError
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.sampling import Rows
from jaxformer.token_data import TokenFolder
from jaxformer.training.config import PairTrainConfig, TrainConfig
from jaxformer.training.data import Data, ValidationSet, read_folders
from jaxformer.training.pairs import begin_targets, read_pairs
from jaxformer.training.parallel.step_spec import RowKind

# Characters that a message lists.
MOST_CHARACTERS = 8


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
        arrays: ``parameters`` by path; also what its optimizer keeps of them, and ``step``, if the
            run continues with that.
        tokenizer: of its text.
        files: by name, copied into the run's folder, where readers of the run need them: a
            ``tokenizer.json`` and what else lies beside the weights.
        about: written with every checkpoint of the run, so that it can go back where it came from:
            ``origin`` and ``token_ids``.
        optimizer: whose state is in the arrays, by its setting's name; None without one.
        first_ids: with which it begins a text, if that is known.
        last_ids: with which it ends one.
        target_begin: of an encoder and decoder, with which every target begins.
        optimizer_settings: that its optimizer had, as far as they are known.
    """

    source: str
    model: TransformerLMConfig | EncoderDecoderConfig
    arrays: Arrays
    tokenizer: Tokenizer
    files: Mapping[str, Path] = dataclasses.field(default_factory=dict)
    about: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: str | None = None
    first_ids: Sequence[int] = ()
    last_ids: Sequence[int] = ()
    target_begin: Sequence[int] = ()
    optimizer_settings: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """How many optimizer steps its arrays have behind them."""
        return int(self.arrays.get("step", 0))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A run's settings, completed by its corpus, and the token ids that it trains on.

    Attributes:
        config: with ``model.vocab_size`` set.
        corpus: the text, the folder of tokens, or a mixture of folders.
        tokenizer: of the corpus's characters, the one that the settings name, or that of the model
            it starts from.
        train_ids: of the first 90 % of the text, int32; None if there are rows.
        train_rows: what is read from the disk as it is needed.
        validation: what it is validated with.
        row: what a row of a batch is, see ``StepSpec``.
        start: what it starts from; None for random weights.
        files: by name, copied into the run's folder; some as what they are to hold.
    """

    config: TrainConfig
    corpus: Corpus | TokenCorpus | TokenMixture
    tokenizer: Tokenizer
    train_ids: np.ndarray | None
    train_rows: Rows | None
    validation: tuple[ValidationSet, ...]
    row: RowKind = "ids"
    start: WarmStart | None = None
    files: Mapping[str, Path | bytes] = dataclasses.field(default_factory=dict)

    @classmethod
    def prepare(
        cls,
        config: TrainConfig,
        corpus: Corpus | TokenCorpus | TokenMixture,
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
            UsageError: the vocabulary does not fit ``model.vocab_size``, there are two tokenizers,
                the state to start from is that of another optimizer, or the model is not causal.
        """
        if not config.model.causal:
            raise UsageError(
                "training on the next token needs a causal model: leave out causal=False"
            )
        files: Mapping[str, Path | bytes] = {} if start is None else start.files
        if start is not None and start.optimizer not in (None, config.optimizer.optimizer):
            raise UsageError(
                f"{start.source} holds the state of {OPTIMIZERS[start.optimizer].title}: continue "
                "with ",
                Setting("optimizer", value=start.optimizer),
                ", or take its weights alone with ",
                Setting("fresh_optimizer"),
            )
        if not isinstance(corpus, Corpus):
            if start is not None:
                check_same_tokenizer(corpus, start.tokenizer, start.source)
            elif corpus.tokenizer_file is not None:
                files = {TOKENIZER: corpus.tokenizer_file}
            known = tokenizer or (corpus.tokenizer if start is None else start.tokenizer)
            size = corpus.vocab_size
            if isinstance(config, PairTrainConfig):
                if start is None and tokenizer is None:
                    raise UsageError(
                        "an encoder and decoder is trained further: give ", Setting("init_from")
                    )
                config, start = _begin_targets(config, start, known)
                last_ids = () if start is None else start.last_ids
                config, data = read_pairs(corpus.name, corpus.parts, config, known, last_ids)
            else:
                data = read_folders(corpus.name, corpus.parts, config)
        else:
            if isinstance(config, PairTrainConfig):
                raise UsageError(
                    "an encoder and decoder learns from sources and their targets, and "
                    f"{corpus.name} is one text: make a folder of prompts and answers with "
                    "jaxformer tokenize"
                )
            if config.packing:
                raise UsageError(
                    Setting("packing"),
                    " needs a folder of tokens, which knows its documents, and "
                    f"{corpus.name} is one text: make a folder with jaxformer tokenize",
                )
            if tokenizer is None:
                tokenizer, more = _choose_tokenizer(config, corpus, start)
                files = {**files, **more}
            known, size = tokenizer, tokenizer.vocabulary_size()
            train_ids, validation_ids = train_validation_split(
                _encode(tokenizer, corpus), config.window
            )
            if config.eval_tokens is not None:
                validation_ids = validation_ids[: max(config.eval_tokens, config.window) + 1]
            scale = None
            if not isinstance(tokenizer, CharTokenizer):
                scale = len(tokenizer.decode(validation_ids).encode()) / len(validation_ids)
            known_set = ValidationSet(
                corpus.name, len(validation_ids), validation_ids, bytes_per_token=scale
            )
            data = Data(train_ids, None, (known_set,))
        is_text = isinstance(known, CharTokenizer) and start is None
        what = f"{size} " + (
            f"characters of {corpus.name}" if is_text else "tokens of the tokenizer"
        )
        config = _fit_vocabulary(config, size, what)
        return cls(config, corpus, known, *data, start=start, files=files)

    @property
    def is_streamed(self) -> bool:
        """Whether the ids to train on stay on the disk, and not on the devices."""
        return self.train_ids is None

    @property
    def unchecked_folders(self) -> tuple[TokenFolder, ...]:
        """The folders of tokens that were too large to be compared with their hashes so far."""
        if isinstance(self.corpus, Corpus):
            return ()
        found = (part.unchecked for part, _ in self.corpus.parts)
        return tuple(folder for folder in found if folder is not None)

    @property
    def validation_ids(self) -> np.ndarray:
        """The ids of the first set to validate with; empty if it has rows."""
        ids = self.validation[0].ids
        return np.zeros(0, np.int32) if ids is None else ids

    @property
    def vocabulary(self) -> str | None:
        """The characters in the order of their ids; None if tokens are not characters."""
        tokenizer = self.tokenizer
        return "".join(tokenizer.vocabulary) if isinstance(tokenizer, CharTokenizer) else None

    @property
    def bytes_per_token(self) -> float | None:
        """How many bytes of UTF-8 a token stands for on average; None if unknown, or characters."""
        known = [(one.share, one.bytes_per_token) for one in self.validation]
        if any(scale is None for _, scale in known):
            return None
        return sum(share * (scale or 0) for share, scale in known)

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


def _encode(tokenizer: Tokenizer, corpus: Corpus) -> np.ndarray:
    """Returns the ids of a text.

    Raises:
        TextError: it has characters that the tokenizer of the model does not know.
    """
    if isinstance(tokenizer, CharTokenizer):
        unknown = sorted(set(corpus.text) - set(tokenizer.vocabulary))
        if unknown:
            named = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:MOST_CHARACTERS])
            more = len(unknown) - MOST_CHARACTERS
            raise TextError(
                f"{corpus.name} has characters that are not among the "
                f"{tokenizer.vocabulary_size()} of the model: {named}"
                + (f" and {more} more" if more > 0 else "")
            )
    return tokenizer.encode(corpus.text)


def _choose_tokenizer(
    config: TrainConfig, corpus: Corpus, start: WarmStart | None
) -> tuple[Tokenizer, Mapping[str, Path | bytes]]:
    """The tokenizer of a text, and the files that a run keeps of it."""
    if start is not None:
        if config.tokenizer is not None:
            raise UsageError(
                f"{start.source} has a tokenizer of its own: leave out ",
                Setting("tokenizer"),
                ", or give another one with ",
                Setting("meta"),
            )
        return start.tokenizer, {}
    named, file = (None, None) if config.tokenizer is None else load_tokenizer(config.tokenizer)
    if named is None:
        return CharTokenizer.train_from_text(corpus.text), {}
    return named, {} if file is None else {TOKENIZER: file}


def _begin_targets(
    config: PairTrainConfig, start: WarmStart | None, tokenizer: Any
) -> tuple[PairTrainConfig, WarmStart | None]:
    """The settings with the ids that targets begin with; what the user gave stays with the run."""
    if start is None:
        return config, start
    if not config.target_begin:
        begin = begin_targets(start.target_begin, start.first_ids, tokenizer, start.source)
        return dataclasses.replace(config, target_begin=begin), start
    names = ("decoder_start_token_id", "forced_bos_token_id")
    given = dict(zip(names, config.target_begin, strict=False))
    about = {**start.about, "token_ids": {**start.about.get("token_ids", {}), **given}}
    return config, dataclasses.replace(start, about=about)


def _fit_vocabulary(config: TrainConfig, size: int, what: str) -> TrainConfig:
    """The settings with a vocabulary, which has room for ``size`` tokens, ``what`` in words."""
    if isinstance(config, PairTrainConfig):
        known = min(config.model.source_vocab_size, config.model.target_vocab_size)
        if known < size:
            raise UsageError(f"the model has {known} tokens, fewer than the {what}")
        return config
    vocab_size = config.model.vocab_size or size
    if vocab_size < size:
        raise UsageError(
            Setting("vocab_size", value=str(vocab_size)),
            f" is less than the {what}: give a larger one, or, to resume, "
            "the text that the run began with",
        )
    model = dataclasses.replace(config.model, vocab_size=vocab_size)
    return dataclasses.replace(config, model=model)
