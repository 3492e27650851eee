"""Attention masks: boolean, True = may attend, broadcastable to (B, N, T, S)."""

import functools

import torch
from torch.nn import functional


def causal_mask(
    queries: int | torch.Tensor, keys: int | torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the mask (1, 1, T, S) by which a position may attend to itself and those before.

    Args:
        queries: T, or the positions of the queries (T,), whose device the mask shares.
        keys: S, or the positions of the keys (S,); default those of the queries.

    >>> causal_mask(3)[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    queries_T1, keys_1S = _places(queries, keys)
    return (keys_1S <= queries_T1)[None, None]


def window_mask(
    queries: int | torch.Tensor, keys: int | torch.Tensor | None, window: int
) -> torch.Tensor:
    """Returns the mask (1, 1, T, S) that allows positions less than ``window`` tokens away.

    Itself is included. Together with ``causal_mask`` it is the sliding window of Mistral
    (arXiv 2310.06825, section 2). Arguments as there.
    """
    queries_T1, keys_1S = _places(queries, keys)
    seen = (keys_1S < queries_T1 + window) & (keys_1S > queries_T1 - window)
    return seen[None, None]


def _places(
    queries: int | torch.Tensor, keys: int | torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    keys = queries if keys is None else keys
    device = next((x.device for x in (queries, keys) if isinstance(x, torch.Tensor)), None)
    queries = torch.arange(queries, device=device) if isinstance(queries, int) else queries
    keys = torch.arange(keys, device=device) if isinstance(keys, int) else keys
    return queries[:, None], keys[None, :]


def padding_mask(tokens: torch.Tensor, pad_token: int = 0) -> torch.Tensor:
    """Returns the mask (B, 1, 1, S) that allows the tokens (B, S) that are not ``pad_token``."""
    return (tokens != pad_token)[:, None, None, :]


def padding_mask_from_lengths(lengths: torch.Tensor, max_length: int) -> torch.Tensor:
    """Returns the mask (B, 1, 1, S) that allows the first ``lengths[b]`` tokens of row b."""
    slots_S = torch.arange(max_length, device=lengths.device)
    return (slots_S[None, :] < lengths[:, None])[:, None, None, :]


def document_mask(segments: torch.Tensor) -> torch.Tensor:
    """Returns the mask (B, 1, T, T) by which a token may attend to those of the same document.

    Args:
        segments: which document of its row each token is of, (B, T).
    """
    return (segments[:, :, None] == segments[:, None, :])[:, None]


def document_positions(segments: torch.Tensor) -> torch.Tensor:
    """Returns the position of each token in its document (B, T); a row has documents one by one.

    >>> document_positions(torch.tensor([[1, 1, 1, 2, 2, 0]])).tolist()
    [[0, 1, 2, 0, 1, 0]]
    """
    places = torch.arange(segments.shape[1], device=segments.device)[None]
    begins = functional.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    return places - torch.cummax(torch.where(begins, places, 0), dim=1).values


def combine_masks(*masks: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the mask that allows what every mask allows; None allows everything."""
    present = [expand_mask(mask) for mask in masks if mask is not None]
    return functools.reduce(torch.logical_and, present) if present else None


def expand_mask(mask: torch.Tensor) -> torch.Tensor:
    """Returns a mask with four dimensions, from (T, S), (B, T, S) or (B, N, T, S).

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
    """Returns the boolean mask of an additive one, in which 0 allows and -inf blocks.

    A bias of at most -1e4 counts as blocked: some codes write -1e4 or -1e9 for -inf.
    """
    return bias > -1e4


def boolean_to_additive(mask: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the additive mask of a boolean one: 0 where it allows, else -inf."""
    zero = torch.zeros((), dtype=dtype, device=mask.device)
    return torch.where(mask, zero, -torch.inf)
