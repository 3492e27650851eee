"""The encoder of sound and decoder of text: Whisper, by its settings."""

import torch

from torch_ref.config_speech import SpeechTransformerConfig
from torch_ref.convolutions import SpeechStem
from torch_ref.encoder_decoder import EncoderDecoder
from torch_ref.initializers import initialize


class SpeechTransformer(EncoderDecoder):
    """Computes logits of target tokens from frames of features and target tokens (2212.04356).

    It is an ``EncoderDecoder`` whose ``source`` is a mel spectrogram: features (B, C, T), T frames
    of C numbers. Two convolutions, ``stem``, make T / 2 positions of them, which get sinusoids.

    Args:
        config: the settings.
        generator: where the initial weights come from; default torch's global one.
    """

    config: SpeechTransformerConfig

    def __init__(
        self, config: SpeechTransformerConfig, *, generator: torch.Generator | None = None
    ):
        super().__init__(config, generator=generator)
        part, width = config.features, config.d_model
        self.stem = SpeechStem(part.num_features, width)
        initialize(self.stem, config.initialization, config.num_encoder_layers, generator)

    def embed_source(self, source: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Returns the input (B, S, D) of the encoder's first block.

        Args:
            source: as many frames as ``config.num_frames``.
            positions: of the rows that the frames become; default 0 … S - 1.

        Raises:
            ValueError: the features have another shape.
        """
        part = self.config.features
        part.check_shape(source.shape)
        x: torch.Tensor = self.stem(source)
        assert self.source_position_embedding is not None
        rows = self.source_position_embedding(part.encoder_length, positions)
        return x + rows.to(x.dtype)
