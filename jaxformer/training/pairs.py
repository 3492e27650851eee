"""What a run of sources and targets trains on: rows of pairs, and what a model puts around them."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jaxformer.data.token_folders import TokenCorpus
from jaxformer.data.tokenizers import HuggingFaceTokenizer
from jaxformer.errors import Setting, TextError, UsageError
from jaxformer.pairs import PairRows, Pairs
from jaxformer.sampling import MixedRows
from jaxformer.training.config import PairTrainConfig
from jaxformer.training.data import MOST_EVALUATED, Data, ValidationSet


def begin_targets(
    begin: Sequence[int], first_ids: Sequence[int], tokenizer: Any, source: str
) -> tuple[int, ...]:
    """Returns the ids that every target begins with, as transformers makes them of a text.

    They are the id that the decoder starts with, and the one that always comes first; without
    that one, what the tokenizer puts before a text, if that is no language.

    Args:
        begin: what the model's files name, one id or two.
        first_ids: the id that begins every text, as its files name it.
        tokenizer: of the model.
        source: the model's name.

    Raises:
        UsageError: they are not known.
    """
    if not begin:
        raise UsageError(
            f"{source} does not say what its targets begin with (decoder_start_token_id in "
            "config.json or generation_config.json): give the ids with ",
            Setting("target_begin"),
        )
    before, _ = _around(tokenizer)
    if len(begin) > 1 or not before:
        return tuple(begin)
    if before != list(first_ids):
        raise UsageError(
            f"the tokenizer of {source} puts {before} before every text, such as its language, and "
            "its files do not say what targets begin with: give the ids with ",
            Setting("target_begin"),
        )
    return (*begin, *before)


def read_pairs(
    name: str,
    parts: Sequence[tuple[TokenCorpus, float]],
    config: PairTrainConfig,
    tokenizer: Any,
    last_ids: Sequence[int],
) -> tuple[PairTrainConfig, Data]:
    """Returns the settings, with the lengths of rows, and the data of folders.

    Args:
        name: of the folder or of the mixture.
        parts: folders, each with its share; shares add up to 1.
        config: of the run, with ``target_begin``.
        tokenizer: of the model.
        last_ids: ids with which the model ends a text; none if that is not known.

    Raises:
        TextError: a folder does not say what answers are, or does not end them as the model does;
            a source or target is too long.
        UsageError: the validation split takes too long to evaluate.
    """
    if config.tokenizer is not None:
        raise UsageError(
            f"{name} holds tokens, and brings its tokenizer: leave out ", Setting("tokenizer")
        )
    before, after = _around(tokenizer)
    found = []
    for corpus, _ in parts:
        _check_evaluated(corpus, config)
        _check_end(corpus, last_ids)
        find = functools.partial(
            Pairs,
            begin=config.target_begin,
            before=before,
            after=after,
            opening=len(_around(corpus.tokenizer)[0]),
        )
        found.append((find(corpus.train), find(corpus.validation, limit=config.eval_tokens)))
    config = _fill_in_lengths(config, [pairs for each in found for pairs in each])
    target_length, source_length = config.row_lengths

    def rows(pairs: Pairs) -> PairRows:
        try:
            return PairRows(pairs, source_length, target_length, truncate=config.truncate)
        except TextError:
            raise
        except ValueError as error:
            raise UsageError(str(error)) from None

    train = [rows(each) for each, _ in found]
    validation = tuple(
        ValidationSet(corpus.name, int(pairs.target_lengths.sum()), rows=rows(pairs), share=share)
        for (corpus, share), (_, pairs) in zip(parts, found, strict=True)
    )
    if len(train) == 1:
        return config, Data(None, train[0], validation, "pairs")
    try:
        mixed = MixedRows(train, [share for _, share in parts])
    except ValueError as error:
        raise UsageError(Setting("data", value=name), f": {error}") from None
    return config, Data(None, mixed, validation, "pairs")


def _around(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids before and after every text; none if tokens are characters or unknown."""
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.around_every_text()
    return [], []


def _fill_in_lengths(config: PairTrainConfig, found: Sequence[Pairs]) -> PairTrainConfig:
    """The settings with lengths: those of the longest, as far as the model has room for them."""
    room = config.model.context_length
    source_length = min(room, max(pairs.longest_source for pairs in found))
    target_length = min(room, max(pairs.longest_target for pairs in found))
    return dataclasses.replace(
        config,
        source_length=config.source_length or source_length,
        block_size=config.block_size or target_length,
    )


def _check_evaluated(corpus: TokenCorpus, config: PairTrainConfig) -> None:
    count = min(len(corpus.validation), config.eval_tokens or len(corpus.validation))
    if count > MOST_EVALUATED:
        raise UsageError(
            f"the validation split of {corpus.name} has {count:,} tokens, which take long to "
            "evaluate: say how many with ",
            Setting("eval_tokens"),
            f", at most {MOST_EVALUATED:,}",
        )


def _check_end(corpus: TokenCorpus, last_ids: Sequence[int]) -> None:
    """Checks that an answer ends with an id with which the model ends a text."""
    last = int(corpus.train.read(len(corpus.train) - 1, 1)[0])
    if last_ids and last not in last_ids:
        raise TextError(
            f"the answers of {corpus.name} end with id {last}, and the model ends its targets with "
            f"{' or '.join(map(str, last_ids))}: make the folder with that --end-of-text"
        )
