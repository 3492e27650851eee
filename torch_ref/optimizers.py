"""AdamW with clipping, decay groups and schedule, by PyTorch's own pieces."""

import math

import torch

from torch_ref.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Returns the rate of a step: linear warm-up, then ``schedule``.

    At step s (from 0) of ``warmup_steps`` W the rate is learning_rate · (s + 1) / (W + 1); from W
    on it falls to ``min_learning_rate`` at ``decay_steps``: along half a cosine (arXiv 1608.03983,
    eq. 5), along a line, or along a line over the last ``decay_share`` of these steps (wsd, arXiv
    2405.18392, section 3). With ``decay_steps`` None, or constant, it stays.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.decay_steps is None or config.schedule == "constant":
        return config.learning_rate
    span = max(config.decay_steps - config.warmup_steps, 1)
    share = min(max((step - config.warmup_steps) / span, 0), 1)
    if config.schedule == "cosine":
        height = 0.5 * (1 + math.cos(math.pi * share))
    elif config.schedule == "linear":
        height = 1 - share
    else:
        height = min((1 - share) / config.decay_share, 1)
    return config.min_learning_rate + height * (config.learning_rate - config.min_learning_rate)


def decay_mask(module: torch.nn.Module) -> dict[str, bool]:
    """Returns which parameters decay: those of two or more dimensions, but for norms."""
    # A norm's weight has two dimensions where it has a row a head.
    norms = {path for path, owner in module.named_modules() if hasattr(owner, "eps")}
    return {
        name: parameter.ndim >= 2 and name.rpartition(".")[0] not in norms
        for name, parameter in module.named_parameters()
    }


def global_norm(module: torch.nn.Module) -> torch.Tensor:
    """Returns sqrt(Σ g²) over every element of every gradient."""
    return torch.nn.utils.get_total_norm(
        [p.grad for p in module.parameters() if p.grad is not None]
    )


def clip_by_global_norm(module: torch.nn.Module, max_norm: float) -> torch.Tensor:
    """Scales gradients by min(1, max_norm / (norm + 1e-6)) in place; returns the norm before."""
    return torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm)


def make_optimizer(module: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """Returns ``torch.optim.AdamW`` (arXiv 1711.05101): one group decays, one does not.

    The fused kernel is taken where torch has one for the parameters' device and dtype.
    """
    decays = decay_mask(module)
    named = dict(module.named_parameters())
    groups = [
        {"params": [p for n, p in named.items() if decays[n]], "weight_decay": config.weight_decay},
        {"params": [p for n, p in named.items() if not decays[n]], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
