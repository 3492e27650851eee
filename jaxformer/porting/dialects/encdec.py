"""Family ``encdec``: encoder, decoder, both together, GPT, and variants of attention."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.config import EncoderDecoderConfig, TransformerConfig, TransformerLMConfig
from jaxformer.encoder_decoder import Decoder, Encoder, EncoderDecoder
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.dialects.parts import (
    NORMS,
    alike,
    attention_sizes,
    describe,
    feed_forward,
    layer_norm,
    one_eps,
    sinusoids,
    width_of,
)
from jaxformer.porting.dialects.signatures import AddedPositions, AddedSinusoids, DecoderLayer
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import NUM_HEADS, Foreign
from jaxformer.positions import LearnedPositions, RelativePositions, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM

PROJECTIONS = ("W_q", "W_k", "W_v", "W_o")
ATTENTION = names(q_proj="W_q", k_proj="W_k", v_proj="W_v", o_proj="W_o")
FEED_FORWARD = names(up_proj="linear1", down_proj="linear2")
FED = under("feed_forward", "feed_forward", FEED_FORWARD)
ENCODER_LAYER = (*under("attention", "self_attn", ATTENTION), *FED, *NORMS)
DECODER_LAYER = (
    *under("attention", "self_attn", ATTENTION),
    *under("cross_attention", "cross_attn", ATTENTION),
    *FED,
    *names(attention_norm="norm1", cross_attention_norm="norm2", feed_forward_norm="norm3"),
)
ENCODER = (*under("blocks.*", "layers.*", ENCODER_LAYER), *names(final_norm="norm"))
DECODER = (*under("blocks.*", "layers.*", DECODER_LAYER), *names(final_norm="norm"))
GPT_BLOCK = (*under("attention", "attn", ATTENTION), *FED, *NORMS)
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


def _attention_settings(foreign: Foreign) -> dict[str, Any]:
    return {**attention_sizes(foreign, *PROJECTIONS), "output_dropout": foreign.dropout()}


def _attention(foreign: Foreign, rngs: nnx.Rngs) -> MultiHeadAttention:
    return MultiHeadAttention(**_attention_settings(foreign), rngs=rngs)


def _multi_query(foreign: Foreign, rngs: nnx.Rngs) -> MultiHeadAttention:
    d_model = width_of(foreign, "W_q", "W_o")
    head_dim, _ = foreign.shape("W_k.weight", 2)
    return MultiHeadAttention(
        d_model,
        foreign.number(*NUM_HEADS) or d_model // head_dim,
        num_kv_heads=1,
        attention_dropout=foreign.dropout(),
        rngs=rngs,
    )


def _relative(foreign: Foreign, rngs: nnx.Rngs) -> MultiHeadAttention:
    d_model = width_of(foreign, *PROJECTIONS)
    rows, head_dim = foreign.shape("relative_position_embedding.weight", 2)
    num_heads = foreign.number(*NUM_HEADS) or d_model // head_dim
    position = RelativePositions((rows - 1) // 2, d_model // num_heads, rngs=rngs)
    return MultiHeadAttention(d_model, num_heads, position=position, rngs=rngs)


def _feed_forward(foreign: Foreign, rngs: nnx.Rngs) -> FeedForward:
    return feed_forward(
        foreign, "linear1", activation="relu", hidden_dropout=foreign.dropout(), rngs=rngs
    )


def _layer(foreign: Foreign, rngs: nnx.Rngs) -> Block:
    """An EncoderLayer, a DecoderLayer or a GPTBlock."""
    is_gpt, is_decoder = foreign.kind == "GPTBlock", foreign.kind == "DecoderLayer"
    kind = PreNormBlock if is_gpt else DecoderLayer if is_decoder else PostNormBlock
    cross: dict[str, Any] = {}
    if is_decoder:
        cross["cross_attention"] = _attention(foreign.child("cross_attn"), rngs)
        cross["cross_attention_norm"] = layer_norm(foreign, "norm2")
    return kind(
        _attention(foreign.child("attn" if is_gpt else "self_attn"), rngs),
        _feed_forward(foreign.child("feed_forward"), rngs),
        layer_norm(foreign, "norm1"),
        layer_norm(foreign, "norm3" if is_decoder else "norm2"),
        residual_dropout=0.0 if is_gpt else foreign.dropout(),
        **cross,
    )


def _layer_settings(foreign: Foreign) -> dict[str, Any]:
    """Settings of a config, from one of its layers."""
    is_gpt = foreign.has("attn")
    attentions = [
        foreign.child(path) for path in ("attn", "self_attn", "cross_attn") if foreign.has(path)
    ]
    return {
        **alike(attentions, _attention_settings),
        "d_ff": foreign.shape("feed_forward.linear1.weight", 2)[0],
        "activation": "relu",
        "block": "pre_norm" if is_gpt else "post_norm",
        "norm_eps": one_eps(foreign, "norm1", "norm2", "norm3"),
        "hidden_dropout": foreign.child("feed_forward").dropout(),
        "residual_dropout": 0.0 if is_gpt else foreign.dropout(),
    }


def _stack(foreign: Foreign, rngs: nnx.Rngs) -> Encoder | Decoder:
    """A TransformerEncoder or a TransformerDecoder."""
    settings = alike(foreign.children("layers"), _layer_settings)
    # Neither reads the context's length: there is no table of positions.
    config = TransformerConfig(**settings, positions="none", context_length=1)
    num_layers = foreign.count("layers")
    stack: Encoder | Decoder = (
        Decoder(config, num_layers, causal=False, rngs=rngs)
        if foreign.kind == "TransformerDecoder"
        else Encoder(config, num_layers, rngs=rngs)
    )
    stack.final_norm = layer_norm(foreign, "norm")
    return stack


def _transformer(foreign: Foreign, rngs: nnx.Rngs) -> EncoderDecoder:
    encoder, decoder = foreign.child("encoder"), foreign.child("decoder")
    layers = [*encoder.children("layers"), *decoder.children("layers")]
    settings = alike(layers, _layer_settings)
    table = "positional_encoding.pe"
    config = EncoderDecoderConfig(
        **settings,
        source_vocab_size=foreign.shape("src_embedding.weight", 2)[0],
        target_vocab_size=foreign.shape("tgt_embedding.weight", 2)[0],
        num_encoder_layers=encoder.count("layers"),
        num_decoder_layers=decoder.count("layers"),
        context_length=(
            foreign.shape(table, 3)[1]
            if foreign.has(table)
            else foreign.setting("max_len", "max_seq_length", "context_length")
        ),
        causal=False,
        embedding_scale=settings["d_model"] ** 0.5,
        embedding_dropout=foreign.child("positional_encoding").dropout(),
    )
    model = EncoderDecoder(config, rngs=rngs)
    model.encoder.final_norm = layer_norm(encoder, "norm")
    model.decoder.final_norm = layer_norm(decoder, "norm")
    return model


def _gpt(foreign: Foreign, rngs: nnx.Rngs) -> TransformerLM:
    config = TransformerLMConfig(
        **alike(foreign.children("blocks"), _layer_settings),
        vocab_size=foreign.shape("token_embedding.weight", 2)[0],
        context_length=foreign.shape("position_embedding.weight", 2)[0],
        num_layers=foreign.count("blocks"),
        embedding_dropout=foreign.dropout(),
    )
    model = TransformerLM(config, rngs=rngs)
    model.final_norm = layer_norm(foreign, "norm")
    return model


def _positional_encoding(foreign: Foreign, rngs: nnx.Rngs) -> AddedSinusoids:
    _, max_length, d_model = foreign.shape("pe", 3)
    return AddedSinusoids(max_length, d_model, dropout=foreign.dropout())


def _learned(foreign: Foreign, rngs: nnx.Rngs) -> AddedPositions:
    rows = foreign.shape("embedding.weight", 2)
    return AddedPositions(*rows, dropout=foreign.dropout(), rngs=rngs)


DIALECTS = (
    Dialect(
        "encdec",
        (
            Counterpart(
                ("MultiHeadAttention",),
                MultiHeadAttention,
                _attention,
                ATTENTION,
                settings=describe,
            ),
            Counterpart(
                ("MultiQueryAttention",),
                MultiHeadAttention,
                _multi_query,
                ATTENTION,
                settings=describe,
            ),
            Counterpart(
                ("RelativePositionalAttention",),
                MultiHeadAttention,
                _relative,
                (*ATTENTION, *names(position="relative_position_embedding")),
                settings=describe,
            ),
            Counterpart(
                ("PositionalEncoding",),
                SinusoidalPositions,
                _positional_encoding,
                (),
                buffers=(sinusoids("pe"),),
            ),
            Counterpart(
                ("LearnedPositionalEmbedding",),
                LearnedPositions,
                _learned,
                names({"": "embedding"}),
            ),
            Counterpart(("FeedForward",), FeedForward, _feed_forward, FEED_FORWARD),
            Counterpart(("EncoderLayer",), PostNormBlock, _layer, ENCODER_LAYER, settings=describe),
            Counterpart(("DecoderLayer",), PostNormBlock, _layer, DECODER_LAYER, settings=describe),
            Counterpart(("GPTBlock",), PreNormBlock, _layer, GPT_BLOCK, settings=describe),
            Counterpart(("TransformerEncoder",), Encoder, _stack, ENCODER, settings=describe),
            Counterpart(("TransformerDecoder",), Decoder, _stack, DECODER, settings=describe),
            Counterpart(
                ("Transformer",),
                EncoderDecoder,
                _transformer,
                TRANSFORMER,
                buffers=(sinusoids("positional_encoding.pe"),),
                settings=describe,
            ),
            Counterpart(
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
