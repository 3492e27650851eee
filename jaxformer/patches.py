"""Images as tokens: patches, each projected to the model's width (arXiv 2010.11929, 3.1)."""

from flax import nnx
from jaxtyping import Array, Float

from jaxformer.layers import Linear


class PatchEmbedding(nnx.Module):
    """Cuts images into patches, row by row, and projects each: ViT's convolution (eq. 1).

    A patch's numbers are in the order channel, row, column, as in the weight of ``torch.nn.Conv2d``
    whose stride is its kernel's size.

    Args:
        d_model: D.
        patch_height: rows of pixels in a patch.
        patch_width: columns of pixels in a patch.
        num_channels: C.
        use_bias: whether the projection has a bias (CLIP: not).
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        d_model: int,
        *,
        patch_height: int,
        patch_width: int,
        num_channels: int = 3,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.patch_height = patch_height
        self.patch_width = patch_width
        self.num_channels = num_channels
        pixels = num_channels * patch_height * patch_width
        self.proj = Linear(pixels, d_model, use_bias=use_bias, rngs=rngs)

    def __call__(self, images: Float[Array, "B C Y X"]) -> Float[Array, "B P D"]:
        """Returns a row for each patch; pixels that fill no patch are left out.

        Raises:
            ValueError: images have another number of channels, or are smaller than a patch.
        """
        height, width = self.patch_height, self.patch_width
        rows, columns = images.shape[2] // height, images.shape[3] // width
        if images.shape[1] != self.num_channels or not rows * columns:
            raise ValueError(
                f"images have {self.num_channels} channels of at least {height}x{width} pixels: "
                f"got shape {images.shape}"
            )
        whole = images[:, :, : rows * height, : columns * width]
        patches = whole.reshape(len(images), self.num_channels, rows, height, columns, width)
        ordered = patches.transpose(0, 2, 4, 1, 3, 5)
        return self.proj(ordered.reshape(len(images), rows * columns, -1))
