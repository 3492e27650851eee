"""The settings of two models side by side, of which one reads texts and the other sees images."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_elements, check_numbers, check_positive
from .config import TransformerLMConfig
from .config_tree import Settings
from .config_vision import VisionTransformerConfig

TextVector = Literal["end_token", "highest_token", "pooler"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class DualEncoderConfig(Settings):
    """The settings of a ``DualEncoder``: CLIP and SigLIP are values of it.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    text: TransformerLMConfig
    """The model that reads texts; it has no head."""
    vision: VisionTransformerConfig
    """The model that sees images; it has no classes."""
    projection_width: int | None = None
    """The width that both vectors are projected to, without biases (CLIP); default they are not."""
    text_vector: TextVector = "end_token"
    """What a text becomes: its first end token's output, that of the token with the highest id (the
    first CLIP), or what the text model pools (SigLIP)."""
    end_token: int | None = None
    """The id of the token that ends a text."""
    similarity_bias: bool = False
    """Whether a trained number is added to similarities (SigLIP)."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choice(self, "text_vector", get_args(TextVector))
        check_positive(self, "projection_width")
        width = max(self.text.d_model, self.vision.vector_width)
        check_elements("projection_width", self.projection_width or 0, "d_model", width)
        if self.text.head.head != "none" or self.vision.image_head.num_labels:
            raise ValueError(
                "the models of texts and of images have neither head nor classes: got "
                f"text.head={self.text.head.head!r}, "
                f"vision.num_labels={self.vision.image_head.num_labels}"
            )
        if self.text.head.pooler != (self.text_vector == "pooler"):
            raise ValueError(
                "text_vector='pooler' needs text.pooler=True, and nothing else does: got "
                f"text_vector={self.text_vector!r}, text.pooler={self.text.head.pooler}"
            )
        is_known = self.end_token is not None and (
            0 <= self.end_token < (self.text.vocab_size or self.end_token + 1)
        )
        if (self.text_vector == "end_token") != is_known:
            raise ValueError(
                "text_vector='end_token' needs an end_token in [0, vocab_size), and nothing else "
                f"does: got text_vector={self.text_vector!r}, end_token={self.end_token}, "
                f"text.vocab_size={self.text.vocab_size}"
            )
        widths = (self.text.d_model, self.vision.vector_width)
        if self.projection_width is None and widths[0] != widths[1]:
            raise ValueError(
                "without a projection_width texts and images become vectors of one width: got "
                f"{widths[0]} and {widths[1]}"
            )

    @property
    def context_length(self) -> int:
        """The most tokens that fit into either model."""
        return max(self.text.context_length, self.vision.context_length)
