"""Makes parts and blocks from a config: the one place that reads the settings of a layer."""

import math
from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import BLOCKS, Block, StackPosition
from jaxformer.config import TransformerClassifierConfig, TransformerConfig, TransformerLMConfig
from jaxformer.config_classifiers import EncoderDecoderClassifierConfig
from jaxformer.config_heads import HeadConfig
from jaxformer.config_speech import SpeechClassifierConfig
from jaxformer.config_vision import VisionTransformerConfig
from jaxformer.disentangled import DistanceRows
from jaxformer.experts import MixtureOfExperts
from jaxformer.feed_forward import GATED, FeedForward, GatedFeedForward
from jaxformer.heads import ClassifierHead, HeadTransform, OutputBias
from jaxformer.latent_attention import LatentAttention
from jaxformer.layers import Linear
from jaxformer.norms import LayerNorm, LayerScale, NoNorm, RMSNorm, make_norm
from jaxformer.patches import PatchEmbedding
from jaxformer.pooling import AttentionPooling
from jaxformer.position_builders import make_buckets, make_position
from jaxformer.positions import NoPositions


def make_block(
    config: TransformerConfig,
    layer: int = 0,
    *,
    causal: bool = True,
    cross_attention: bool = False,
    rngs: nnx.Rngs,
) -> Block:
    """Returns the block that a config describes, with cross-attention for a decoder.

    Args:
        config: the settings.
        layer: the block's index, by which a layer pattern tells layers apart.
        causal: whether its positions are kept from later ones.
        cross_attention: whether it also attends to an encoder's output.
        rngs: where the initial weights come from.
    """

    def norm(wanted: bool) -> LayerNorm | RMSNorm | None:
        return make_model_norm(config) if wanted else None

    def output_scale(wanted: bool) -> LayerNorm | RMSNorm | LayerScale | None:
        initial = config.block.layer_scale
        if wanted and initial is not None:
            return LayerScale(config.d_model, initial=initial)
        return norm(wanted and config.block.branch_output_norm)

    is_bare = layer == 0 and not config.norm.first_norm
    return BLOCKS[config.block.block](
        make_attention(
            config, position=make_position(config, layer, causal=causal, rngs=rngs), rngs=rngs
        ),
        make_feed_forward(config, layer, rngs=rngs),
        NoNorm() if is_bare else make_model_norm(config),
        norm(not config.block.shared_norm),
        cross_attention=make_attention(config, rngs=rngs) if cross_attention else None,
        cross_attention_norm=norm(cross_attention),
        attention_output_norm=output_scale(True),
        feed_forward_output_norm=output_scale(True),
        cross_attention_output_norm=output_scale(cross_attention),
        residual_scale=config.block.residual_scale,
        residual_dropout=config.block.residual_dropout,
    )


def block_of(config: TransformerLMConfig, layer: int) -> int:
    """Returns which block is a layer's, by their indices: layers may share one (ALBERT)."""
    groups, size = config.layers.layer_groups, config.layers.layers_in_group
    if groups is None:
        return layer
    # Divided as ALBERT's code does it, whose floor may be off by one where it does not go up.
    group = int(layer // size / (config.num_layers // size / groups))
    return group * size + layer % size


def make_attention(
    config: TransformerConfig, *, position: NoPositions | None = None, rngs: nnx.Rngs
) -> MultiHeadAttention:
    """Returns the attention that a config describes, around a position scheme."""
    part, norm = config.attention, config.attention.query_key

    def head_norm(num_heads: int) -> LayerNorm | RMSNorm | None:
        if not norm.query_key_norm:
            return None
        width = config.head_width
        features: dict[str, int | tuple[int, int]] = {
            "head": width,
            "own_head": (num_heads, width),
            "all_heads": num_heads * width,
        }
        return _make_norm(
            config, features[norm.query_key_norm_over], use_bias=norm.query_key_norm_bias
        )

    if part.latent.latent_width is not None:
        assert part.head_dim is not None
        assert position is not None
        latent, inner = part.latent, part.latent.query_latent_width
        return LatentAttention(
            config.d_model,
            part.num_heads,
            head_dim=part.head_dim,
            latent_width=part.latent.latent_width,
            rotary_dim=latent.rotary_head_dim,
            value_dim=latent.value_head_dim,
            query_latent_width=inner,
            use_bias=part.qkv_bias,
            output_bias=part.output_bias,
            position=position,
            kv_norm=_make_norm(config, part.latent.latent_width, eps=latent.latent_norm_eps),
            q_norm=None if inner is None else _make_norm(config, inner, eps=latent.latent_norm_eps),
            scale=part.attention_scale,
            attention_dropout=part.attention_dropout,
            output_dropout=part.output_dropout,
            rngs=rngs,
        )
    return MultiHeadAttention(
        config.d_model,
        part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        use_bias=part.qkv_bias,
        key_bias=part.key_bias,
        output_bias=part.output_bias,
        position=position,
        q_norm=head_norm(part.num_heads),
        k_norm=head_norm(config.key_value_heads),
        norm_all_heads=norm.query_key_norm_over == "all_heads",
        norm_after_rotation=norm.query_key_norm_after_rotation,
        qkv_clip=part.qkv_clip,
        scale=_score_scale(config),
        score_soft_cap=part.score_soft_cap,
        sinks=part.attention_sinks,
        attention_dropout=part.attention_dropout,
        output_dropout=part.output_dropout,
        rngs=rngs,
    )


def _score_scale(config: TransformerConfig) -> float | None:
    """What scores are multiplied by; None is 1/sqrt(H)."""
    part = config.position.disentangled
    if config.attention.attention_scale is not None or config.position.positions != "disentangled":
        return config.attention.attention_scale
    kinds = 1 + part.content_to_position + part.position_to_content
    return 1 / math.sqrt(kinds * config.head_width)


def make_stack_position(
    config: TransformerConfig, *, causal: bool, rngs: nnx.Rngs
) -> StackPosition:
    """Returns the position scheme that all layers of a stack share, if any."""
    part = config.position
    if part.positions == "disentangled":
        norm = make_model_norm(config) if part.disentangled.distance_norm else None
        return DistanceRows(part.disentangled.distance_span, config.d_model, norm=norm, rngs=rngs)
    if part.positions != "relative_buckets" or not part.shared_buckets:
        return None
    return make_buckets(config, causal=causal, rngs=rngs)


def make_feed_forward(
    config: TransformerConfig, layer: int = 0, *, rngs: nnx.Rngs
) -> FeedForward | GatedFeedForward | MixtureOfExperts:
    """Returns the feed-forward of a layer that a config describes, or its experts."""
    if config.has_experts(layer):
        return _make_experts(config, rngs=rngs)
    return _make_plain_feed_forward(config, rngs=rngs)


def _make_plain_feed_forward(
    config: TransformerConfig, *, rngs: nnx.Rngs
) -> FeedForward | GatedFeedForward:
    part = config.feed_forward
    more: dict[str, Any] = {}
    if part.activation in GATED:
        more["clamp"] = (part.swiglu_slope, part.swiglu_limit)
    return (GatedFeedForward if part.is_gated else FeedForward)(
        config.d_model,
        part.d_ff,
        activation=GATED.get(part.activation, part.activation),
        use_bias=part.feed_forward_bias,
        hidden_dropout=part.hidden_dropout,
        output_dropout=part.feed_forward_dropout,
        **more,
        rngs=rngs,
    )


def _make_experts(config: TransformerConfig, *, rngs: nnx.Rngs) -> MixtureOfExperts:
    part, experts = config.feed_forward, config.feed_forward.experts
    router = experts.router
    assert experts.num_experts is not None
    return MixtureOfExperts(
        config.d_model,
        config.expert_width,
        num_experts=experts.num_experts,
        experts_per_token=experts.experts_per_token,
        activation=GATED[part.activation],
        use_bias=part.feed_forward_bias,
        clamp=(part.swiglu_slope, part.swiglu_limit),
        router={
            "kind": router.router,
            "normalize_weights": router.normalize_expert_weights,
            "weight_scale": router.expert_weight_scale,
            "use_bias": router.router_bias,
            "choice_bias": router.choice_bias,
            "groups": router.expert_groups,
            "groups_per_token": router.groups_per_token,
        },
        shared_d_ff=experts.shared_expert_d_ff,
        shared_gate=experts.shared_expert_gate,
        hidden_dropout=part.hidden_dropout,
        output_dropout=part.feed_forward_dropout,
        rngs=rngs,
    )


def make_model_norm(config: TransformerConfig, features: int | None = None) -> LayerNorm | RMSNorm:
    """Returns a norm over the model's width, or another, as a config describes it."""
    return _make_norm(config, config.d_model if features is None else features)


def _make_norm(
    config: TransformerConfig,
    features: int | tuple[int, int],
    *,
    use_bias: bool | None = None,
    eps: float | None = None,
) -> LayerNorm | RMSNorm:
    part = config.norm
    return make_norm(
        part.norm,
        features,
        eps=part.norm_eps if eps is None else eps,
        use_bias=part.norm_bias if use_bias is None else use_bias,
        use_scale=part.norm_scale,
        unit_offset=part.norm_unit_offset,
    )


def make_patch_embedding(config: VisionTransformerConfig, *, rngs: nnx.Rngs) -> PatchEmbedding:
    """Returns the projection of patches that a config describes."""
    part = config.patches
    return PatchEmbedding(
        config.d_model,
        patch_height=part.patch_height,
        patch_width=part.patch_width,
        num_channels=part.num_channels,
        use_bias=part.patch_bias,
        rngs=rngs,
    )


def make_attention_pooling(config: VisionTransformerConfig, *, rngs: nnx.Rngs) -> AttentionPooling:
    """Returns the pooling by a trained query, with an attention and a feed-forward of its own."""
    return AttentionPooling(
        config.d_model,
        make_attention(config, rngs=rngs),
        make_model_norm(config),
        _make_plain_feed_forward(config, rngs=rngs),
        rngs=rngs,
    )


def make_embedding_projection(config: TransformerLMConfig, *, rngs: nnx.Rngs) -> Linear | None:
    """Returns the matrix that takes embeddings to the model's width, if any."""
    if config.embedding.embedding_width is None:
        return None
    use_bias = config.embedding.projected_embeddings == "sum"
    return Linear(config.embedding_width, config.d_model, use_bias=use_bias, rngs=rngs)


def make_output_projection(config: TransformerLMConfig, *, rngs: nnx.Rngs) -> Linear | None:
    """Returns the matrix that takes the last block's output to the embeddings' width, if any."""
    part = config.embedding
    if part.embedding_width is None or part.projected_embeddings == "sum":
        return None
    return Linear(config.d_model, config.embedding_width, use_bias=False, rngs=rngs)


def make_head_transform(config: TransformerLMConfig, *, rngs: nnx.Rngs) -> HeadTransform | None:
    """Returns the module that a config puts before the output projection, if any."""
    if config.head.head != "masked_lm":
        return None
    return HeadTransform(
        config.d_model,
        make_model_norm(config, config.embedding_width),
        activation=config.head_activation,
        out_features=config.embedding_width,
        use_bias=config.head.head_transform_bias,
        rngs=rngs,
    )


def make_lm_head(
    config: HeadConfig, width: int, vocab_size: int, *, rngs: nnx.Rngs
) -> Linear | OutputBias | None:
    """Returns the projection to logits, the bias of a tied one, or None, as a config says."""
    if config.head == "none":
        return None
    if not config.tie_embeddings:
        return Linear(width, vocab_size, use_bias=config.head_bias, rngs=rngs)
    return OutputBias(vocab_size) if config.head_bias else None


def make_classifier_head(
    config: TransformerClassifierConfig | EncoderDecoderClassifierConfig | SpeechClassifierConfig,
    *,
    rngs: nnx.Rngs,
) -> ClassifierHead:
    """Returns what makes scores of labels, as a config says."""
    part = config.classifier
    return ClassifierHead(
        config.d_model,
        len(part.labels),
        transform=part.classifier_transform,
        transform_width=part.classifier_width,
        activation=part.classifier_activation,
        transform_bias=part.classifier_transform_bias,
        norm=make_model_norm(config, part.classifier_width) if part.classifier_norm else None,
        use_bias=part.classifier_bias,
        input_dropout=part.classifier_input_dropout,
        dropout=part.classifier_dropout,
        rngs=rngs,
    )
