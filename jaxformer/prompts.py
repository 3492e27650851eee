"""Checks what models read: batches of tokens, and prompts of different lengths."""

from typing import Any

import numpy as np


def check_tokens(tokens: Any) -> None:
    """Checks that a model is called with a batch of ids.

    Raises:
        ValueError: they are no array, not (B, T), or no integers.
    """
    if not hasattr(tokens, "ndim") or not hasattr(tokens, "dtype"):
        raise ValueError(
            "tokens must be an array of integer ids with shape (B, T), such as "
            f"jnp.array([[1, 2, 3]]): got {type(tokens).__name__}"
        )
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise ValueError(
            "tokens must be integer ids with shape (B, T): got "
            f"{tokens.dtype} with shape {tuple(tokens.shape)}"
        )


def read_prompt(prompt_BT: Any, mask: Any, vocab_size: int) -> list[np.ndarray]:
    """Returns the tokens of each row, int64, without padding.

    Args:
        prompt_BT: integer ids in [0, V), each row with one at least.
        mask: boolean, True where the prompt holds a token, False on the padding to its left; None
            is no padding.
        vocab_size: V.

    Raises:
        ValueError: one of these is not so.
    """
    if isinstance(prompt_BT, str):
        raise ValueError(
            "the prompt must be ids (B, T), and this is text: encode it, or call "
            f"jaxformer.load(...).generate: got {prompt_BT[:40]!r}"
        )
    prompt = np.asarray(prompt_BT)
    if prompt.ndim != 2 or prompt.size == 0:
        raise ValueError(f"the prompt must be (B, T) with B, T >= 1: got shape {prompt.shape}")
    if not np.issubdtype(prompt.dtype, np.integer):
        raise ValueError(f"the prompt must hold integer ids: got {prompt.dtype}")
    mask = np.ones(prompt.shape, bool) if mask is None else np.asarray(mask)
    if mask.dtype != bool or mask.shape != prompt.shape:
        raise ValueError(
            f"the mask must be boolean with the prompt's shape {prompt.shape}: "
            f"got {mask.dtype} with shape {mask.shape}"
        )
    if not mask[:, -1].all() or (mask[:, :-1] & ~mask[:, 1:]).any():
        raise ValueError("every row of the mask must be padding (False), then tokens (True)")
    rows = [row[kept].astype(np.int64) for row, kept in zip(prompt, mask, strict=True)]
    for row in rows:
        if row.min() < 0 or row.max() >= vocab_size:
            bad = row[(row < 0) | (row >= vocab_size)][0]
            raise ValueError(f"prompt ids must be in [0, {vocab_size}): got {bad}")
    return rows
