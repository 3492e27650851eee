"""Makes parts and blocks from a config: the one place that reads the settings of a layer."""

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import BLOCKS, Block, Norm
from jaxformer.config import TransformerConfig, TransformerLMConfig
from jaxformer.config_parts import RotaryScalingConfig
from jaxformer.feed_forward import GATED, FeedForward, GatedFeedForward
from jaxformer.heads import HeadTransform, OutputBias
from jaxformer.layers import Linear
from jaxformer.norms import make_norm
from jaxformer.positions import (
    ALiBi,
    LearnedPositions,
    NoPositions,
    RelativePositions,
    Rotary,
    RotaryScaling,
    SinusoidalPositions,
)


def make_block(
    config: TransformerConfig, *, cross_attention: bool = False, rngs: nnx.Rngs
) -> Block:
    """Returns the block that a config describes, with cross-attention for a decoder."""

    def norm(wanted: bool) -> Norm | None:
        return make_model_norm(config) if wanted else None

    return BLOCKS[config.block.block](
        make_attention(config, position=make_position(config, rngs=rngs), rngs=rngs),
        make_feed_forward(config, rngs=rngs),
        make_model_norm(config),
        norm(not config.block.shared_norm),
        cross_attention=make_attention(config, rngs=rngs) if cross_attention else None,
        cross_attention_norm=norm(cross_attention),
        attention_output_norm=norm(config.block.branch_output_norm),
        feed_forward_output_norm=norm(config.block.branch_output_norm),
        cross_attention_output_norm=norm(cross_attention and config.block.branch_output_norm),
        residual_dropout=config.block.residual_dropout,
    )


def make_attention(
    config: TransformerConfig, *, position: NoPositions | None = None, rngs: nnx.Rngs
) -> MultiHeadAttention:
    """Returns the attention that a config describes, around a position scheme."""
    part = config.attention

    def head_norm() -> Norm | None:
        return _make_norm(config, config.head_width) if part.query_key_norm else None

    return MultiHeadAttention(
        config.d_model,
        part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        use_bias=part.qkv_bias,
        output_bias=part.output_bias,
        position=position,
        q_norm=head_norm(),
        k_norm=head_norm(),
        scale=part.attention_scale,
        score_soft_cap=part.score_soft_cap,
        attention_dropout=part.attention_dropout,
        output_dropout=part.output_dropout,
        rngs=rngs,
    )


def make_position(config: TransformerConfig, *, rngs: nnx.Rngs) -> NoPositions:
    """Returns the position scheme inside the attention that a config describes."""
    part, rotary = config.position, config.position.rotary
    if part.positions == "rotary":
        return Rotary(
            config.head_width,
            config.context_length,
            base=rotary.rotary_base,
            fraction=rotary.rotary_fraction,
            interleaved=rotary.rotary_interleaved,
            scaling=make_rotary_scaling(rotary.scaling),
        )
    if part.positions == "alibi":
        return ALiBi(config.attention.num_heads)
    if part.positions == "relative":
        return RelativePositions(part.max_relative_position, config.head_width, rngs=rngs)
    return NoPositions()


def make_rotary_scaling(config: RotaryScalingConfig) -> RotaryScaling | None:
    """Returns the scaling of rotary frequencies that a config describes, if any."""
    if config.rotary_scaling == "none":
        return None
    return RotaryScaling(
        config.rotary_scaling,
        config.rotary_scaling_factor,
        config.rotary_low_frequency_factor,
        config.rotary_high_frequency_factor,
        config.rotary_original_context_length,
    )


def make_feed_forward(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> FeedForward | GatedFeedForward:
    """Returns the feed-forward that a config describes."""
    part = config.feed_forward
    gated = part.activation in GATED
    return (GatedFeedForward if gated else FeedForward)(
        config.d_model,
        part.d_ff,
        activation=GATED.get(part.activation, part.activation),
        use_bias=part.feed_forward_bias,
        hidden_dropout=part.hidden_dropout,
        output_dropout=part.feed_forward_dropout,
        rngs=rngs,
    )


def make_model_norm(config: TransformerConfig) -> Norm:
    """Returns a norm over the model's width, as a config describes it."""
    return _make_norm(config, config.d_model)


def _make_norm(config: TransformerConfig, features: int) -> Norm:
    return make_norm(
        config.norm.norm,
        features,
        eps=config.norm.norm_eps,
        use_bias=config.norm.norm_bias,
        unit_offset=config.norm.norm_unit_offset,
    )


def make_position_embedding(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> LearnedPositions | SinusoidalPositions | None:
    """Returns the positions that a config adds to the token embeddings, if any."""
    if config.position.positions == "learned":
        return LearnedPositions(
            config.context_length, config.d_model, offset=config.position.position_offset, rngs=rngs
        )
    if config.position.positions == "sinusoidal":
        return SinusoidalPositions(config.context_length, config.d_model)
    return None


def make_head_transform(config: TransformerLMConfig, *, rngs: nnx.Rngs) -> HeadTransform | None:
    """Returns the module that a config puts before the output projection, if any."""
    if config.head.head != "masked_lm":
        return None
    return HeadTransform(
        config.d_model,
        make_model_norm(config),
        activation=config.feed_forward.activation,
        rngs=rngs,
    )


def make_lm_head(
    config: TransformerLMConfig, vocab_size: int, *, rngs: nnx.Rngs
) -> Linear | OutputBias | None:
    """Returns the projection to logits, the bias of a tied one, or None, as a config says."""
    if config.head.head == "none":
        return None
    if not config.head.tie_embeddings:
        return Linear(config.d_model, vocab_size, use_bias=config.head.head_bias, rngs=rngs)
    return OutputBias(vocab_size) if config.head.head_bias else None
