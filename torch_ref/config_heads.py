"""The settings of what stands behind the last block: an output head, or a classifier."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_positive
from .config_parts import PlainActivation
from .config_tree import Part

HeadKind = Literal["linear", "masked_lm", "none"]
PooledToken = Literal["first", "last"]
Classified = Literal["first", "last", "last_place", "mean", "mean_of_places", "tokens"]
ClassifierActivation = Literal[PlainActivation, "tanh", "none"]


@dataclass(frozen=True, kw_only=True)
class HeadConfig(Part):
    """The settings of what makes logits of the last layer.

    Raises:
        ValueError: a setting is out of its range, or does not fit the others.
    """

    head: HeadKind = "linear"
    """What makes logits of the last layer: a matrix, BERT's masked-LM head, or nothing."""
    tie_embeddings: bool = True
    """Whether the output head's matrix is the token embedding."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    head_transform_bias: bool = True
    """Whether the matrix of BERT's masked-LM head has a bias (ModernBERT: not)."""
    head_activation: PlainActivation | None = None
    """The activation of BERT's masked-LM head; default the feed-forward's (RoBERTa: gelu)."""
    logit_scale: float | None = None
    """What logits are multiplied by; default 1."""
    logit_soft_cap: float | None = None
    """The bound on logits, by tanh; default none."""
    final_dropout: float = 0.0
    """Rate on what leaves the last norm of a stack (T5)."""
    pooler: bool = False
    """Whether one token's output can be pooled: a matrix makes a vector of it (BERT)."""
    pooled_token: PooledToken = "first"
    """Which token that is (SigLIP: the last)."""
    pooler_tanh: bool = True
    """Whether tanh follows the pooler's matrix (SigLIP: not)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "head", get_args(HeadKind))
        check_choice(self, "pooled_token", get_args(PooledToken))
        check_positive(self, "logit_soft_cap", "logit_scale")
        if self.head_activation is not None:
            check_choice(self, "head_activation", get_args(PlainActivation))
        changes = (self.logit_scale, self.logit_soft_cap)
        if self.head == "none" and (self.head_bias or changes != (None, None)):
            raise ValueError(
                "head='none' has neither bias nor scale nor cap: got "
                f"head_bias={self.head_bias}, logit_scale={self.logit_scale}, "
                f"logit_soft_cap={self.logit_soft_cap}"
            )


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(Part):
    """The settings of what makes scores of labels of the last layer.

    Raises:
        ValueError: a setting is out of its range, or there is no label.
    """

    labels: tuple[str, ...] = ("LABEL_0", "LABEL_1")
    """The names of the labels, in the order of their scores."""
    classified: Classified = "first"
    """What gets scores: a text by its first token (BERT), its last (GPT-2) or the mean of all, or
    each token by itself. ``last_place`` and ``mean_of_places`` are the same as ``last`` and
    ``mean`` with padding counted (RoFormer)."""
    classifier_transform: bool = False
    """Whether a layer with an activation stands before the scores (BERT's pooler)."""
    classifier_width: int | None = None
    """The width of what that layer makes; default d_model (Whisper: 256)."""
    classifier_activation: ClassifierActivation = "tanh"
    """The activation of that layer."""
    classifier_transform_bias: bool = True
    """Whether that layer has a bias (ModernBERT: not)."""
    classifier_norm: bool = False
    """Whether a norm follows that layer (ModernBERT)."""
    classifier_bias: bool = True
    """Whether scores have a bias."""
    classifier_input_dropout: float = 0.0
    """Rate on what is classified."""
    classifier_dropout: float = 0.0
    """Rate on what scores are made of."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "classified", get_args(Classified))
        check_choice(self, "classifier_activation", get_args(ClassifierActivation))
        check_positive(self, "classifier_width")
        if not self.labels or not all(isinstance(label, str) for label in self.labels):
            raise ValueError(f"labels must be one name or more: got {self.labels!r}")
        if self.classifier_norm and not self.classifier_transform:
            raise ValueError("classifier_norm needs classifier_transform=True: got False")
        if self.classifier_width is not None and not self.classifier_transform:
            raise ValueError("classifier_width needs classifier_transform=True: got False")
