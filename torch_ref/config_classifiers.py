"""The settings of an encoder and decoder that gives scores to labels."""

from dataclasses import dataclass

from .config import EncoderDecoderConfig
from .config_heads import ClassifierConfig, HeadConfig


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class EncoderDecoderClassifierConfig(EncoderDecoderConfig):
    """The settings of an ``EncoderDecoderClassifier``: those of both stacks, and its classifier.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    head: HeadConfig = HeadConfig(head="none", tie_embeddings=False)
    classifier: ClassifierConfig = ClassifierConfig(classified="last")
    """What makes scores of labels of the decoder's last layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.head != "none":
            raise ValueError(f"a classifier needs head='none': got head={self.head.head!r}")
