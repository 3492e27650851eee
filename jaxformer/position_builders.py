"""Makes the position schemes that a config describes."""

from flax import nnx

from jaxformer.config import EncoderDecoderConfig, TransformerConfig, TransformerLMConfig
from jaxformer.config_positions import RotaryScalingConfig
from jaxformer.config_speech import SpeechTransformerConfig
from jaxformer.disentangled import DisentangledPositions
from jaxformer.positions import (
    ALiBi,
    LearnedPositions,
    NoPositions,
    RelativeBuckets,
    RelativePositions,
    Rotary,
    RotaryScaling,
    SinusoidalPositions,
)


def make_position(
    config: TransformerConfig, layer: int = 0, *, causal: bool = True, rngs: nnx.Rngs
) -> NoPositions:
    """Returns the position scheme inside the attention that a config describes."""
    part, rotary = config.position, config.position.rotary
    if part.positions == "rotary":
        base, scaling = rotary.rotary_base, rotary.scaling
        if isinstance(config, TransformerLMConfig):
            if layer in config.layers.layers_without_rotary:
                return NoPositions()
            if config.layers.window_rotary_base is not None and config.window(layer) is not None:
                base, scaling = config.layers.window_rotary_base, RotaryScalingConfig()
        return Rotary(
            config.rotary_width,
            config.context_length,
            base=base,
            fraction=rotary.rotary_fraction,
            interleaved=rotary.rotary_interleaved,
            scaling=make_rotary_scaling(scaling),
        )
    if part.positions == "alibi":
        return ALiBi(
            config.attention.num_heads,
            max_bias=part.alibi_max_bias,
            scale=part.alibi_scale,
            in_bfloat16=part.alibi_in_bfloat16,
        )
    if part.positions == "relative":
        return RelativePositions(part.max_relative_position, config.head_width, rngs=rngs)
    if part.positions == "disentangled":
        return DisentangledPositions(
            config.d_model,
            config.attention.num_heads,
            config.head_width,
            span=part.disentangled.distance_span,
            max_distance=part.disentangled.distance_limit,
            content_to_position=part.disentangled.content_to_position,
            position_to_content=part.disentangled.position_to_content,
            shares_projections=part.disentangled.shared_distance_projections,
            dropout=part.disentangled.distance_dropout,
            rngs=rngs,
        )
    if part.positions == "relative_buckets" and not part.shared_buckets:
        return make_buckets(config, causal=causal, rngs=rngs)
    return NoPositions()


def make_buckets(config: TransformerConfig, *, causal: bool, rngs: nnx.Rngs) -> RelativeBuckets:
    """Returns the table of biases by distance that a config describes."""
    part = config.position
    return RelativeBuckets(
        part.num_position_buckets,
        config.attention.num_heads,
        max_distance=part.max_bucket_distance,
        causal=causal,
        rngs=rngs,
    )


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
        config.rotary_beta_fast,
        config.rotary_beta_slow,
        config.rotary_truncate,
        config.rotary_attention_factor,
        config.rotary_short_factors,
        config.rotary_long_factors,
        config.rotary_proportion,
    )


def make_position_embedding(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> LearnedPositions | SinusoidalPositions | None:
    """Returns the positions that a config adds to the token embeddings, if any."""
    part, width = config.position, config.d_model
    if isinstance(config, TransformerLMConfig):
        width = config.embedding_sum_width
    if part.positions == "learned" or part.learned_rows:
        return LearnedPositions(
            config.context_length, width, offset=part.position_offset, rngs=rngs
        )
    if part.positions == "sinusoidal":
        return SinusoidalPositions(
            config.context_length,
            width,
            halves=part.sinusoid_halves,
            offset=part.position_offset,
            exact=part.sinusoid_exact,
        )
    return None


def make_source_position_embedding(
    config: EncoderDecoderConfig, *, rngs: nnx.Rngs
) -> LearnedPositions | SinusoidalPositions | None:
    """Returns the positions that a config adds to the source alone, if any."""
    if isinstance(config, SpeechTransformerConfig):
        return SinusoidalPositions(config.features.encoder_length, config.d_model, halves=True)
    return None if config.embedding.shared_positions else make_position_embedding(config, rngs=rngs)
