"""Who may attend to whom. Boolean, True = may attend, broadcastable to (B, N, T, S)."""

import functools

import torch


def causal_mask(
    queries: int | torch.Tensor, keys: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Each position may attend to itself and to what lies before it: boolean (1, 1, T, S).

    Args:
        queries: T, or the positions of the queries (T,), whose device the mask shares.
        keys: S, or the positions of the keys (S,); default those of the queries.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    distance = _distance(queries, keys)
    return (distance <= 0)[None, None]


def window_mask(
    queries: int | torch.Tensor, keys: int | torch.Tensor | None, window: int
) -> torch.Tensor:
    """Each position may attend to those less than ``window`` tokens away: boolean (1, 1, T, S).

    Itself is included. Together with ``causal_mask`` it is the sliding window of Mistral
    (arXiv 2310.06825, section 2). Arguments as there.
    """
    distance = _distance(queries, keys)
    return (distance.abs() < window)[None, None]


def _distance(queries: int | torch.Tensor, keys: int | torch.Tensor | None) -> torch.Tensor:
    keys = queries if keys is None else keys
    device = next((x.device for x in (queries, keys) if isinstance(x, torch.Tensor)), None)
    queries = torch.arange(queries, device=device) if isinstance(queries, int) else queries
    keys = torch.arange(keys, device=device) if isinstance(keys, int) else keys
    return keys[None, :] - queries[:, None]


def padding_mask(tokens: torch.Tensor, pad_token: int = 0) -> torch.Tensor:
    """Every position may attend to the tokens (B, S) that are not ``pad_token``: (B, 1, 1, S)."""
    return (tokens != pad_token)[:, None, None, :]


def padding_mask_from_lengths(lengths: torch.Tensor, max_length: int) -> torch.Tensor:
    """Every position may attend to the first ``lengths[b]`` tokens of row b: (B, 1, 1, S)."""
    slots_S = torch.arange(max_length, device=lengths.device)
    return (slots_S[None, :] < lengths[:, None])[:, None, None, :]


def combine_masks(*masks: torch.Tensor | None) -> torch.Tensor | None:
    """May attend where every given mask says so; None stands for a mask that allows everything."""
    present = [expand_mask(mask) for mask in masks if mask is not None]
    return functools.reduce(torch.logical_and, present) if present else None


def expand_mask(mask: torch.Tensor) -> torch.Tensor:
    """Gives a mask its four dimensions: (T, S) for all, (B, T, S) for all heads, or as it is.

    Raises:
        ValueError: it has fewer than two dimensions or more than four, or is not boolean.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"masks are boolean, True = may attend: got {mask.dtype}")
    if mask.ndim == 2:
        return mask[None, None]
    if mask.ndim == 3:
        return mask[:, None]
    if mask.ndim == 4:
        return mask
    raise ValueError(f"a mask has 2, 3 or 4 dimensions: got shape {tuple(mask.shape)}")


def additive_to_boolean(bias: torch.Tensor) -> torch.Tensor:
    """Reads an additive mask (0 allows, -inf blocks).

    A bias of at most -1e4 counts as blocked: some codes write -1e4 or -1e9 for -inf.
    """
    return bias > -1e4


def boolean_to_additive(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Writes an additive mask: 0 where ``mask`` allows, -inf where it does not."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, -torch.inf)
