"""Makes both sides of a training comparison drop the same units."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.layers import Dropout, dropout_modules, seed_dropout
from jaxformer.parity.recording.torch_values import require_torch


@contextlib.contextmanager
def control_torch_dropout(
    seed: int, masks: Sequence[np.ndarray] | None = None
) -> Iterator[list[np.ndarray]]:
    """Replaces torch's dropout inside the ``with`` block, also that inside fused attention.

    Args:
        seed: from which masks are drawn, where none are given.
        masks: boolean masks to use, True = kept, one for each call of dropout.

    Yields:
        The masks that were used, added call by call.
    """
    torch = require_torch()
    functional = torch.nn.functional
    rng = np.random.default_rng(seed)
    waiting = None if masks is None else list(masks)
    used: list[np.ndarray] = []

    def dropout(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training or p == 0:
            return x
        keep = rng.random(tuple(x.shape)) >= p if waiting is None else waiting.pop(0)
        used.append(keep)
        return torch.where(torch.as_tensor(keep), x / (1 - p), torch.zeros((), dtype=x.dtype))

    fused = functional.scaled_dot_product_attention

    def attention(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
        is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        if dropout_p == 0:
            return fused(
                query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        scores = attention_scores(query, key, attn_mask, is_causal, scale, enable_gqa)
        if enable_gqa:
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
        return dropout(scores.softmax(-1), dropout_p) @ value

    saved = functional.dropout, functional.scaled_dot_product_attention
    functional.dropout, functional.scaled_dot_product_attention = dropout, attention
    try:
        yield used
    finally:
        functional.dropout, functional.scaled_dot_product_attention = saved


def find_dropout_calls(model: Any, inputs: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the path and mask shape of each call of dropout in a pass of a JAX model.

    Args:
        model: in training mode; its dropout is seeded here.
        inputs: of the pass.
    """
    seed_dropout(model, jax.random.key(0))
    paths = {id(d): path for path, d in dropout_modules(model).items() if d.rate > 0}
    calls = []
    original = Dropout.keep

    def keep(self: Dropout, shape: tuple[int, ...]) -> Any:
        if id(self) in paths:
            calls.append((paths[id(self)], shape))
        return original(self, shape)

    Dropout.keep = keep  # type: ignore[method-assign]
    try:
        # Whatever the length: another kernel draws its masks in parts.
        with attention_kernel("plain"):
            model(inputs)
    finally:
        Dropout.keep = original  # type: ignore[method-assign]
    return calls


def attention_scores(
    query: Any,
    key: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Returns what torch's ``scaled_dot_product_attention`` takes the softmax of.

    Args:
        query: (..., N, T, H).
        key: (..., K, S, H), where K is N or, with ``enable_gqa``, divides it.
        attn_mask: boolean (True = may attend) or added to the scores.
        is_causal: whether to use a causal mask instead.
        scale: factor of the scores; default 1 / sqrt(H).
        enable_gqa: whether groups of queries share a key head.

    Returns:
        Scores (..., N, T, S).
    """
    torch = require_torch()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], dim=-3)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask
