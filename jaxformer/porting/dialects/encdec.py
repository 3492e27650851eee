"""Dialect ``encdec``: encoder, decoder, both together, GPT, and variants of attention."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.config import EncoderDecoderConfig, TransformerConfig, TransformerLMConfig
from jaxformer.encoder_decoder import Decoder, Encoder, EncoderDecoder
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.dialects.common.buffers import sinusoid_buffer
from jaxformer.porting.dialects.common.reading import (
    NORMS,
    alike,
    attention_sizes,
    describe,
    feed_forward,
    layer_norm,
    one_eps,
    width_of,
)
from jaxformer.porting.dialects.common.signatures import (
    AddedPositions,
    AddedSinusoids,
    DecoderLayer,
)
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import NUM_HEADS, SourceModel
from jaxformer.positions import LearnedPositions, RelativePositions, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM

PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")
ATTENTION = names(q_proj="W_q", k_proj="W_k", v_proj="W_v", o_proj="W_o")
FEED_FORWARD = names(up_proj="linear1", down_proj="linear2")
FEED_FORWARD_BLOCK = under("feed_forward", "feed_forward", FEED_FORWARD)
ENCODER_LAYER = (*under("attention", "self_attn", ATTENTION), *FEED_FORWARD_BLOCK, *NORMS)
DECODER_LAYER = (
    *under("attention", "self_attn", ATTENTION),
    *under("cross_attention", "cross_attn", ATTENTION),
    *FEED_FORWARD_BLOCK,
    *names(attention_norm="norm1", cross_attention_norm="norm2", feed_forward_norm="norm3"),
)
ENCODER = (*under("blocks.*", "layers.*", ENCODER_LAYER), *names(final_norm="norm"))
DECODER = (*under("blocks.*", "layers.*", DECODER_LAYER), *names(final_norm="norm"))
GPT_BLOCK = (*under("attention", "attn", ATTENTION), *FEED_FORWARD_BLOCK, *NORMS)
GPT = (
    *names(
        token_embedding="token_embedding",
        position_embedding="position_embedding",
        final_norm="norm",
    ),
    *under("blocks.*", "blocks.*", GPT_BLOCK),
)
TRANSFORMER = (
    *names(
        source_embedding="src_embedding", target_embedding="tgt_embedding", lm_head="output_proj"
    ),
    *under("encoder", "encoder", ENCODER),
    *under("decoder", "decoder", DECODER),
)


def _attention_settings(source_model: SourceModel) -> dict[str, Any]:
    return {**attention_sizes(source_model, *PROJECTIONS), "output_dropout": source_model.dropout()}


def _attention(source_model: SourceModel, rngs: nnx.Rngs) -> MultiHeadAttention:
    return MultiHeadAttention(**_attention_settings(source_model), rngs=rngs)


def _multi_query(source_model: SourceModel, rngs: nnx.Rngs) -> MultiHeadAttention:
    d_model = width_of(source_model, "W_q", "W_o")
    head_dim, _ = source_model.shape("W_k.weight", 2)
    return MultiHeadAttention(
        d_model,
        source_model.number(*NUM_HEADS) or d_model // head_dim,
        num_kv_heads=1,
        attention_dropout=source_model.dropout(),
        rngs=rngs,
    )


def _relative(source_model: SourceModel, rngs: nnx.Rngs) -> MultiHeadAttention:
    d_model = width_of(source_model, *PROJECTIONS)
    rows, head_dim = source_model.shape("relative_position_embedding.weight", 2)
    num_heads = source_model.number(*NUM_HEADS) or d_model // head_dim
    position = RelativePositions((rows - 1) // 2, d_model // num_heads, rngs=rngs)
    return MultiHeadAttention(d_model, num_heads, position=position, rngs=rngs)


def _feed_forward(source_model: SourceModel, rngs: nnx.Rngs) -> FeedForward:
    return feed_forward(
        source_model, "linear1", activation="relu", hidden_dropout=source_model.dropout(), rngs=rngs
    )


def _layer(source_model: SourceModel, rngs: nnx.Rngs) -> Block:
    """Builds an EncoderLayer, a DecoderLayer or a GPTBlock."""
    is_gpt, is_decoder = source_model.kind == "GPTBlock", source_model.kind == "DecoderLayer"
    kind = PreNormBlock if is_gpt else DecoderLayer if is_decoder else PostNormBlock
    cross: dict[str, Any] = {}
    if is_decoder:
        cross["cross_attention"] = _attention(source_model.child("cross_attn"), rngs)
        cross["cross_attention_norm"] = layer_norm(source_model, "norm2")
    return kind(
        _attention(source_model.child("attn" if is_gpt else "self_attn"), rngs),
        _feed_forward(source_model.child("feed_forward"), rngs),
        layer_norm(source_model, "norm1"),
        layer_norm(source_model, "norm3" if is_decoder else "norm2"),
        residual_dropout=0.0 if is_gpt else source_model.dropout(),
        **cross,
    )


def _layer_settings(source_model: SourceModel) -> dict[str, Any]:
    """Returns fields of a config, from one of the layers."""
    is_gpt = source_model.has("attn")
    attentions = [
        source_model.child(path)
        for path in ("attn", "self_attn", "cross_attn")
        if source_model.has(path)
    ]
    return {
        **alike(attentions, _attention_settings),
        "d_ff": source_model.shape("feed_forward.linear1.weight", 2)[0],
        "activation": "relu",
        "block": "pre_norm" if is_gpt else "post_norm",
        "norm_eps": one_eps(source_model, "norm1", "norm2", "norm3"),
        "hidden_dropout": source_model.child("feed_forward").dropout(),
        "residual_dropout": 0.0 if is_gpt else source_model.dropout(),
    }


def _stack(source_model: SourceModel, rngs: nnx.Rngs) -> Encoder | Decoder:
    """Builds a TransformerEncoder or a TransformerDecoder."""
    settings = alike(source_model.children("layers"), _layer_settings)
    # Neither uses the context length: there is no table of positions.
    config = TransformerConfig(**settings, positions="none", context_length=1)
    num_layers = source_model.count("layers")
    stack: Encoder | Decoder = (
        Decoder(config, num_layers, causal=False, rngs=rngs)
        if source_model.kind == "TransformerDecoder"
        else Encoder(config, num_layers, rngs=rngs)
    )
    stack.final_norm = layer_norm(source_model, "norm")
    return stack


def _transformer(source_model: SourceModel, rngs: nnx.Rngs) -> EncoderDecoder:
    encoder, decoder = source_model.child("encoder"), source_model.child("decoder")
    layers = [*encoder.children("layers"), *decoder.children("layers")]
    settings = alike(layers, _layer_settings)
    table = "positional_encoding.pe"
    config = EncoderDecoderConfig(
        **settings,
        source_vocab_size=source_model.shape("src_embedding.weight", 2)[0],
        target_vocab_size=source_model.shape("tgt_embedding.weight", 2)[0],
        num_encoder_layers=encoder.count("layers"),
        num_decoder_layers=decoder.count("layers"),
        context_length=(
            source_model.shape(table, 3)[1]
            if source_model.has(table)
            else source_model.setting("max_len", "max_seq_length", "context_length")
        ),
        causal=False,
        embedding_scale=settings["d_model"] ** 0.5,
        embedding_dropout=source_model.child("positional_encoding").dropout(),
    )
    model = EncoderDecoder(config, rngs=rngs)
    model.encoder.final_norm = layer_norm(encoder, "norm")
    model.decoder.final_norm = layer_norm(decoder, "norm")
    return model


def _gpt(source_model: SourceModel, rngs: nnx.Rngs) -> TransformerLM:
    config = TransformerLMConfig(
        **alike(source_model.children("blocks"), _layer_settings),
        vocab_size=source_model.shape("token_embedding.weight", 2)[0],
        context_length=source_model.shape("position_embedding.weight", 2)[0],
        num_layers=source_model.count("blocks"),
        embedding_dropout=source_model.dropout(),
    )
    model = TransformerLM(config, rngs=rngs)
    model.final_norm = layer_norm(source_model, "norm")
    return model


def _positional_encoding(source_model: SourceModel, rngs: nnx.Rngs) -> AddedSinusoids:
    _, max_length, d_model = source_model.shape("pe", 3)
    return AddedSinusoids(max_length, d_model, dropout=source_model.dropout())


def _learned(source_model: SourceModel, rngs: nnx.Rngs) -> AddedPositions:
    rows = source_model.shape("embedding.weight", 2)
    return AddedPositions(*rows, dropout=source_model.dropout(), rngs=rngs)


DIALECTS = (
    StateDictAdapter(
        "encdec",
        (
            ModuleMapping(
                ("MultiHeadAttention",),
                MultiHeadAttention,
                _attention,
                ATTENTION,
                settings=describe,
            ),
            ModuleMapping(
                ("MultiQueryAttention",),
                MultiHeadAttention,
                _multi_query,
                ATTENTION,
                settings=describe,
            ),
            ModuleMapping(
                ("RelativePositionalAttention",),
                MultiHeadAttention,
                _relative,
                (*ATTENTION, *names(position="relative_position_embedding")),
                settings=describe,
            ),
            ModuleMapping(
                ("PositionalEncoding",),
                SinusoidalPositions,
                _positional_encoding,
                (),
                buffers=(sinusoid_buffer("pe"),),
            ),
            ModuleMapping(
                ("LearnedPositionalEmbedding",),
                LearnedPositions,
                _learned,
                names({"": "embedding"}),
            ),
            ModuleMapping(("FeedForward",), FeedForward, _feed_forward, FEED_FORWARD),
            ModuleMapping(
                ("EncoderLayer",), PostNormBlock, _layer, ENCODER_LAYER, settings=describe
            ),
            ModuleMapping(
                ("DecoderLayer",), PostNormBlock, _layer, DECODER_LAYER, settings=describe
            ),
            ModuleMapping(("GPTBlock",), PreNormBlock, _layer, GPT_BLOCK, settings=describe),
            ModuleMapping(("TransformerEncoder",), Encoder, _stack, ENCODER, settings=describe),
            ModuleMapping(("TransformerDecoder",), Decoder, _stack, DECODER, settings=describe),
            ModuleMapping(
                ("Transformer",),
                EncoderDecoder,
                _transformer,
                TRANSFORMER,
                buffers=(sinusoid_buffer("positional_encoding.pe"),),
                settings=describe,
            ),
            ModuleMapping(
                ("GPT",),
                TransformerLM,
                _gpt,
                GPT,
                aliases={"output_proj.weight": "token_embedding.weight"},
                settings=describe,
            ),
        ),
    ),
)
