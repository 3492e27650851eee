"""Tokens, padding, images and sound for small models."""

import numpy as np

LENGTH, PROMPT, VOCAB = 9, 6, 61
PADDED = 3


def tokens(length=LENGTH, vocab=VOCAB, seed=0):
    """Returns two texts of random tokens, none of them a special one."""
    return np.random.default_rng(seed).integers(5, vocab, (2, length))


def mask(side="", length=LENGTH):
    """Returns an attention mask; the second text is padded on a side.

    Args:
        side: "left", "right", or "" for no padding.
        length: of the texts.
    """
    found = np.ones((2, length), np.int64)
    if side:
        found[1, slice(None, PADDED) if side == "left" else slice(-PADDED, None)] = 0
    return found


def padded_tokens(side="", pad=0, length=LENGTH):
    """Returns tokens with the padding token where the mask is zero, and the mask."""
    seen = mask(side, length)
    return np.where(seen == 1, tokens(length), pad), seen


def images(size=16, channels=3):
    """Returns two images, channels first."""
    return np.random.default_rng(1).normal(size=(2, channels, size, size)).astype(np.float32)


def sound(length=400):
    """Returns two pieces of sound."""
    return np.random.default_rng(2).normal(size=(2, length)).astype(np.float32)
