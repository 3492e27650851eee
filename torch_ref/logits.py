"""The logits that the next token is sampled from: temperature, top-k and top-p."""

import math

import torch

from torch_ref.checks import FLOAT32_MAX, check_is_integer, check_is_number

# Below this, float32 has no room for a logit over the temperature, nor for a share of all tokens.
SMALLEST = 1e-30


def filter_logits(
    logits_BV: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> torch.Tensor:
    """Returns logits / temperature, with -inf for tokens that ``top_k`` or ``top_p`` excludes.

    Args:
        logits_BV: in nats, (…, V), of any dtype; the result is in float32 or wider.
        temperature: what they are divided by; below 1 sharpens.
        top_k: keep those not below the k-th largest (all of them on a tie).
        top_p: of what ``top_k`` kept, keep the smallest set of most probable tokens whose
            probability reaches ``top_p``, the lower id first on a tie; 1 keeps everything
            (Holtzman et al., arXiv 1904.09751, section 3.1).

    Raises:
        ValueError: temperature is below 1e-30 or not finite in float32, top_k is no integer or
            below 1, or top_p is below 1e-30 or above 1.

    >>> filter_logits(torch.tensor([[3.0, 1.0, 2.0]]), temperature=2.0, top_k=2).tolist()
    [[1.5, -inf, 1.0]]
    """
    check_sampling(temperature, top_k, top_p)
    logits = logits_BV.to(torch.promote_types(logits_BV.dtype, torch.float32)) / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    if top_p is not None and top_p < 1:
        ranked, order = logits.sort(dim=-1, descending=True, stable=True)
        reached = ranked.softmax(dim=-1).cumsum(dim=-1)[..., :-1] >= top_p
        dropped = torch.zeros_like(logits, dtype=torch.bool)
        dropped.scatter_(-1, order[..., 1:], reached)
        logits = logits.masked_fill(dropped, -math.inf)
    return logits


def check_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Checks the settings of ``filter_logits``.

    Raises:
        ValueError: one of them is out of its range; the message names it.
    """
    check_is_number("temperature", temperature)
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be positive and finite: got {temperature}")
    if not SMALLEST <= temperature <= FLOAT32_MAX:
        raise ValueError(
            f"temperature must be at least {SMALLEST} and finite in float32: got {temperature}"
        )
    if top_k is not None:
        check_is_integer("top_k", top_k)
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1: got {top_k}")
    if top_p is not None:
        check_is_number("top_p", top_p)
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1]: got {top_p}")
    if top_p is not None and top_p < SMALLEST:
        raise ValueError(f"top_p must be at least {SMALLEST}: got {top_p}")
