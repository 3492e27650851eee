"""The settings of models that see: of patches, of what is made of the last layer, of the whole."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_elements, check_layers, check_not_negative, check_positive
from .config import TransformerConfig
from .config_tree import Part

ImagePooling = Literal["first", "first_and_mean", "attention"]
ClassesFrom = Literal["vector", "patches"]


@dataclass(frozen=True, kw_only=True)
class PatchConfig(Part):
    """The settings of images, and of the patches that they are cut into.

    Raises:
        ValueError: a setting is out of its range, or patches do not fit into an image.
    """

    image_height: int = 224
    """How many rows of pixels an image has."""
    image_width: int = 224
    """How many columns of pixels an image has."""
    num_channels: int = 3
    """How many numbers a pixel has."""
    patch_height: int = 16
    """How many rows of pixels a patch has; what is left at the lower edge is not seen."""
    patch_width: int = 16
    """How many columns of pixels a patch has; what is left at the right edge is not seen."""
    patch_bias: bool = True
    """Whether the projection of patches has a bias."""
    class_token: bool = True
    """Whether a trained row stands before the patches (ViT)."""
    distillation_token: bool = False
    """Whether another one stands behind it (DeiT)."""
    mask_token: bool = False
    """Whether a trained row can stand in place of patches (DINOv2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "image_height", "image_width", "num_channels")
        check_positive(self, "patch_height", "patch_width")
        if self.patch_height > self.image_height or self.patch_width > self.image_width:
            raise ValueError(
                "a patch must fit into an image: got "
                f"{self.patch_height}x{self.patch_width} of {self.image_height}x{self.image_width}"
            )
        if self.distillation_token and not self.class_token:
            raise ValueError("distillation_token needs class_token=True: got class_token=False")

    @property
    def num_patches(self) -> int:
        """P, how many patches an image has."""
        rows, columns = self.image_height // self.patch_height, self.image_width // self.patch_width
        return rows * columns

    @property
    def num_tokens(self) -> int:
        """T, how many tokens an image becomes: its patches and what stands before them."""
        return self.num_patches + self.class_token + self.distillation_token


@dataclass(frozen=True, kw_only=True)
class ImageHeadConfig(Part):
    """The settings of what is made of the last layer of a model that sees.

    Raises:
        ValueError: a setting is out of its range.
    """

    pooling: ImagePooling = "first"
    """What an image becomes: its first token, that and the mean of its patches (DINOv2), or what a
    trained query attends to (SigLIP)."""
    image_pooler: bool = False
    """Whether a matrix and tanh follow the pooling (ViT)."""
    pooled_norm: bool = False
    """Whether what an image becomes is normalised (CLIP)."""
    num_labels: int = 0
    """How many classes images are sorted into, or the width that they are projected to; 0 makes
    neither."""
    image_labels: tuple[str, ...] = ()
    """The names of the classes, in the order of their scores; default they have none."""
    label_bias: bool = True
    """Whether that projection has a bias (CLIP: not)."""
    classes_from: ClassesFrom = "vector"
    """What the classes are scored by: what an image becomes, or the mean of its patches (CLIP and
    SigLIP, where they sort images)."""
    distillation_head: bool = False
    """Whether the distillation token is projected too, by a matrix of its own; what an image gets
    is the mean of both (DeiT)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "pooling", get_args(ImagePooling))
        check_choice(self, "classes_from", get_args(ClassesFrom))
        check_not_negative(self, "num_labels")
        if self.image_labels and len(self.image_labels) != self.num_labels:
            raise ValueError(
                f"image_labels must be num_labels={self.num_labels} names, or none: got "
                f"{self.image_labels!r}"
            )
        if self.image_pooler and self.num_labels:
            raise ValueError(
                f"image_pooler is of models without classes: got num_labels={self.num_labels}"
            )
        if self.classes_from == "patches" and (not self.num_labels or self.distillation_head):
            raise ValueError(
                "classes_from='patches' needs num_labels above 0, and no distillation_head: got "
                f"num_labels={self.num_labels}, distillation_head={self.distillation_head}"
            )
        if self.distillation_head and (self.pooling != "first" or not self.num_labels):
            raise ValueError(
                "distillation_head needs pooling='first', and num_labels above 0: got "
                f"pooling={self.pooling!r}, num_labels={self.num_labels}"
            )


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class VisionTransformerConfig(TransformerConfig):
    """The settings of a ``VisionTransformer``: ViT, DeiT and DINOv2 are values of it.

    ``context_length`` is the number of tokens that an image becomes.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    num_layers: int
    """L, how many blocks."""
    patches: PatchConfig = PatchConfig()
    """Images, and the patches that they are cut into."""
    image_head: ImageHeadConfig = ImageHeadConfig()
    """What is made of the last layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_layers")
        check_layers(self, "num_layers")
        part = self.patches
        pixels = part.num_channels * part.patch_height * part.patch_width
        check_elements("pixels of a patch", pixels, "d_model", self.d_model)
        if self.image_head.distillation_head and not part.distillation_token:
            raise ValueError(
                "distillation_head needs distillation_token=True: got distillation_token=False"
            )
        if self.context_length != part.num_tokens:
            raise ValueError(
                "context_length must be the tokens of an image, those before its patches included: "
                f"got {self.context_length}, and there are {part.num_tokens}"
            )
        if self.position.positions not in ("learned", "none"):
            raise ValueError(
                "a model that sees has positions='learned' or 'none': got "
                f"{self.position.positions!r}"
            )
        if self.attention.sliding_window is not None:
            raise ValueError(f"patches have no sliding window: got {self.attention.sliding_window}")

    @property
    def vector_width(self) -> int:
        """The width of the vector that an image becomes, before classes or a projection."""
        part = self.image_head
        is_double = part.pooling == "first_and_mean" and not part.image_pooler
        return self.d_model * (2 if is_double else 1)
