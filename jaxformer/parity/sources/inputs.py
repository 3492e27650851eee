"""What both models of ``jaxformer verify`` read: ids of texts, images or features of speech."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
from jaxformer.config_dual_encoder import DualEncoderConfig
from jaxformer.config_speech import (
    FeatureConfig,
    SpeechClassifierConfig,
    SpeechTransformerConfig,
)
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.parity.sources.tokens import TokenStream


def drawn_instead_of_text(config: Any) -> str:
    """Returns what a model reads that reads no text: "images", "features", or "" if it does."""
    if isinstance(config, SpeechClassifierConfig):
        return "features"
    return "images" if isinstance(config, VisionTransformerConfig) else ""


@dataclass(frozen=True)
class InputSource:
    """Draws the inputs of a pass.

    Attributes:
        tokens: where ids come from.
        batch: B, the number of texts.
        length: T, the number of tokens of each.
        seed: of images and features.
    """

    tokens: TokenStream
    batch: int
    length: int
    seed: int

    def draw(self, config: Any, vocab_size: int, end_token: int | None = None) -> list[np.ndarray]:
        """Returns what a model is called with, in order.

        Args:
            config: of the model.
            vocab_size: V, the tokens that both models know, of a language model.
            end_token: of a classifier of an encoder and a decoder, which scores this token.

        Returns:
            ids (B, T); for an encoder and a decoder, those of source and target; images
            (B, C, H, W), features (B, F, T), or several of these.
        """
        if isinstance(config, VisionTransformerConfig):
            return [self._images(config)]
        if isinstance(config, DualEncoderConfig):
            length = min(self.length, config.text.context_length)
            ids = self.tokens.window(0, self.batch, length, config.text.vocab_size or 1)
            return [ids, self._images(config.vision)]
        if isinstance(config, TransformerLMConfig):
            return [self.tokens.window(0, self.batch, self.length, vocab_size)]
        if isinstance(config, SpeechTransformerConfig):
            ids = self.tokens.window(0, self.batch, self.length, config.target_vocab_size)
            return [self._sound(config.features), ids]
        if isinstance(config, SpeechClassifierConfig):
            return [self._sound(config.features)]
        if isinstance(config, EncoderDecoderClassifierConfig):
            return self._text_as_both(config, end_token)
        return self._source_and_target(config)

    def _images(self, config: VisionTransformerConfig) -> np.ndarray:
        part = config.patches
        shape = (self.batch, part.num_channels, part.image_height, part.image_width)
        return np.random.default_rng(self.seed).standard_normal(shape)

    def _sound(self, part: FeatureConfig) -> np.ndarray:
        shape = (self.batch, part.num_features, part.num_frames)
        return np.random.default_rng(self.seed).standard_normal(shape)

    def _text_as_both(
        self, config: EncoderDecoderClassifierConfig, end_token: int | None
    ) -> list[np.ndarray]:
        """Returns a text that ends with the end token, and itself shifted."""
        size = min(config.source_vocab_size, config.target_vocab_size)
        ids = np.array(self.tokens.window(0, self.batch, self.length, size))
        if end_token is not None and 0 <= end_token < size:
            ids[ids == end_token] = (end_token + 1) % size
            ids[:, -1] = end_token
        return [ids, np.concatenate((ids[:, -1:], ids[:, :-1]), axis=1)]

    def _source_and_target(self, config: EncoderDecoderConfig) -> list[np.ndarray]:
        # Different lengths, so that a mix-up of the two is found.
        lengths = self.length, max(1, self.length - self.length // 4)
        sizes = config.source_vocab_size, config.target_vocab_size
        return [
            self.tokens.window(place, self.batch, length, size)
            for place, (length, size) in enumerate(zip(lengths, sizes, strict=True))
        ]
