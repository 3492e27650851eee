"""What stands behind the last block: parts of BERT's output head, a classifier, similarities."""

import math

import torch
from torch import nn

from torch_ref.feed_forward import ACTIVATIONS
from torch_ref.layers import Dropout, Embedding, Linear
from torch_ref.norms import LayerNorm, RMSNorm


class HeadTransform(nn.Module):
    """Computes norm(activation(proj(x))), before BERT's projection to logits (arXiv 1810.04805).

    Args:
        d_model: D.
        norm: over the result's width.
        activation: one of ``ACTIVATIONS``.
        out_features: the result's width, default D; ELECTRA's (arXiv 2003.10555) is that of its
            embeddings.
        use_bias: whether proj has a bias (ModernBERT: not).
    """

    def __init__(
        self,
        d_model: int,
        norm: LayerNorm | RMSNorm,
        *,
        activation: str = "gelu",
        out_features: int | None = None,
        use_bias: bool = True,
    ):
        super().__init__()
        self.activation = activation
        self.proj = Linear(
            d_model, d_model if out_features is None else out_features, use_bias=use_bias
        )
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns what is projected to logits (B, T, out_features), in the dtype of x."""
        return self.norm(ACTIVATIONS[self.activation](self.proj(x)))


class ClassifierHead(nn.Module):
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
    ):
        super().__init__()
        self.activation = activation
        self.input_dropout = Dropout(input_dropout)
        width = d_model if transform_width is None else transform_width
        self.proj = Linear(d_model, width, use_bias=transform_bias) if transform else None
        self.norm = norm
        self.dropout = Dropout(dropout)
        self.out_proj = Linear(width, num_labels, use_bias=use_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the scores (..., num_labels), in the dtype of x."""
        x = self.input_dropout(x)
        if self.proj is not None:
            x = self.proj(x)
            if self.activation != "none":
                x = ACTIVATIONS[self.activation](x)
        if self.norm is not None:
            x = self.norm(x)
        return self.out_proj(self.dropout(x))


def classified(hidden: torch.Tensor, mask: torch.Tensor | None, what: str) -> torch.Tensor:
    """Returns what scores are made of: (B, D), or (B, T, D) for scores of each token.

    Args:
        hidden: of all tokens (B, T, D).
        mask: True = may attend (B, N, T, S); a key that no query of its row may see is padding.
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
    batch, length = hidden.shape[:2]
    if mask is None:
        is_token = torch.ones((1, length), dtype=torch.bool, device=hidden.device)
    else:
        is_token = mask.any(dim=2).any(dim=1)
    is_token = is_token.expand(batch, length)
    if what == "last":
        last = length - 1 - is_token.flip(1).int().argmax(dim=1)
        return hidden[torch.arange(batch, device=hidden.device), last]
    wide = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    mean = (wide * is_token[..., None]).sum(dim=1) / is_token.sum(dim=1, keepdim=True)
    return mean.to(hidden.dtype)


def output_logits(
    hidden: torch.Tensor,
    table: Embedding | None,
    lm_head: "Linear | OutputBias | None",
    *,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> torch.Tensor:
    """Returns the logits (B, T, V) of an output head, in nats.

    Args:
        hidden: what it projects, (B, T, D).
        table: the token embedding of a tied head.
        lm_head: the matrix of another, or the bias of a tied one.
        scale: what logits are multiplied by.
        soft_cap: their bound, by tanh.
    """
    logits = hidden if table is None else table.attend(hidden)
    if lm_head is not None:
        logits = lm_head(logits)
    if scale is not None:
        logits = logits * scale
    return logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)


class OutputBias(nn.Module):
    """Adds a bias, which starts at 0, to the logits of a tied output head."""

    def __init__(self, features: int):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the logits (…, V), in the dtype of x."""
        return x + self.bias


class LayerSum(nn.Module):
    """Computes Σ softmax(weight)_n · x_n, of N residual streams (SUPERB, arXiv 2105.01051, 3).

    Args:
        num_streams: N; ``weight`` has shape (N,), and starts such that the result is their mean.
    """

    def __init__(self, num_streams: int):
        super().__init__()
        self.weight = nn.Parameter(torch.full((num_streams,), 1 / num_streams))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Returns the sum (B, T, D) of the streams (N, B, T, D), in their dtype."""
        wide = torch.promote_types(streams.dtype, torch.float32)
        weights = self.weight.to(wide).softmax(dim=0)
        return (streams.to(wide) * weights[:, None, None, None]).sum(dim=0).to(streams.dtype)


class Similarity(nn.Module):
    """Computes exp(weight) · cos(x, y) + bias of every pair of vectors x and y (CLIP, SigLIP).

    ``weight`` and ``bias`` have shape (1,). Alone, exp(weight) starts at 1 / 0.07 (arXiv
    2103.00020, section 2.5); with a bias it starts at 10, and the bias at -10 (arXiv 2303.15343,
    section 3.1).

    Args:
        use_bias: whether there is one.
    """

    def __init__(self, *, use_bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), math.log(10 if use_bias else 1 / 0.07)))
        self.bias = nn.Parameter(torch.full((1,), -10.0)) if use_bias else None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Returns a number for each x (A, D) and each y (C, D), as (A, C), in the dtype of x."""
        x, y = (v / v.norm(dim=-1, keepdim=True) for v in (x, y))
        similarities = x @ y.T * self.weight.exp()
        return similarities if self.bias is None else similarities + self.bias
