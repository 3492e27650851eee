"""The encoder of sound and decoder of text: Whisper, by its settings."""

from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.config_speech import SpeechTransformerConfig
from jaxformer.convolutions import SpeechStem
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.initializers import initialize


class SpeechTransformer(EncoderDecoder):
    """Computes logits of target tokens from frames of features and target tokens (2212.04356).

    It is an ``EncoderDecoder`` whose ``source`` is a mel spectrogram: features (B, C, T), T frames
    of C numbers. Two convolutions, ``stem``, make T / 2 positions of them, which get sinusoids.

    Args:
        config: the settings.
        rngs: where the initial weights come from.
    """

    config: SpeechTransformerConfig

    def __init__(self, config: SpeechTransformerConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        part, width = config.features, config.d_model
        self.stem = SpeechStem(part.num_features, width, rngs=rngs)
        initialize(self.stem, config.initialization, config.num_encoder_layers, rngs)

    def embed_source(
        self, source: Float[Array, "B C T"], positions: Int[Array, "B S"] | None
    ) -> Float[Array, "B S D"]:
        """Returns the input of the encoder's first block.

        Args:
            source: as many frames as ``config.num_frames``.
            positions: of the rows that the frames become; default 0 … S - 1.

        Raises:
            ValueError: the features have another shape.
        """
        part = self.config.features
        part.check_shape(source.shape)
        x = self.stem(source)
        assert self.source_position_embedding is not None
        rows = self.source_position_embedding(part.encoder_length, positions)
        return x + rows.astype(x.dtype)
