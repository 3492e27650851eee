"""Frames of numbers as positions of a sequence, by two convolutions (Whisper, arXiv 2212.04356)."""

import torch
from torch import nn
from torch.nn import functional

from torch_ref.layers import Linear


class FrameConvolution(nn.Module):
    """Projects each window of ``width`` frames: ``torch.nn.Conv1d`` on sequences (B, T, C).

    A window's numbers are in the order feature, frame, as in the weight of ``torch.nn.Conv1d``.
    ``width // 2`` frames of zeros stand before the first frame and behind the last.

    Args:
        in_features: C.
        out_features: O.
        width: of a window, odd.
        stride: how many frames a window begins after the one before.

    Raises:
        ValueError: the width is even.
    """

    def __init__(self, in_features: int, out_features: int, *, width: int = 3, stride: int = 1):
        super().__init__()
        if width % 2 == 0:
            raise ValueError(f"the width of a window must be odd: got {width}")
        self.width = width
        self.stride = stride
        self.proj = Linear(in_features * width, out_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns a row (B, S, O) for each window of x (B, T, C), S = (T - 1) // stride + 1."""
        weight_OCW = self.proj.weight.unflatten(1, (-1, self.width))
        found = functional.conv1d(
            x.transpose(1, 2), weight_OCW, self.proj.bias, self.stride, padding=self.width // 2
        )
        return found.transpose(1, 2)


class SpeechStem(nn.Module):
    """Computes gelu(conv2(gelu(conv1(x)))), where conv2 makes one position of two frames.

    Args:
        num_features: C.
        d_model: D.
    """

    def __init__(self, num_features: int, d_model: int):
        super().__init__()
        self.num_features = num_features
        self.conv1 = FrameConvolution(num_features, d_model)
        self.conv2 = FrameConvolution(d_model, d_model, stride=2)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Returns a row (B, S, D) for every two frames of features (B, C, T).

        Raises:
            ValueError: frames have another number of features.
        """
        if features.ndim != 3 or features.shape[1] != self.num_features:
            raise ValueError(
                f"features must be (B, {self.num_features}, frames): got shape "
                f"{tuple(features.shape)}"
            )
        x = functional.gelu(self.conv1(features.transpose(1, 2)))
        return functional.gelu(self.conv2(x))
