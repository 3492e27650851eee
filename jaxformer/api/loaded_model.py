"""``LoadedModel``: a module with its tokenizer, and the checkpoint that both came from."""

import warnings
from collections.abc import Mapping
from typing import Any, Self

import jax
import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.dual_encoder import DualEncoder
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.errors import UsageError
from jaxformer.hardware.units import format_count
from jaxformer.parameters import get_parameters
from jaxformer.porting.api import build
from jaxformer.porting.arguments import wrong_kind
from jaxformer.porting.checkpoint import Checkpoint, Tokenizer
from jaxformer.porting.generation_settings import describe_unfollowed
from jaxformer.porting.mapping.abstract_modules import MODEL_OF_CONFIG
from jaxformer.porting.text_models import in_float32
from jaxformer.speech_classifier import SpeechClassifier
from jaxformer.transformer_lm import TransformerLM
from jaxformer.vision_transformer import VisionTransformer


class LoadedModel:
    """A module with its tokenizer; see ``Model``, which says what can be done with them.

    Args:
        module: the NNX module; it may be trained further, and is saved as it then is.
        tokenizer: makes ids of text and text of ids. Without one the model reads and writes ids.

    Attributes:
        module: as given.

    Raises:
        UsageError: the module is none of the whole models, or the tokenizer none of jaxformer's.
    """

    def __init__(
        self,
        module: TransformerLM | EncoderDecoder | VisionTransformer | DualEncoder | SpeechClassifier,
        tokenizer: Tokenizer | None = None,
    ):
        if type(module) not in MODEL_OF_CONFIG.values():
            known = " or ".join(cls.__name__ for cls in MODEL_OF_CONFIG.values())
            raise UsageError(f"a Model holds a {known}: got {type(module).__name__}")
        if not isinstance(tokenizer, Tokenizer | None):
            raise wrong_kind("tokenizer", "a CharTokenizer or a HuggingFaceTokenizer", tokenizer)
        self.module = module
        self._tokenizer = tokenizer
        # Where it was loaded from, and whose names its arrays had there.
        self._source: Checkpoint | None = None
        self._origin: Mapping[str, Any] = {}

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Returns the model of an open checkpoint; see ``load``."""
        plan = checkpoint.plan()
        if type(plan.module) not in MODEL_OF_CONFIG.values():
            raise UsageError(
                f"{checkpoint.path} holds a {plan.origin.kind}, which is a part of a model: give "
                "its arrays to jaxformer.from_torch"
            )
        holds_float64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
        model = cls(build(plan if holds_float64 else in_float32(plan)))
        model._source, model._origin = checkpoint, checkpoint.origin_of(plan)
        if isinstance(model.module, TransformerLM | EncoderDecoder):
            for line in describe_unfollowed(checkpoint):
                warnings.warn(line, stacklevel=3)
        return model

    @property
    def config(
        self,
    ) -> (
        TransformerLMConfig
        | EncoderDecoderConfig
        | VisionTransformerConfig
        | DualEncoderConfig
        | SpeechClassifierConfig
    ):
        """The settings of the module."""
        return self.module.config

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer; None if the model has none.

        Raises:
            UsageError: it needs a package that is not installed.
            TextError: it does not fit the model.
        """
        if self._tokenizer is None and self._source is not None:
            config = self.config
            if isinstance(config, TransformerLMConfig):
                self._tokenizer = self._source.tokenizer(config.vocab_size or 0)
            elif isinstance(config, EncoderDecoderConfig):
                self._tokenizer = self._source.tokenizer(config.target_vocab_size)
            elif isinstance(config, DualEncoderConfig):
                self._tokenizer = self._source.tokenizer(config.text.vocab_size or 0)
        return self._tokenizer

    def __repr__(self) -> str:
        """Returns what the model is, in one line."""
        count = sum(array.size for array in get_parameters(self.module).values())
        origin = "" if self._source is None else f", from {self._source.path}"
        kind = type(self.module).__name__
        return f"<Model: {kind}, {format_count(count)} parameters{origin}>"

    def _last_ids(self) -> list[int]:
        return [] if self._source is None else self._source.last_ids()

    def _check_reads_tokens(self) -> None:
        """Checks that the model reads tokens.

        Raises:
            UsageError: it reads features.
        """
        if isinstance(self.module, SpeechClassifier):
            raise UsageError("this SpeechClassifier reads features and no text: call its module")
        if isinstance(self.config, EncoderDecoderConfig) and self.config.reads_features:
            raise UsageError(
                f"this {type(self.module).__name__} reads features and no text: give them to "
                "jaxformer.generate_target"
            )
