"""The cross-entropy of logits, in nats."""

import torch
from torch.nn import functional


def cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the mean of -log softmax(logits)[target] over the targets that ``mask`` keeps.

    In nats per token, in float32 or wider. With no target kept the result is 0, where torch's is
    NaN; torch has ``ignore_index`` in place of the mask.

    Args:
        logits: (B, T, V).
        targets: ids (B, T).
        mask: boolean (B, T), True = counts.
    """
    losses = token_losses(logits, targets)
    if mask is None:
        return losses.mean()
    kept = mask.to(losses.dtype)
    return (losses * kept).sum() / kept.sum().clamp(min=1)


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns -log softmax(logits)[target] of each token (B, T), in nats, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        logits.flatten(0, -2), targets.flatten().long(), reduction="none"
    )
    return losses.reshape(targets.shape)
