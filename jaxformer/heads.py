"""What stands behind the last block: parts of BERT's output head, a classifier, similarities."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxformer.execution.gpu_shapes import fill_rows
from jaxformer.feed_forward import ACTIVATIONS
from jaxformer.layers import Dropout, Embedding, Linear, in_float32, widen
from jaxformer.norms import LayerNorm, RMSNorm


class HeadTransform(nnx.Module):
    """Computes norm(activation(proj(x))), before BERT's projection to logits (arXiv 1810.04805).

    Args:
        d_model: D.
        norm: over the result's width.
        activation: one of ``ACTIVATIONS``.
        out_features: the result's width, default D; ELECTRA's (arXiv 2003.10555) is that of its
            embeddings.
        use_bias: whether proj has a bias (ModernBERT: not).
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        d_model: int,
        norm: LayerNorm | RMSNorm,
        *,
        activation: str = "gelu",
        out_features: int | None = None,
        use_bias: bool = True,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        out_features = d_model if out_features is None else out_features
        self.proj = Linear(d_model, out_features, use_bias=use_bias, rngs=rngs)
        self.norm = norm

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T O"]:
        """Returns what is projected to logits (B, T, out_features), in the dtype of x."""
        return self.norm(ACTIVATIONS[self.activation](self.proj(x)))


class ClassifierHead(nnx.Module):
    """Computes scores of labels: out_proj(drop(norm(activation(proj(drop(x)))))).

    Without a transform it is out_proj(drop(drop(x))).

    Args:
        d_model: D.
        num_labels: how many scores there are.
        transform: whether there is ``proj``, with its activation (BERT's pooler).
        transform_width: the width of what proj makes, default D.
        activation: one of ``ACTIVATIONS``, or none.
        transform_bias: whether proj has a bias.
        norm: what follows the activation, if anything.
        use_bias: whether scores have a bias.
        input_dropout: rate on x.
        dropout: rate on what is projected to scores.
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        d_model: int,
        num_labels: int,
        *,
        transform: bool = False,
        transform_width: int | None = None,
        activation: str = "tanh",
        transform_bias: bool = True,
        norm: LayerNorm | RMSNorm | None = None,
        use_bias: bool = True,
        input_dropout: float = 0.0,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.activation = activation
        self.input_dropout = Dropout(input_dropout)
        width = d_model if transform_width is None else transform_width
        self.proj = (
            Linear(d_model, width, use_bias=transform_bias, rngs=rngs) if transform else None
        )
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.out_proj = Linear(width, num_labels, use_bias=use_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... O"]:
        """Returns the scores (..., num_labels), in the dtype of x."""
        x = self.input_dropout(x)
        if self.proj is not None:
            x = self.proj(x)
            if self.activation != "none":
                x = ACTIVATIONS[self.activation](x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(self.dropout(x))


def classified(
    hidden: Float[Array, "B T D"], mask: Bool[Array, "B N T S"] | None, what: str
) -> Float[Array, "..."]:
    """Returns what scores are made of: (B, D), or (B, T, D) for scores of each token.

    Args:
        hidden: of all tokens.
        mask: True = may attend; a key that no query of its row may see is padding.
        what: ``first``, ``last``, ``last_place``, ``mean``, ``mean_of_places`` or ``tokens``, see
            ``ClassifierConfig``.
    """
    if what == "tokens":
        return hidden
    if what == "first":
        return hidden[:, 0]
    if what == "last_place":
        return hidden[:, -1]
    if what == "mean_of_places":
        mask = None
    length = hidden.shape[1]
    is_token_BT = jnp.ones((1, length), bool) if mask is None else jnp.any(mask, axis=(1, 2))
    is_token_BT = jnp.broadcast_to(is_token_BT, hidden.shape[:2])
    if what == "last":
        last_B = length - 1 - jnp.argmax(is_token_BT[:, ::-1], axis=1)
        return jnp.take_along_axis(hidden, last_B[:, None, None], axis=1)[:, 0]
    wide = jnp.sum(widen(hidden) * is_token_BT[..., None], axis=1)
    return (wide / jnp.sum(is_token_BT, axis=1, keepdims=True)).astype(hidden.dtype)


def output_logits(
    hidden: Float[Array, "B T D"],
    table: Embedding | None,
    lm_head: "Linear | OutputBias | None",
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Float[Array, "B T V"]:
    """Returns the logits of an output head, in nats.

    Args:
        hidden: what it projects.
        table: the token embedding of a tied head.
        lm_head: the matrix of another, or the bias of a tied one.
        scale: what logits are multiplied by.
        soft_cap: their bound, by tanh.
    """
    logits = hidden if table is None else table.attend(hidden)
    if lm_head is not None:
        logits = lm_head(logits)
    if scale is not None:
        logits = in_float32(lambda x: x * scale, logits)
    if soft_cap is None:
        return logits
    return in_float32(lambda x: soft_cap * jnp.tanh(x / soft_cap), logits)


class OutputBias(nnx.Module):
    """Adds a bias, which starts at 0, to the logits of a tied output head."""

    def __init__(self, features: int):
        self.bias = nnx.Param(jnp.zeros((features,)))

    def __call__(self, x: Float[Array, "... V"]) -> Float[Array, "... V"]:
        """Returns the logits, in the dtype of x."""
        # Widened, so that the bias's gradient is not summed over all rows in bfloat16.
        bias = jnp.broadcast_to(fill_rows(widen(self.bias[...])), x.shape)
        return (widen(x) + bias).astype(x.dtype)


class LayerSum(nnx.Module):
    """Computes Σ softmax(scale)_n · x_n, of N residual streams (SUPERB, arXiv 2105.01051, 3).

    Args:
        num_streams: N; ``scale`` has shape (N,), and starts such that the result is their mean.
    """

    def __init__(self, num_streams: int):
        self.scale = nnx.Param(jnp.full((num_streams,), 1 / num_streams))

    def __call__(self, streams: Float[Array, "N B T D"]) -> Float[Array, "B T D"]:
        """Returns their sum, in the dtype of the streams."""
        weights_N = jax.nn.softmax(widen(self.scale[...]))
        # Once for every position: a weight's gradient is then a sum of sums. XLA adds all numbers
        # of a stream one by one otherwise, which loses digits.
        weights_NT = jnp.broadcast_to(weights_N[:, None], (len(weights_N), streams.shape[2]))
        wide = jnp.einsum("nbtd,nt->btd", widen(streams), weights_NT, precision="highest")
        return wide.astype(streams.dtype)


class Similarity(nnx.Module):
    """Computes exp(scale) · cos(x, y) + bias of every pair of vectors x and y (CLIP, SigLIP).

    ``scale`` and ``bias`` have shape (1,). Alone, exp(scale) starts at 1 / 0.07 (arXiv 2103.00020,
    section 2.5); with a bias it starts at 10, and the bias at -10 (arXiv 2303.15343, section 3.1).

    Args:
        use_bias: whether there is one.
    """

    def __init__(self, *, use_bias: bool = False):
        self.scale = nnx.Param(jnp.full((1,), math.log(10 if use_bias else 1 / 0.07)))
        self.bias = nnx.Param(jnp.full((1,), -10.0)) if use_bias else None

    def __call__(self, x: Float[Array, "A D"], y: Float[Array, "C D"]) -> Float[Array, "A C"]:
        """Returns a number for each x and each y, in the dtype of x."""
        x, y = (in_float32(_unit, vectors) for vectors in (x, y))
        wide = widen(x @ y.T)
        similarities = wide * jnp.exp(self.scale[...].astype(wide.dtype)).reshape(1, 1)
        if self.bias is not None:
            similarities = similarities + self.bias[...].astype(wide.dtype).reshape(1, 1)
        return similarities.astype(x.dtype)


def _unit(vectors: Float[Array, "A D"]) -> Float[Array, "A D"]:
    """Returns vectors of length 1."""
    return vectors / jnp.sqrt(jnp.sum(vectors * vectors, axis=-1, keepdims=True))
