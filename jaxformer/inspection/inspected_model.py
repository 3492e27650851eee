"""The model that is looked into, and the text that it reads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import Setting, UsageError
from jaxformer.generation import generate
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import Checkpoint, Tokenizer
from jaxformer.porting.text_models import in_float32, plan_text_model
from jaxformer.transformer_lm import TransformerLM

Numbers = dict[str, Any]
Unknown = Literal["error", "skip", "replace"]


@dataclass(frozen=True)
class InspectedModel:
    """A trained model in evaluation mode.

    Attributes:
        module: the model.
        known_tokenizer: of its text, if that is known.
        target_ids: see ``Checkpoint.target_ids``.
        last_ids: see ``Checkpoint.last_ids``.
    """

    module: TransformerLM | EncoderDecoder
    known_tokenizer: Tokenizer | None
    target_ids: tuple[Sequence[int], int | None] = ((), None)
    last_ids: tuple[int, ...] = ()

    @classmethod
    def load(cls, checkpoint: Checkpoint) -> "InspectedModel":
        """Reads the model in a checkpoint.

        Raises:
            UsageError: it holds something else than a whole model.
            CheckpointError: it is damaged.
        """
        plan = plan_text_model(checkpoint)
        config = plan.module.config
        is_pair = isinstance(config, EncoderDecoderConfig)
        size = config.target_vocab_size if is_pair else config.vocab_size
        return cls(
            build(in_float32(plan)),
            checkpoint.tokenizer(size),
            checkpoint.target_ids(),
            tuple(checkpoint.last_ids()),
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model's text.

        Raises:
            UsageError: there is none.
        """
        if self.known_tokenizer is None:
            raise UsageError(
                "this inspection needs text, and the model has neither a vocabulary nor a "
                "tokenizer.json"
            )
        return self.known_tokenizer

    @property
    def model(self) -> TransformerLM:
        """The language model.

        Raises:
            UsageError: it is an encoder and decoder.
        """
        if isinstance(self.module, EncoderDecoder):
            raise UsageError(
                "this inspection is of language models: of an encoder and decoder, inspect "
                "attention alone is"
            )
        return self.module

    @property
    def config(self) -> TransformerLMConfig:
        """The language model's settings."""
        return self.model.config


def check_ids(name: str, ids: np.ndarray, vocab_size: int | None) -> None:
    """Checks that a model has all ids of a text; a tokenizer of another model may make more.

    Args:
        name: of the setting that holds the text.
        ids: of it.
        vocab_size: of the model.

    Raises:
        UsageError: an id is outside the vocabulary.
    """
    size = vocab_size or 0
    outside = ids[(ids < 0) | (ids >= size)]
    if len(outside):
        raise UsageError(
            Setting(name),
            f" has id {outside[0]}, which is outside the model's vocabulary of {size}",
        )


def text_and_ids(run: InspectedModel, text: str | None, unknown: Unknown) -> tuple[str, np.ndarray]:
    """Returns a text as a language model reads it, and its ids (T,).

    Args:
        run: the model.
        text: None lets the model write one.
        unknown: see ``CharTokenizer.encode``.

    Raises:
        UsageError: the text is longer than the context, there is no tokenizer, or it is that of
            another model.
        TextError: it has a character that the model does not know.
    """
    context = run.config.context_length
    if text is None:
        start = run.tokenizer.encode("\n", unknown="replace")
        count = min(40, context)
        ids = generate(run.model, start[None], count, temperature=0.8, key=jax.random.key(0))[0]
        ids = ids[ids < run.tokenizer.vocabulary_size()]
        return run.tokenizer.decode(ids), ids
    ids = run.tokenizer.encode(text, unknown=unknown)
    check_ids("text", ids, run.config.vocab_size)
    if not 1 <= len(ids) <= context:
        raise UsageError(
            Setting("text"), f" must have 1 to {context} tokens to read: got {len(ids)}"
        )
    return run.tokenizer.decode(ids), ids
