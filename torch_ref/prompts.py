"""Checks what models read: batches of tokens, and prompts of different lengths."""

from typing import Any

import torch


def check_tokens(tokens: Any) -> None:
    """Checks that a model is called with a batch of ids.

    Raises:
        ValueError: they are no tensor, not (B, T), or no integers.
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
