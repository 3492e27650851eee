"""Blocks: attention and feed-forward around a residual stream, with norms and sums in one order.

A block takes its parts ready made; ``builders.make_block`` makes one from a config.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache, MultiHeadAttention
from jaxformer.disentangled import DistanceRows
from jaxformer.execution.layer_scan import can_scan, scan_layers
from jaxformer.execution.rematerialization import rematerialize
from jaxformer.execution.sharding import gather_when_called, lay_out
from jaxformer.execution.shared_traces import share_traces
from jaxformer.experts import MixtureOfExperts, Routing
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.layers import Dropout, in_float32
from jaxformer.masks import causal_mask, combine_masks, window_mask
from jaxformer.norms import LayerNorm, LayerScale, NoNorm, RMSNorm, norm_beside
from jaxformer.positions import RelativeBuckets

Hidden = Float[Array, "B T D"]
Norm = LayerNorm | RMSNorm | LayerScale | NoNorm
StackPosition = RelativeBuckets | DistanceRows | None
Mask = Bool[Array, "B N T S"] | None
# Of the self-attention and of the cross-attention.
Caches = tuple[LayerCache | None, LayerCache | None]
# Its norm, the branch itself, and what is done to its result before it is added.
Branch = tuple[Norm, Callable[[Hidden], Hidden], Callable[[Hidden], Hidden]]


class Block(nnx.Module):
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

    # A cross-attention reads keys and values from elsewhere.
    PROJECTED_TOGETHER = tuple(f"attention.{name}" for name in ("q_proj", "k_proj", "v_proj"))

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
        self.residual_scale = residual_scale
        self.attention = attention
        self.cross_attention: Any = cross_attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.cross_attention_norm = cross_attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.attention_output_norm = attention_output_norm
        self.feed_forward_output_norm = feed_forward_output_norm
        self.cross_attention_output_norm = cross_attention_output_norm
        self.attention_residual_dropout = Dropout(residual_dropout)
        self.cross_attention_residual_dropout: Any = (
            None if cross_attention is None else Dropout(residual_dropout)
        )
        self.feed_forward_residual_dropout = Dropout(residual_dropout)

    def __call__(
        self,
        x: Hidden,
        mask: Bool[Array, "B N T S"] | None = None,
        memory: Float[Array, "B S D"] | None = None,
        memory_mask: Bool[Array, "B N T S"] | None = None,
        *,
        positions: Int[Array, "B T"] | None = None,
        cache: LayerCache | None = None,
        position_bias: Float[Array, "B N T S"] | None = None,
        position_rows: Float[Array, "R D"] | None = None,
        memory_cache: LayerCache | None = None,
        return_weights: bool | Literal["both"] = False,
        return_routing: bool = False,
    ) -> Any:
        """Returns the residual stream after this block.

        With ``return_weights`` or ``return_routing`` a tuple of it and of what these give.

        Args:
            x: the residual stream.
            mask: who may attend to whom in the self-attention.
            memory: what the cross-attention attends to, or the attention of a block that has none;
                default x itself.
            memory_mask: who may attend to what in the cross-attention.
            positions: see ``MultiHeadAttention``.
            cache: see ``MultiHeadAttention``.
            position_bias: see ``MultiHeadAttention``; of the self-attention.
            position_rows: see ``MultiHeadAttention``; of the self-attention.
            memory_cache: see ``MultiHeadAttention``; of the cross-attention.
            return_weights: also return the weights of the self-attention, or with ``"both"`` a pair
                of its weights and those of the cross-attention.
            return_routing: also return what the router of its experts chose; None without experts.
        """
        weights: list[Any] = []
        routings: list[Any] = []
        run_feed_forward: Any = self.feed_forward

        def attend(h: Hidden) -> Hidden:
            result = self.attention(
                h,
                memory if self.cross_attention is None else None,
                mask=mask,
                positions=positions,
                cache=cache,
                position_bias=position_bias,
                position_rows=position_rows,
                return_weights=bool(return_weights),
            )
            if isinstance(result, tuple):
                result, attention_weights = result
                weights.append(attention_weights)
            return _apply(self.attention_output_norm, result)

        def attend_to_memory(h: Hidden) -> Hidden:
            result = self.cross_attention(
                h,
                memory,
                mask=memory_mask,
                memory_cache=memory_cache,
                return_weights=return_weights == "both",
            )
            if isinstance(result, tuple):
                result, attention_weights = result
                weights.append(attention_weights)
            return _apply(self.cross_attention_output_norm, result)

        def feed(h: Hidden) -> Hidden:
            if return_routing and isinstance(self.feed_forward, MixtureOfExperts):
                h, routing = run_feed_forward(h, return_routing=True)
                routings.append(routing)
            else:
                h = run_feed_forward(h)
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

    def _scaled(self, dropout: Dropout) -> Callable[[Hidden], Hidden]:
        """What is done to a branch's result before it is added."""
        if self.residual_scale == 1:
            return dropout
        return lambda h: in_float32(lambda y: y * self.residual_scale, dropout(h))

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """Returns the residual stream after all branches."""
        raise NotImplementedError


def _apply(norm: Norm | None, x: Hidden) -> Hidden:
    return x if norm is None else norm(x)


class PreNormBlock(Block):
    """Computes x = x + drop(branch(norm(x))), branch after branch (GPT-2; arXiv 2002.04745)."""

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x, normed = norm_beside(norm, x)
            x = x + drop(branch(normed))
        return x


class PostNormBlock(Block):
    """Computes x = norm(x + drop(branch(x))), branch after branch (arXiv 1706.03762, 3.1)."""

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x = norm(x + drop(branch(x)))
        return x


class OutputNormBlock(Block):
    """Computes x = x + drop(norm(branch(x))), branch after branch (OLMo 2, arXiv 2501.00656).

    EXAONE 4 (arXiv 2507.11407) has it too.
    """

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """Returns the residual stream after all branches, by the formula of the class."""
        for norm, branch, drop in branches:
            x = x + drop(norm(branch(x)))
        return x


class ParallelBlock(Block):
    """Computes x + Σ drop(branch(norm(x))), all branches of the same x (arXiv 2204.06745).

    GPT-J and Phi give both branches one norm: ``feed_forward_norm`` is None.
    """

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """Returns the residual stream after all branches, by the formula of the class."""
        return x + sum(drop(branch(norm(x))) for norm, branch, drop in branches)


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
    start: Int[Array, ""] | int = 0,
    mask: Bool[Array, "..."] | None = None,
) -> Bool[Array, "B N T S"] | None:
    """Returns where the causal mask, the sliding window and the caller's mask all allow.

    Args:
        query_length: T; the queries stand at slots start … start + T - 1 of the S keys.
        key_length: S.
        causal: whether a query is kept from later keys.
        window: how many tokens a query sees on each side, itself included; None is all.
        start: the first query's slot; above 0 only with a key/value cache.
        mask: the caller's own.
    """
    query_slots = start + np.arange(query_length)
    key_slots = np.arange(key_length)
    return combine_masks(
        causal_mask(query_slots, key_slots) if causal else None,
        window_mask(query_slots, key_slots, window) if window is not None else None,
        mask,
    )


def stack_position_bias(
    position: StackPosition,
    x: Hidden,
    cache: list[LayerCache] | None = None,
) -> Float[Array, "1 N T S"] | None:
    """Returns what a position scheme that all layers share adds to their scores, if there is one.

    Args:
        position: the scheme.
        x: what enters the first block; its T tokens follow those in the cache.
        cache: see ``run_blocks``.
    """
    if not isinstance(position, RelativeBuckets):
        return None
    start, slots = (0, x.shape[1]) if cache is None else (cache[0].length, cache[0].slots)
    slots_T = start + jnp.arange(x.shape[1])
    return position.bias(None, jnp.arange(slots)[None, :] - slots_T[:, None])


def stack_position_rows(
    position: StackPosition,
) -> Float[Array, "R D"] | None:
    """Returns the rows of distances that all layers share, if there are any."""
    return position() if isinstance(position, DistanceRows) else None


def run_blocks(
    blocks: Sequence[Block],
    x: Hidden,
    mask: Mask | list[Mask] = None,
    memory: Float[Array, "B S D"] | None = None,
    memory_mask: Bool[Array, "B N T S"] | None = None,
    *,
    positions: Int[Array, "B T"] | None = None,
    cache: list[LayerCache] | None = None,
    position_bias: Float[Array, "B N T S"] | None = None,
    position_rows: Float[Array, "R D"] | None = None,
    memory_cache: list[LayerCache] | None = None,
    return_weights: bool | Literal["both"] = False,
    return_routing: bool = False,
) -> tuple[Hidden, list[Any], list[Routing]]:
    """Returns the residual stream after all blocks, and what each block has given beside it.

    That is the weights of each self-attention and what each router chose; the lists are empty
    unless ``return_weights`` and ``return_routing``. Arguments as in ``Block``, with one
    ``LayerCache`` a block, and one mask for all blocks or a list of one a block. The position bias
    is that of all.
    """
    masks = mask if isinstance(mask, list) else [mask] * len(blocks)

    def run(block: Any, mask: Mask, x: Hidden, caches: Caches = (None, None)) -> Any:
        call: Callable[..., Any] = functools.partial(
            gather_when_called(block),
            mask=mask,
            positions=positions,
            cache=caches[0],
            position_bias=position_bias,
            position_rows=position_rows,
            memory_cache=caches[1],
            return_weights=return_weights,
            return_routing=return_routing,
        )
        if cache is None:
            call = rematerialize(call)
        return call(lay_out(x, "BTD"), memory=memory, memory_mask=memory_mask)

    same_mask = all(each is masks[0] for each in masks)
    if cache is None and not return_weights and same_mask and can_scan(blocks):
        x, routings = scan_layers(blocks, x, lambda block, x: run(block, masks[0], x))
        return lay_out(x, "BTD"), [], [] if routings is None else routings
    weights, routings = [], []
    none = [None] * len(blocks)
    caches = zip(cache or none, memory_cache or none, strict=True)
    for call, written in zip(share_traces(run, blocks, masks), caches, strict=True):
        result = call(x, written)
        x, *found = result if isinstance(result, tuple) else (result,)
        if return_weights:
            weights.append(found.pop(0))
        # A layer without experts has no router.
        routings += [routing for routing in found if routing is not None]
    return lay_out(x, "BTD"), weights, routings
