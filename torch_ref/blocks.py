"""Blocks: attention and feed-forward around a residual stream, with norms and sums in one order.

A block takes its parts ready made; ``builders.make_block`` makes one from a config.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import nn

from torch_ref.attention import LayerCache, MultiHeadAttention
from torch_ref.disentangled import DistanceRows
from torch_ref.experts import MixtureOfExperts, Routing
from torch_ref.feed_forward import FeedForward, GatedFeedForward
from torch_ref.layers import Dropout
from torch_ref.masks import causal_mask, combine_masks, window_mask
from torch_ref.norms import LayerNorm, LayerScale, NoNorm, RMSNorm
from torch_ref.positions import RelativeBuckets

Norm = LayerNorm | RMSNorm | LayerScale | NoNorm
StackPosition = RelativeBuckets | DistanceRows | None
Mask = torch.Tensor | None
# Its norm, the branch itself, and what is done to its result before it is added.
Branch = tuple[Norm, Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]


class Block(nn.Module):
    """Runs branches around a residual stream; a subclass says how they are combined.

    The branches are self-attention, cross-attention where given (a decoder's block), and
    feed-forward, each with its norm and a dropout on what it adds. Where an output norm is given,
    drop(branch(…)) below stands for drop(output_norm(branch(…))) (Gemma 2, arXiv 2408.00118,
    section 2).

    Args:
        attention: the self-attention.
        feed_forward: a ``FeedForward``, ``GatedFeedForward`` or ``MixtureOfExperts``.
        attention_norm: the norm beside the self-attention.
        feed_forward_norm: the norm beside the feed-forward; None is the self-attention's.
        cross_attention: attends to an encoder's output.
        cross_attention_norm: the norm beside the cross-attention.
        attention_output_norm: a norm of the self-attention's result.
        feed_forward_output_norm: a norm of the feed-forward's result.
        cross_attention_output_norm: a norm of the cross-attention's result.
        residual_dropout: rate on what each branch adds.
        residual_scale: what each branch adds is multiplied by this number (Granite's
            residual multiplier); below, it is a part of drop.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward | GatedFeedForward | MixtureOfExperts,
        attention_norm: Norm,
        feed_forward_norm: Norm | None,
        *,
        cross_attention: MultiHeadAttention | None = None,
        cross_attention_norm: Norm | None = None,
        attention_output_norm: Norm | None = None,
        feed_forward_output_norm: Norm | None = None,
        cross_attention_output_norm: Norm | None = None,
        residual_dropout: float = 0.0,
        residual_scale: float = 1.0,
    ):
        super().__init__()
        self.residual_scale = residual_scale
        self.attention = attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.cross_attention_norm = cross_attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.attention_output_norm = attention_output_norm
        self.feed_forward_output_norm = feed_forward_output_norm
        self.cross_attention_output_norm = cross_attention_output_norm
        self.attention_residual_dropout = Dropout(residual_dropout)
        self.cross_attention_residual_dropout = (
            None if cross_attention is None else Dropout(residual_dropout)
        )
        self.feed_forward_residual_dropout = Dropout(residual_dropout)

    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        memory: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        *,
        positions: torch.Tensor | None = None,
        cache: LayerCache | None = None,
        position_bias: torch.Tensor | None = None,
        position_rows: torch.Tensor | None = None,
        memory_cache: LayerCache | None = None,
        return_weights: bool | Literal["both"] = False,
        return_routing: bool = False,
    ) -> Any:
        """Returns the residual stream after this block.

        With ``return_weights`` or ``return_routing`` a tuple of it and of what these give.

        Args:
            x: the residual stream, (B, T, D).
            mask: who may attend to whom in the self-attention, broadcastable to (B, N, T, S).
            memory: what the cross-attention attends to, or the attention of a block that has none;
                default x itself. (B, S, D).
            memory_mask: who may attend to what in the cross-attention.
            positions: see ``MultiHeadAttention``.
            cache: see ``MultiHeadAttention``.
            position_bias: see ``MultiHeadAttention``; of the self-attention.
            position_rows: see ``MultiHeadAttention``; of the self-attention.
            memory_cache: see ``MultiHeadAttention``; of the cross-attention.
            return_weights: also return the weights of the self-attention, (B, N, T, S), or with
                ``"both"`` a pair of its weights and those of the cross-attention.
            return_routing: also return what the router of its experts chose; None without experts.
        """
        weights: list[Any] = []
        routings: list[Routing] = []

        def attend(h: torch.Tensor) -> torch.Tensor:
            h = self.attention(
                h,
                memory if self.cross_attention is None else None,
                mask=mask,
                positions=positions,
                cache=cache,
                position_bias=position_bias,
                position_rows=position_rows,
                return_weights=bool(return_weights),
            )
            if return_weights:
                h, attention_weights = h
                weights.append(attention_weights)
            return _apply(self.attention_output_norm, h)

        def attend_to_memory(h: torch.Tensor) -> torch.Tensor:
            assert self.cross_attention is not None
            h = self.cross_attention(
                h,
                memory,
                mask=memory_mask,
                memory_cache=memory_cache,
                return_weights=return_weights == "both",
            )
            if return_weights == "both":
                h, attention_weights = h
                weights.append(attention_weights)
            return _apply(self.cross_attention_output_norm, h)

        def feed(h: torch.Tensor) -> torch.Tensor:
            if return_routing and isinstance(self.feed_forward, MixtureOfExperts):
                h, routing = self.feed_forward(h, return_routing=True)
                routings.append(routing)
            else:
                h = self.feed_forward(h)
            return _apply(self.feed_forward_output_norm, h)

        feed_norm = self.feed_forward_norm or self.attention_norm
        branches: list[Branch] = [
            (self.attention_norm, attend, self._scaled(self.attention_residual_dropout)),
            (feed_norm, feed, self._scaled(self.feed_forward_residual_dropout)),
        ]
        if self.cross_attention_norm is not None:
            scaled = self._scaled(self.cross_attention_residual_dropout)
            branches.insert(1, (self.cross_attention_norm, attend_to_memory, scaled))
        x = self.combine(x, branches)
        found: list[Any] = []
        if return_weights:
            found.append(tuple(weights) if return_weights == "both" else weights[0])
        if return_routing:
            found.append(next(iter(routings), None))
        return (x, *found) if found else x

    def _scaled(self, dropout: Dropout | None) -> Callable[[torch.Tensor], torch.Tensor]:
        """What is done to a branch's result before it is added."""
        assert dropout is not None
        if self.residual_scale == 1:
            return dropout
        return lambda h: dropout(h) * self.residual_scale

    def combine(self, x: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        """Returns the residual stream after all branches."""
        raise NotImplementedError


def _apply(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class PreNormBlock(Block):
    """Computes x = x + drop(branch(norm(x))), branch after branch (GPT-2; arXiv 2002.04745)."""

    def combine(self, x: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x = x + drop(branch(norm(x)))
        return x


class PostNormBlock(Block):
    """Computes x = norm(x + drop(branch(x))), branch after branch (arXiv 1706.03762, 3.1)."""

    def combine(self, x: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x = norm(x + drop(branch(x)))
        return x


class OutputNormBlock(Block):
    """Computes x = x + drop(norm(branch(x))), branch after branch (OLMo 2, arXiv 2501.00656).

    EXAONE 4 (arXiv 2507.11407) has it too.
    """

    def combine(self, x: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x = x + drop(norm(branch(x)))
        return x


class ParallelBlock(Block):
    """Computes x + Σ drop(branch(norm(x))), all branches from the same x (arXiv 2204.06745).

    GPT-J and Phi give both branches one norm: ``feed_forward_norm`` is None.
    """

    def combine(self, x: torch.Tensor, branches: Sequence[Branch]) -> torch.Tensor:
        """Returns the residual stream after all branches, by the formula of the class."""
        # sum() would start from the number 0, one more pass over the stream.
        added = (drop(branch(norm(x))) for norm, branch, drop in branches)
        return x + functools.reduce(operator.add, added)


BLOCKS = {
    "pre_norm": PreNormBlock,
    "post_norm": PostNormBlock,
    "output_norm": OutputNormBlock,
    "parallel": ParallelBlock,
}


def self_attention_mask(
    query_length: int,
    key_length: int,
    *,
    causal: bool,
    window: int | None,
    start: int = 0,
    mask: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> torch.Tensor | None:
    """Returns where the causal mask, the sliding window and the caller's mask all allow.

    Args:
        query_length: T; the queries stand at slots start … start + T - 1 of the S keys.
        key_length: S.
        causal: whether a query is kept from later keys.
        window: how many tokens a query sees on each side, itself included; None is all.
        start: the first query's slot; above 0 only with a key/value cache.
        mask: the caller's own.
        device: where the result is to be; default torch's.
    """
    query_slots = torch.arange(start, start + query_length, device=device)
    key_slots = torch.arange(key_length, device=device)
    combined = combine_masks(
        causal_mask(query_slots, key_slots) if causal else None,
        window_mask(query_slots, key_slots, window) if window is not None else None,
        mask,
    )
    if causal and window is None and mask is None and start == 0 and query_length == key_length:
        # The fused attention then leaves the blocked half out, and can be the flash kernel on a
        # GPU, which takes no mask. Whatever is made of this tensor loses the mark.
        combined.is_causal = True  # type: ignore[union-attr]
    return combined


def stack_position_bias(
    position: StackPosition,
    x: torch.Tensor,
    cache: list[LayerCache] | None = None,
) -> torch.Tensor | None:
    """Returns what a position scheme that all layers share adds to their scores, if there is one.

    Args:
        position: the scheme.
        x: what enters the first block, (B, T, D); its T tokens follow those in the cache.
        cache: see ``run_blocks``.
    """
    if not isinstance(position, RelativeBuckets):
        return None
    start, slots = 0, x.shape[1]
    if cache is not None:
        start, slots = cache[0].length, cache[0].k_BSKH.shape[1]
    slots_T = torch.arange(start, start + x.shape[1], device=x.device)
    slots_S = torch.arange(slots, device=x.device)
    return position.bias(None, slots_S[None, :] - slots_T[:, None])


def stack_position_rows(position: StackPosition) -> torch.Tensor | None:
    """Returns the rows of distances that all layers share, if there are any."""
    return position() if isinstance(position, DistanceRows) else None


def run_blocks(
    blocks: Iterable[nn.Module],
    x: torch.Tensor,
    mask: Mask | list[Mask] = None,
    memory: torch.Tensor | None = None,
    memory_mask: torch.Tensor | None = None,
    *,
    positions: torch.Tensor | None = None,
    cache: list[LayerCache] | None = None,
    position_bias: torch.Tensor | None = None,
    position_rows: torch.Tensor | None = None,
    memory_cache: list[LayerCache] | None = None,
    return_weights: bool | Literal["both"] = False,
    return_routing: bool = False,
) -> tuple[torch.Tensor, list[Any], list[Routing]]:
    """Returns the residual stream after all blocks, and what each block has given beside it.

    That is the weights of each self-attention and what each router chose; the lists are empty
    unless ``return_weights`` and ``return_routing``. Arguments as in ``Block``, with one
    ``LayerCache`` a block, and one mask for all blocks or a list of one a block. The position bias
    is that of all.
    """
    weights, routings = [], []
    for layer, block in enumerate(blocks):
        result = block(
            x,
            mask[layer] if isinstance(mask, list) else mask,
            memory,
            memory_mask,
            positions=positions,
            cache=None if cache is None else cache[layer],
            position_bias=position_bias,
            position_rows=position_rows,
            memory_cache=None if memory_cache is None else memory_cache[layer],
            return_weights=return_weights,
            return_routing=return_routing,
        )
        x, *found = result if isinstance(result, tuple) else (result,)
        if return_weights:
            weights.append(found.pop(0))
        # A layer without experts has no router.
        routings += [routing for routing in found if routing is not None]
    return x, weights, routings
