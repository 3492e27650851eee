"""Checks what models read: batches of tokens, and prompts of different lengths."""

from collections.abc import Sequence
from typing import Any

import torch

from torch_ref.checks import check_is_integer


def check_tokens(tokens: Any) -> None:
    """Checks that a model is called with a batch of ids, one at least.

    Raises:
        ValueError: they are no tensor, not (B, T), no integers, or empty.
    """
    if not isinstance(tokens, torch.Tensor):
        raise ValueError(
            "tokens must be a tensor of integer ids with shape (B, T), such as "
            f"torch.tensor([[1, 2, 3]]): got {type(tokens).__name__}"
        )
    if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(
            "tokens must be integer ids with shape (B, T): got "
            f"{tokens.dtype} with shape {tuple(tokens.shape)}"
        )
    if 0 in tokens.shape:
        raise ValueError(f"tokens must be (B, T) with B, T >= 1: got shape {tuple(tokens.shape)}")


def read_prompt(
    prompt_BT: torch.Tensor, mask: torch.Tensor | None, vocab_size: int
) -> list[torch.Tensor]:
    """Returns the tokens of each row, int64, without padding.

    Args:
        prompt_BT: integer ids (B, T) in [0, V), each row with one at least.
        mask: boolean (B, T), True where the prompt holds a token, False on the padding to its left;
            None is no padding.
        vocab_size: V.

    Raises:
        ValueError: one of these is not so.
    """
    if isinstance(prompt_BT, str):
        raise ValueError(
            f"the prompt must be ids (B, T), and this is text: encode it: got {prompt_BT[:40]!r}"
        )
    shape = tuple(prompt_BT.shape)
    if len(shape) != 2 or prompt_BT.numel() == 0:
        raise ValueError(f"the prompt must be (B, T) with B, T >= 1: got shape {shape}")
    if torch.is_floating_point(prompt_BT) or prompt_BT.dtype == torch.bool:
        raise ValueError(f"the prompt must hold integer ids: got {prompt_BT.dtype}")
    mask = torch.ones_like(prompt_BT, dtype=torch.bool) if mask is None else mask
    if mask.dtype != torch.bool or tuple(mask.shape) != shape:
        raise ValueError(
            f"the mask must be boolean with the prompt's shape {shape}: "
            f"got {mask.dtype} with shape {tuple(mask.shape)}"
        )
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("every row of the mask must be padding (False), then tokens (True)")
    rows = [row[kept].long() for row, kept in zip(prompt_BT, mask, strict=True)]
    for row in rows:
        if row.min() < 0 or row.max() >= vocab_size:
            bad = int(row[(row < 0) | (row >= vocab_size)][0])
            raise ValueError(f"prompt ids must be in [0, {vocab_size}): got {bad}")
    return rows


def read_source(
    source_BS: Any, mask: Any, vocab_size: int, context_length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a source and where it holds tokens, both (B, S).

    Args:
        source_BS: integer ids in [0, V), at most ``context_length`` a row.
        mask: boolean, True where the source holds a token; None is everywhere.
        vocab_size: V.
        context_length: the most tokens that fit.

    Raises:
        ValueError: one of these is not so, or a row has no token.
    """
    source = _read_ids("source", source_BS, vocab_size)
    if source.shape[1] > context_length:
        raise ValueError(f"{source.shape[1]} tokens do not fit context_length={context_length}")
    is_token = torch.ones_like(source, dtype=torch.bool) if mask is None else mask
    if is_token.dtype != torch.bool or is_token.shape != source.shape:
        raise ValueError(
            f"the mask must be boolean with the source's shape {tuple(source.shape)}: "
            f"got {is_token.dtype} with shape {tuple(is_token.shape)}"
        )
    if not is_token.any(dim=1).all():
        raise ValueError("every row of the mask must have a token (True)")
    return source, is_token


def check_target_tokens(vocab_size: int, **tokens: Sequence[int]) -> None:
    """Checks that ids which say something of targets are in the vocabulary.

    Args:
        vocab_size: V.
        tokens: ids, by the name of the setting.

    Raises:
        ValueError: one is not in [0, V), or every id is suppressed.
    """
    for name, ids in tokens.items():
        for token in ids:
            check_is_integer(name, token)
            if not 0 <= token < vocab_size:
                raise ValueError(f"{name} must be in [0, {vocab_size}): got {token}")
    suppressed = {
        token
        for name in ("suppress_tokens", "begin_suppress_tokens")
        for token in tokens.get(name, ())
    }
    if len(suppressed) == vocab_size:
        raise ValueError("suppress_tokens and begin_suppress_tokens leave no token")


def read_features(
    source: Any, mask: Any, num_features: int, num_frames: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the features of a source (B, C, T), and where its positions are seen (B, T / 2).

    Args:
        source: floating point.
        mask: must be None: every position is seen, as Whisper was trained.
        num_features: C.
        num_frames: T.

    Raises:
        ValueError: they have another shape or dtype, or there is a mask.
    """
    features = torch.as_tensor(source)
    if features.ndim != 3 or features.shape[1:] != (num_features, num_frames) or not len(features):
        raise ValueError(
            f"features must be (B, {num_features}, {num_frames}): got shape {tuple(features.shape)}"
        )
    if not features.is_floating_point():
        raise ValueError(f"features must be floating point: got {features.dtype}")
    if mask is not None:
        raise ValueError("features have no mask: all of their positions are seen")
    return features, torch.ones((len(features), num_frames // 2), dtype=torch.bool)


def read_start(
    start_BT: Any, batch: int, num_tokens: int, vocab_size: int, context_length: int
) -> torch.Tensor:
    """Returns what targets begin with, (B, T).

    Args:
        start_BT: integer ids in [0, V), at least one a row.
        batch: B.
        num_tokens: how many are to follow.
        vocab_size: V.
        context_length: the most tokens that fit; the last that is made need not.

    Raises:
        ValueError: one of these is not so, or ``num_tokens`` is negative.
    """
    check_is_integer("num_tokens", num_tokens)
    if num_tokens < 0:
        raise ValueError(f"num_tokens must not be negative: got {num_tokens}")
    start = _read_ids("start", start_BT, vocab_size)
    if len(start) != batch:
        raise ValueError(f"source and start must have as many rows: got {batch} and {len(start)}")
    needed = start.shape[1] + max(num_tokens - 1, 0)
    if needed > context_length:
        raise ValueError(f"{needed} target tokens do not fit context_length={context_length}")
    return start


def _read_ids(name: str, given_BT: Any, vocab_size: int) -> torch.Tensor:
    ids = torch.as_tensor(given_BT)
    if ids.ndim != 2 or ids.numel() == 0:
        raise ValueError(f"the {name} must be (B, T) with B, T >= 1: got shape {tuple(ids.shape)}")
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise ValueError(f"the {name} must hold integer ids: got {ids.dtype}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise ValueError(f"{name} ids must be in [0, {vocab_size}): got {bad}")
    return ids.long()
