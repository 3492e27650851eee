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


def token_losses(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    num_classes: int | None = None,
) -> torch.Tensor:
    """Returns -log softmax(logits)[target] of each token (B, T), in nats, in float32 or wider.

    Args:
        logits: of every class.
        targets: ids.
        z_loss: what (log Σ exp(logits))² is multiplied by and added (arXiv 2204.02311, section 5);
            it keeps that sum near 1.
        label_smoothing: ε: the target's share of the true distribution is 1 - ε + ε/V, and that of
            every other class ε/V (arXiv 1512.00567, section 7).
        num_classes: how many of the columns are logits, where others follow; default all.

    Raises:
        ValueError: there is not one target for each row of logits.
    """
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            "targets must have the shape of the logits without classes, "
            f"{tuple(logits.shape[:-1])}: got {tuple(targets.shape)}"
        )
    logits = logits[..., :num_classes]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = functional.cross_entropy(
        logits.flatten(0, -2),
        targets.flatten().long(),
        reduction="none",
        label_smoothing=label_smoothing,
    ).reshape(targets.shape)
    return losses + z_loss * torch.logsumexp(logits, -1).square() if z_loss else losses
