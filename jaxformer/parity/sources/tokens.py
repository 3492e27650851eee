"""What both models of a comparison read: random tokens, or those of a text."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from jaxformer.cli.verify_options import VerifyOptions
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import TextError, UsageError
from jaxformer.parity.sources.checkpoints import Source

DEFAULT_LENGTH = 256
# No tokenizer makes fewer tokens than one of so many characters of a whole text.
CHARACTERS_A_TOKEN = 32


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Ids without an end.

    Attributes:
        draw: gives that many ids from a place on: the place, how many, the number of tokens known.
        note: where they come from, in words.
    """

    draw: Callable[[int, int, int], np.ndarray]
    note: str

    def window(self, place: int, batch: int, length: int, vocab_size: int) -> np.ndarray:
        """Texts one after the other, from a place on: int64 (B, T).

        Args:
            place: of the first id.
            batch: B.
            length: T.
            vocab_size: V.
        """
        return self.draw(place, batch * length, vocab_size).reshape(batch, length)


def random_tokens(seed: int, avoided: Collection[int]) -> Tokens:
    """Random ids.

    Args:
        seed: what they are a function of, beside their place.
        avoided: ids that are never drawn.
    """

    def draw(place: int, count: int, vocab_size: int) -> np.ndarray:
        allowed = np.array([i for i in range(vocab_size) if i not in avoided])
        return allowed[np.random.default_rng((seed, place)).integers(0, len(allowed), count)]

    return Tokens(draw, f"random tokens, seed {seed}")


def text_tokens(text: str, needed: int, sources: tuple[Source, Source], options: Any) -> Tokens:
    """The ids of a text, with the tokenizer or the vocabulary of A, or else of B.

    Args:
        text: the text.
        needed: how many ids there must be.
        sources: A and B.
        options: see ``VerifyOptions``.

    Raises:
        UsageError: neither has a tokenizer.
        TextError: the text is too short, or holds what the tokenizer or the models do not know.
    """
    for source in sources:
        vocab_size = vocabulary_size(source)
        tokenizer = source.checkpoint.tokenizer(vocab_size)
        if tokenizer is not None:
            break
    else:
        raise UsageError(
            f"neither {sources[0].path} nor {sources[1].path} has a tokenizer or a vocabulary to "
            "read a text with: leave out --data"
        )
    for part in (text[: needed * CHARACTERS_A_TOKEN], text):
        ids = np.asarray(tokenizer.encode(part, unknown=options.unknown), np.int64)
        if len(ids) >= needed:
            break
    else:
        raise TextError(
            f"--data {options.data} has {len(ids)} tokens and {needed} are needed: give a longer "
            "text, or smaller --batch and --length"
        )
    if ids.size and int(ids.max()) >= vocab_size:
        raise TextError(
            f"--data {options.data}: the tokenizer of {source.path} gives id {int(ids.max())}, "
            f"which is outside the model's {vocab_size} tokens"
        )

    def draw(place: int, count: int, vocab_size: int) -> np.ndarray:
        return ids[np.arange(place, place + count) % len(ids)]

    return Tokens(draw, f"{options.data}, {len(ids)} tokens by {source.path}")


def chosen_length(options: VerifyOptions, context_length: int) -> int:
    """T: how many tokens each text has.

    Raises:
        UsageError: more are asked for than fit.
    """
    if options.length is None:
        return min(DEFAULT_LENGTH, context_length)
    if options.length > context_length:
        raise UsageError(f"--length {options.length}: the models hold {context_length} tokens")
    return options.length


def vocabulary_size(source: Source) -> int:
    """V of a language model.

    Raises:
        UsageError: it is none.
    """
    config = source.config
    if not isinstance(config, TransformerLMConfig) or config.vocab_size is None:
        raise UsageError(
            f"{source.path} holds an encoder and a decoder, each with tokens of its own: "
            "leave out --data, and use --mode forward or grad"
        )
    return config.vocab_size
