"""What a run trains on and is validated with, of folders of tokens and the run's settings."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxformer.data.token_folders import TokenCorpus
from jaxformer.errors import Setting, TextError, UsageError
from jaxformer.packing import PackedRows
from jaxformer.sampling import MixedRows, Rows
from jaxformer.token_data import TokenWindows
from jaxformer.training.config import TrainConfig
from jaxformer.training.parallel.step_spec import RowKind

# Ids to validate with, which are held in memory.
MOST_EVALUATED = 1 << 24


@dataclasses.dataclass(frozen=True)
class ValidationSet:
    """What a run is validated with: ids, every one of which is a target, or rows.

    Attributes:
        name: of the text or folder.
        tokens: how many ids there are.
        ids: int32, which always lie on the devices; None if there are rows.
        rows: all of which, or every ``stride``-th, have all targets.
        bytes_per_token: of UTF-8, on average, if that is known.
        share: of the run's batches that is drawn from this source.
    """

    name: str
    tokens: int
    ids: np.ndarray | None = None
    rows: Rows | None = None
    bytes_per_token: float | None = None
    share: float = 1.0


class Data(NamedTuple):
    """The data of a run; see ``Experiment``."""

    train_ids: np.ndarray | None
    train_rows: Rows | None
    validation: tuple[ValidationSet, ...]
    row: RowKind = "ids"


def read_folders(
    name: str, parts: Sequence[tuple[TokenCorpus, float]], config: TrainConfig
) -> Data:
    """Returns the data of folders: ids that fit on a device, or rows that are read.

    Args:
        name: of the folder or of the mixture.
        parts: folders, each with its share; shares add up to 1.
        config: of the run.

    Raises:
        UsageError: a validation split takes too long to evaluate, or there are two tokenizers.
        TextError: a split is shorter than a window, or does not know its documents.
    """
    if config.tokenizer is not None:
        raise UsageError(
            f"{name} holds tokens, and brings its tokenizer: leave out ", Setting("tokenizer")
        )
    row = _row_kind([corpus for corpus, _ in parts], config)
    validation = tuple(_validation_set(corpus, share, row, config) for corpus, share in parts)
    first = parts[0][0].train
    if row == "ids" and len(parts) == 1 and len(first) <= config.resident_tokens:
        return Data(first.read(0, len(first)), None, validation)
    rows = [_rows(corpus, config) for corpus, _ in parts]
    if len(rows) == 1:
        return Data(None, rows[0], validation, row)
    try:
        return Data(None, MixedRows(rows, [share for _, share in parts]), validation, row)
    except ValueError as error:
        raise UsageError(Setting("data", value=name), f": {error}") from None


def _validation_set(
    corpus: TokenCorpus, share: float, row: RowKind, config: TrainConfig
) -> ValidationSet:
    count = _evaluated(corpus, config)
    return ValidationSet(
        corpus.name,
        count,
        ids=corpus.validation.read(0, count) if row == "ids" else None,
        rows=None if row == "ids" else _rows(corpus, config, count),
        bytes_per_token=corpus.bytes_per_token,
        share=share,
    )


def _row_kind(folders: Sequence[TokenCorpus], config: TrainConfig) -> RowKind:
    if config.packing:
        return "documents"
    return "targets" if any(folder.train.has_answers for folder in folders) else "ids"


def _rows(corpus: TokenCorpus, config: TrainConfig, evaluated: int | None = None) -> Rows:
    """The rows of the training split, or of the first ids of the validation split."""
    split = corpus.train if evaluated is None else corpus.validation
    if config.packing:
        return PackedRows(split, config.window, evaluated)
    return TokenWindows(split, config.window)


def _evaluated(corpus: TokenCorpus, config: TrainConfig) -> int:
    """How many ids of the validation split are evaluated."""
    for name, split in (("training", corpus.train), ("validation", corpus.validation)):
        if len(split) <= config.window and not (config.packing and len(split)):
            raise TextError(
                f"the {name} split of {corpus.name} has {len(split):,} tokens, a window needs "
                f"{config.window + 1:,}: give more text, a larger --val-fraction to jaxformer "
                "tokenize, or a smaller ",
                Setting("block_size"),
            )
    count = len(corpus.validation)
    if config.eval_tokens is not None:
        count = min(count, max(config.eval_tokens, config.window) + 1)
    if count > max(config.resident_tokens, MOST_EVALUATED):
        raise UsageError(
            f"the validation split of {corpus.name} has {count:,} tokens, which take long to "
            "evaluate: say how many with ",
            Setting("eval_tokens"),
            f", at most {MOST_EVALUATED - 1:,}",
        )
    return count
