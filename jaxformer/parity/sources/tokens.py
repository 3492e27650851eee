"""What both models of a comparison read: random tokens, or those of a text."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Literal

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import Setting, TextError, UsageError
from jaxformer.parity.sources.checkpoints import Source

DEFAULT_LENGTH = 256
# No tokenizer makes fewer tokens than one of so many characters of a whole text.
CHARACTERS_A_TOKEN = 32


@dataclasses.dataclass(frozen=True)
class TextInput:
    """A text for both models.

    Attributes:
        name: by which messages call it.
        text: the text.
        unknown: what to do with characters that the models do not know.
    """

    name: str
    text: str
    unknown: Literal["error", "skip", "replace"] = "error"


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """An endless stream of token ids.

    Attributes:
        draw: returns ids from a position of the stream on, given that position, how many, and the
            number of tokens that the models know.
        note: where the ids come from, in words.
    """

    draw: Callable[[int, int, int], np.ndarray]
    note: str

    def window(self, place: int, batch: int, length: int, vocab_size: int) -> np.ndarray:
        """Returns consecutive texts as int64 (B, T).

        Args:
            place: position of the first id.
            batch: B.
            length: T.
            vocab_size: V.
        """
        return self.draw(place, batch * length, vocab_size).reshape(batch, length)


def random_tokens(seed: int, avoided: Collection[int]) -> TokenStream:
    """Returns random ids, which are a function of the seed and their position.

    Args:
        seed: any integer from 0 on.
        avoided: ids that are never drawn.
    """

    def draw(place: int, count: int, vocab_size: int) -> np.ndarray:
        allowed = np.array([i for i in range(vocab_size) if i not in avoided])
        return allowed[np.random.default_rng((seed, place)).integers(0, len(allowed), count)]

    return TokenStream(draw, f"random tokens, seed {seed}")


def text_tokens(text: TextInput, needed: int, sources: tuple[Source, Source]) -> TokenStream:
    """Returns the ids of a text, by the tokenizer or vocabulary of A, or else of B.

    Args:
        text: the text.
        needed: how many ids there must be.
        sources: A and B.

    Raises:
        UsageError: neither has a tokenizer.
        TextError: the text is too short, or holds what the tokenizer or the models do not know.
    """
    data = Setting("data")
    for source in sources:
        vocab_size = vocabulary_size(source)
        tokenizer = source.checkpoint.tokenizer(vocab_size)
        if tokenizer is not None:
            break
    else:
        raise UsageError(
            f"neither {sources[0].path} nor {sources[1].path} has a tokenizer or a vocabulary to "
            "read a text with: leave out ",
            data,
        )
    for part in (text.text[: needed * CHARACTERS_A_TOKEN], text.text):
        ids = np.asarray(tokenizer.encode(part, unknown=text.unknown), np.int64)
        if len(ids) >= needed:
            break
    else:
        raise TextError(
            data,
            f" {text.name} has {len(ids)} tokens and {needed} are needed: give a longer text, or "
            "smaller ",
            Setting("batch"),
            " and ",
            Setting("length"),
        )
    if ids.size and int(ids.max()) >= vocab_size:
        raise TextError(
            data,
            f" {text.name}: the tokenizer of {source.path} gives id {int(ids.max())}, which is "
            f"outside the model's {vocab_size} tokens",
        )

    def draw(place: int, count: int, vocab_size: int) -> np.ndarray:
        return ids[np.arange(place, place + count) % len(ids)]

    return TokenStream(draw, f"{text.name}, {len(ids)} tokens by {source.path}")


def chosen_length(length: int | None, context_length: int) -> int:
    """Returns T, the number of tokens of each text; by default 256, or as many as fit.

    Raises:
        UsageError: the wanted length is more than the models hold.
    """
    if length is None:
        return min(DEFAULT_LENGTH, context_length)
    if length > context_length:
        raise UsageError(Setting("length"), f" {length}: the models hold {context_length} tokens")
    return length


def vocabulary_size(source: Source) -> int:
    """Returns V of a language model.

    Raises:
        UsageError: the source is an encoder and a decoder.
    """
    config = source.config
    if not isinstance(config, TransformerLMConfig) or config.vocab_size is None:
        raise UsageError(
            f"{source.path} holds an encoder and a decoder, each with its own tokens: leave out ",
            Setting("data"),
            ", and use ",
            Setting("mode"),
            " forward or grad",
        )
    return config.vocab_size
