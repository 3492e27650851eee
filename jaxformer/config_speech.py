"""The settings of models that hear: an encoder of sound with a decoder of text, or with classes."""

from dataclasses import dataclass

from .checks import check_elements, check_layers, check_positive
from .config import EncoderDecoderConfig, Initialization, TransformerConfig
from .config_heads import ClassifierConfig, HeadConfig
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

    @property
    def num_frames(self) -> int:
        """How many frames the source has."""
        return 2 * self.encoder_length

    def check_shape(self, shape: tuple[int, ...]) -> None:
        """Checks the shape of features: (B, num_features, num_frames).

        Raises:
            ValueError: it is another.
        """
        if len(shape) != 3 or shape[1:] != (self.num_features, self.num_frames):
            raise ValueError(
                f"features must be (B, {self.num_features}, {self.num_frames}): got shape "
                f"{tuple(shape)}"
            )

    def check_width(self, d_model: int) -> None:
        """Checks that convolutions and positions of this width can be made.

        Raises:
            ValueError: sinusoids have no such width, or an array would be too large.
        """
        if d_model % 2 or d_model < 4:
            raise ValueError(f"sinusoids need an even d_model above 2: got {d_model}")
        inputs = 3 * max(self.num_features, d_model)
        check_elements("3 frames of features", inputs, "d_model", d_model)
        check_elements("encoder_length", self.encoder_length, "d_model", d_model)


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
        self.features.check_width(self.d_model)
        if self.position.positions not in ("learned", "sinusoidal", "none"):
            raise ValueError(
                "positions must be rows, as the source's are: got "
                f"positions={self.position.positions!r}"
            )

    @property
    def reads_features(self) -> bool:
        """Whether the source is numbers in place of tokens."""
        return True

    @property
    def num_frames(self) -> int:
        """How many frames the source has."""
        return self.features.num_frames


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class SpeechClassifierConfig(TransformerConfig):
    """The settings of a ``SpeechClassifier``; the defaults are those of Whisper (2212.04356).

    ``context_length`` is the number of positions that the source becomes.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    num_layers: int
    """L, how many blocks."""
    features: FeatureConfig = FeatureConfig()
    """The frames of the source."""
    layer_sum: bool = False
    """Whether a trained mean of the residual streams of all layers is classified, and not the last
    alone (SUPERB, arXiv 2105.01051, section 3)."""
    classifier: ClassifierConfig = ClassifierConfig(
        classified="mean", classifier_transform=True, classifier_activation="none"
    )
    """What makes scores of labels of the mean of all positions."""
    position: PositionConfig = PositionConfig(positions="sinusoidal", sinusoid_halves=True)
    feed_forward: FeedForwardConfig = FeedForwardConfig(activation="gelu")
    block: BlockConfig = BlockConfig(block="pre_norm")
    initialization: Initialization = "normal"
    """The distribution of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_layers")
        check_layers(self, "num_layers")
        self.features.check_width(self.d_model)
        if self.context_length != self.features.encoder_length:
            raise ValueError(
                "context_length must be encoder_length: got "
                f"{self.context_length} and {self.features.encoder_length}"
            )
        if self.position.positions not in ("learned", "sinusoidal", "none"):
            raise ValueError(
                f"positions of sound must be rows: got positions={self.position.positions!r}"
            )
        if self.attention.sliding_window is not None:
            raise ValueError(f"sound has no sliding window: got {self.attention.sliding_window}")

    @property
    def projected_width(self) -> int:
        """The width of the layer before the scores: ``classifier_width`` where it is given."""
        given = self.classifier.classifier_width
        return self.d_model if given is None else given
