"""The settings of an encoder of sound and a decoder of text."""

from dataclasses import dataclass

from .checks import check_elements, check_positive
from .config import EncoderDecoderConfig, Initialization
from .config_heads import HeadConfig
from .config_parts import BlockConfig, FeedForwardConfig
from .config_positions import PositionConfig
from .config_tree import Part


@dataclass(frozen=True, kw_only=True)
class FeatureConfig(Part):
    """The settings of a source that is frames of numbers in place of tokens.

    Raises:
        ValueError: a setting is out of its range.
    """

    num_features: int = 80
    """How many numbers a frame has: the bands of a mel spectrogram."""
    encoder_length: int = 1500
    """How many positions the source becomes; it has twice as many frames."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_features", "encoder_length")


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class SpeechTransformerConfig(EncoderDecoderConfig):
    """The settings of a ``SpeechTransformer``; the defaults are those of Whisper (2212.04356).

    ``context_length`` and the positions are those of the target; the source has sinusoids.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    source_vocab_size: int = 0
    """There are no source tokens: always 0."""
    features: FeatureConfig = FeatureConfig()
    """The frames of the source."""
    position: PositionConfig = PositionConfig(positions="learned")
    feed_forward: FeedForwardConfig = FeedForwardConfig(activation="gelu")
    block: BlockConfig = BlockConfig(block="pre_norm")
    head: HeadConfig = HeadConfig(tie_embeddings=True)
    initialization: Initialization = "normal"
    """The distribution of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.source_vocab_size:
            raise ValueError(
                "source_vocab_size must be 0 where the source is features: got "
                f"{self.source_vocab_size}"
            )
        if self.embedding.shared_embedding or self.embedding.embedding_norm:
            raise ValueError(
                "features have no embedding: got "
                f"shared_embedding={self.embedding.shared_embedding}, "
                f"embedding_norm={self.embedding.embedding_norm}"
            )
        if self.d_model % 2 or self.d_model < 4:
            raise ValueError(f"sinusoids need an even d_model above 2: got {self.d_model}")
        if self.position.positions not in ("learned", "sinusoidal", "none"):
            raise ValueError(
                "positions must be rows, as the source's are: got "
                f"positions={self.position.positions!r}"
            )
        inputs = 3 * max(self.features.num_features, self.d_model)
        check_elements("3 frames of features", inputs, "d_model", self.d_model)
        check_elements("encoder_length", self.features.encoder_length, "d_model", self.d_model)

    @property
    def reads_features(self) -> bool:
        """Whether the source is numbers in place of tokens."""
        return True

    @property
    def num_frames(self) -> int:
        """How many frames the source has."""
        return 2 * self.features.encoder_length
