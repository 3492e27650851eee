"""Images as tokens: patches, each projected to the model's width (arXiv 2010.11929, 3.1)."""

import torch
from torch import nn
from torch.nn import functional

from torch_ref.layers import Linear


class PatchEmbedding(nn.Module):
    """Cuts images into patches, row by row, and projects each: ViT's convolution (eq. 1).

    A patch's numbers are in the order channel, row, column, as in the weight of ``torch.nn.Conv2d``
    whose stride is its kernel's size.

    Args:
        d_model: D.
        patch_height: rows of pixels in a patch.
        patch_width: columns of pixels in a patch.
        num_channels: C.
        use_bias: whether the projection has a bias (CLIP: not).
    """

    def __init__(
        self,
        d_model: int,
        *,
        patch_height: int,
        patch_width: int,
        num_channels: int = 3,
        use_bias: bool = True,
    ):
        super().__init__()
        self.patch_height = patch_height
        self.patch_width = patch_width
        self.num_channels = num_channels
        self.proj = Linear(num_channels * patch_height * patch_width, d_model, use_bias=use_bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns a row for each patch (B, P, D) of images (B, C, Y, X).

        Pixels that fill no patch are left out.

        Raises:
            ValueError: images have another number of channels, or are smaller than a patch.
        """
        size = (self.patch_height, self.patch_width)
        is_small = images.shape[2] < size[0] or images.shape[3] < size[1]
        if images.shape[1] != self.num_channels or is_small:
            raise ValueError(
                f"images have {self.num_channels} channels of at least {size[0]}x{size[1]} pixels: "
                f"got shape {tuple(images.shape)}"
            )
        patches_BIP = functional.unfold(images, size, stride=size)
        return self.proj(patches_BIP.transpose(1, 2))
