"""Blocks: the order of attention, feed-forward, norms and residual sums.

A block takes its parts ready made; ``make_block`` builds them from a config.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxformer.attention import LayerCache, MultiHeadAttention
from jaxformer.config import TransformerConfig
from jaxformer.feed_forward import GATED, FeedForward, GatedFeedForward
from jaxformer.layers import Dropout
from jaxformer.masks import causal_mask, combine_masks, window_mask
from jaxformer.norms import LayerNorm, RMSNorm, make_norm
from jaxformer.positions import (
    ALiBi,
    LearnedPositions,
    NoPositions,
    RelativePositions,
    Rotary,
    SinusoidalPositions,
)

Hidden = Float[Array, "B T D"]
Norm = LayerNorm | RMSNorm
Branch = tuple[Norm, Callable[[Hidden], Hidden]]


class Block(nnx.Module):
    """Branches around a residual stream; a subclass says how they are combined.

    The branches are self-attention, cross-attention where given (a decoder's block), and
    feed-forward, each with its norm and a dropout on what it adds.

    Args:
        attention: the self-attention.
        feed_forward: a ``FeedForward`` or ``GatedFeedForward``.
        attention_norm: the norm beside the self-attention.
        feed_forward_norm: the norm beside the feed-forward.
        cross_attention: attends to an encoder's output.
        cross_attention_norm: the norm beside the cross-attention.
        residual_dropout: rate on what each branch adds.
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feed_forward: FeedForward | GatedFeedForward,
        attention_norm: Norm,
        feed_forward_norm: Norm,
        *,
        cross_attention: MultiHeadAttention | None = None,
        cross_attention_norm: Norm | None = None,
        residual_dropout: float = 0.0,
    ):
        self.attention = attention
        self.cross_attention = cross_attention
        self.feed_forward = feed_forward
        self.attention_norm = attention_norm
        self.cross_attention_norm = cross_attention_norm
        self.feed_forward_norm = feed_forward_norm
        self.attention_residual_dropout = Dropout(residual_dropout)
        self.cross_attention_residual_dropout = (
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
        return_weights: bool = False,
    ) -> Hidden | tuple[Hidden, Float[Array, "B N T S"]]:
        """The residual stream after this block, and the self-attention's weights if asked for.

        Args:
            x: the residual stream.
            mask: who may attend to whom in the self-attention.
            memory: the encoder's output, for a block with cross-attention.
            memory_mask: who may attend to what in the cross-attention.
            positions: see ``MultiHeadAttention``.
            cache: see ``MultiHeadAttention``.
            return_weights: also return the weights of the self-attention.
        """
        weights = []

        def attend(h: Hidden) -> Hidden:
            h = self.attention(
                h, mask=mask, positions=positions, cache=cache, return_weights=return_weights
            )
            if return_weights:
                h, attention_weights = h
                weights.append(attention_weights)
            return self.attention_residual_dropout(h)

        def attend_to_memory(h: Hidden) -> Hidden:
            h = self.cross_attention(h, memory, mask=memory_mask)
            return self.cross_attention_residual_dropout(h)

        def feed(h: Hidden) -> Hidden:
            return self.feed_forward_residual_dropout(self.feed_forward(h))

        branches = [(self.attention_norm, attend), (self.feed_forward_norm, feed)]
        if self.cross_attention is not None:
            branches.insert(1, (self.cross_attention_norm, attend_to_memory))
        x = self.combine(x, branches)
        return (x, weights[0]) if return_weights else x

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """The formula of the block."""
        raise NotImplementedError


class PreNormBlock(Block):
    """x = x + drop(branch(norm(x))), branch after branch (GPT-2; arXiv 2002.04745)."""

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """The formula of the block."""
        for norm, branch in branches:
            x = x + branch(norm(x))
        return x


class PostNormBlock(Block):
    """x = norm(x + drop(branch(x))), branch after branch (arXiv 1706.03762, section 3.1)."""

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """The formula of the block."""
        for norm, branch in branches:
            x = norm(x + branch(x))
        return x


class ParallelBlock(Block):
    """x = x + Σ drop(branch(norm(x))), all branches from the same x (GPT-NeoX, arXiv 2204.06745)."""

    def combine(self, x: Hidden, branches: Sequence[Branch]) -> Hidden:
        """The formula of the block."""
        return x + sum(branch(norm(x)) for norm, branch in branches)


BLOCKS = {"pre_norm": PreNormBlock, "post_norm": PostNormBlock, "parallel": ParallelBlock}


def make_block(
    config: TransformerConfig, *, cross_attention: bool = False, rngs: nnx.Rngs
) -> Block:
    """The block that a config describes, with cross-attention for a decoder's."""
    return BLOCKS[config.block](
        make_attention(config, position=make_position(config, rngs=rngs), rngs=rngs),
        make_feed_forward(config, rngs=rngs),
        make_model_norm(config),
        make_model_norm(config),
        cross_attention=make_attention(config, rngs=rngs) if cross_attention else None,
        cross_attention_norm=make_model_norm(config) if cross_attention else None,
        residual_dropout=config.residual_dropout,
    )


def make_attention(
    config: TransformerConfig, *, position: NoPositions | None = None, rngs: nnx.Rngs
) -> MultiHeadAttention:
    """The attention that a config describes, around a position scheme."""
    head_dim = config.head_dim or config.d_model // config.num_heads

    def head_norm() -> Norm | None:
        if not config.query_key_norm:
            return None
        return make_norm(config.norm, head_dim, eps=config.norm_eps, use_bias=config.norm_bias)

    return MultiHeadAttention(
        config.d_model,
        config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        use_bias=config.qkv_bias,
        output_bias=config.output_bias,
        position=position,
        q_norm=head_norm(),
        k_norm=head_norm(),
        scale=config.attention_scale,
        score_soft_cap=config.score_soft_cap,
        attention_dropout=config.attention_dropout,
        output_dropout=config.output_dropout,
        rngs=rngs,
    )


def make_position(config: TransformerConfig, *, rngs: nnx.Rngs) -> NoPositions:
    """The position scheme inside the attention that a config describes."""
    head_dim = config.head_dim or config.d_model // config.num_heads
    if config.positions == "rotary":
        return Rotary(
            head_dim,
            config.context_length,
            base=config.rotary_base,
            fraction=config.rotary_fraction,
            interleaved=config.rotary_interleaved,
            scaling=config.rotary_scaling,
        )
    if config.positions == "alibi":
        return ALiBi(config.num_heads)
    if config.positions == "relative":
        return RelativePositions(config.max_relative_position, head_dim, rngs=rngs)
    return NoPositions()


def make_feed_forward(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> FeedForward | GatedFeedForward:
    """The feed-forward that a config describes."""
    gated = config.activation in GATED
    return (GatedFeedForward if gated else FeedForward)(
        config.d_model,
        config.d_ff,
        activation=GATED.get(config.activation, config.activation),
        use_bias=config.feed_forward_bias,
        hidden_dropout=config.hidden_dropout,
        output_dropout=config.feed_forward_dropout,
        rngs=rngs,
    )


def make_model_norm(config: TransformerConfig) -> Norm:
    """A norm over the model's width, as a config describes it."""
    return make_norm(config.norm, config.d_model, eps=config.norm_eps, use_bias=config.norm_bias)


def make_position_embedding(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> LearnedPositions | SinusoidalPositions | None:
    """The rows that a config adds to the token embeddings, if any."""
    if config.positions == "learned":
        return LearnedPositions(config.context_length, config.d_model, rngs=rngs)
    if config.positions == "sinusoidal":
        return SinusoidalPositions(config.context_length, config.d_model)
    return None


def self_attention_mask(
    query_length: int,
    key_length: int,
    *,
    causal: bool,
    window: int | None,
    start: Int[Array, ""] | int = 0,
    mask: Bool[Array, "..."] | None = None,
) -> Bool[Array, "B N T S"] | None:
    """The causal mask, the sliding window and the caller's own, together.

    Args:
        query_length: T; the queries stand at slots start … start + T - 1 of the S keys.
        key_length: S.
        causal: whether a query is kept from later keys.
        window: how many tokens a query sees on each side, itself included; None is all.
        start: the first query's slot; above 0 only with a key/value cache.
        mask: the caller's own.
    """
    query_slots = start + jnp.arange(query_length)
    key_slots = jnp.arange(key_length)
    return combine_masks(
        causal_mask(query_slots, key_slots) if causal else None,
        window_mask(query_slots, key_slots, window) if window is not None else None,
        mask,
    )


def run_blocks(
    blocks: Sequence[Block],
    x: Hidden,
    mask: Bool[Array, "B N T S"] | None = None,
    memory: Float[Array, "B S D"] | None = None,
    memory_mask: Bool[Array, "B N T S"] | None = None,
    *,
    positions: Int[Array, "B T"] | None = None,
    cache: list[LayerCache] | None = None,
    return_weights: bool = False,
) -> Hidden | tuple[Hidden, list[Float[Array, "B N T S"]]]:
    """The residual stream after all blocks, and each self-attention's weights if asked for.

    Arguments as in ``Block``, with one ``LayerCache`` a block.
    """
    weights = []
    for layer, block in enumerate(blocks):
        x = block(
            x,
            mask,
            memory,
            memory_mask,
            positions=positions,
            cache=None if cache is None else cache[layer],
            return_weights=return_weights,
        )
        if return_weights:
            x, block_weights = x
            weights.append(block_weights)
    return (x, weights) if return_weights else x
