"""Frames of numbers as positions of a sequence, by two convolutions (Whisper, arXiv 2212.04356)."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.feed_forward import gelu
from jaxformer.layers import Linear


class FrameConvolution(nnx.Module):
    """Projects each window of ``width`` frames: ``torch.nn.Conv1d`` on sequences (B, T, C).

    A window's numbers are in the order feature, frame, as in the weight of ``torch.nn.Conv1d``.
    ``width // 2`` frames of zeros stand before the first frame and behind the last.

    Args:
        in_features: C.
        out_features: O.
        width: of a window, odd.
        stride: how many frames a window begins after the one before.
        rngs: where the initial weights come from.

    Raises:
        ValueError: the width is even.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        width: int = 3,
        stride: int = 1,
        rngs: nnx.Rngs,
    ):
        if width % 2 == 0:
            raise ValueError(f"the width of a window must be odd: got {width}")
        self.width = width
        self.stride = stride
        self.proj = Linear(in_features * width, out_features, rngs=rngs)

    def __call__(self, x: Float[Array, "B T C"]) -> Float[Array, "B S O"]:
        """Returns a row for each window, S = (T - 1) // stride + 1, in the dtype of x."""
        around = self.width // 2
        count = (x.shape[1] - 1) // self.stride + 1
        padded = jnp.pad(x, ((0, 0), (around, around), (0, 0)))
        last = (count - 1) * self.stride + 1
        frames = [padded[:, at : at + last : self.stride] for at in range(self.width)]
        return self.proj(jnp.stack(frames, axis=-1).reshape(len(x), count, -1))


class SpeechStem(nnx.Module):
    """Computes gelu(conv2(gelu(conv1(x)))), where conv2 makes one position of two frames.

    Args:
        num_features: C.
        d_model: D.
        rngs: where the initial weights come from.
    """

    def __init__(self, num_features: int, d_model: int, *, rngs: nnx.Rngs):
        self.num_features = num_features
        self.conv1 = FrameConvolution(num_features, d_model, rngs=rngs)
        self.conv2 = FrameConvolution(d_model, d_model, stride=2, rngs=rngs)

    def __call__(self, features: Float[Array, "B C T"]) -> Float[Array, "B S D"]:
        """Returns a row for every two frames, in the dtype of the features.

        Raises:
            ValueError: frames have another number of features.
        """
        if features.ndim != 3 or features.shape[1] != self.num_features:
            raise ValueError(
                f"features must be (B, {self.num_features}, frames): got shape {features.shape}"
            )
        return gelu(self.conv2(gelu(self.conv1(features.swapaxes(1, 2)))))
