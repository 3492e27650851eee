"""Dialect ``unified``: one stack with exchangeable components."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.porting.dialects.common.buffers import rotary_table_buffers, sinusoid_buffer
from jaxformer.porting.dialects.common.reading import (
    NORMS,
    NUM_KV_HEADS,
    alike,
    attention_sizes,
    demand_activation,
    describe,
    feed_forward,
    is_pre_norm,
    layer_norm,
    one_eps,
)
from jaxformer.porting.dialects.common.signatures import (
    AddedPositions,
    AddedSinusoids,
    ALiBiTable,
    RotaryOnHeads,
    TwoInputAttention,
)
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import unsupported
from jaxformer.porting.mapping.source_model import NUM_HEADS, SourceModel
from jaxformer.positions import ALiBi, LearnedPositions, Rotary, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM

ATTENTION = names(q_proj="W_q", k_proj="W_k", v_proj="W_v", o_proj="W_o")
# A feed-forward has one of these two sets of names; the arrays show which.
PLAIN = names(up_proj="net.0", down_proj="net.3")
GATED = names(gate_proj="w_gate", up_proj="w_up", down_proj="w_down")

POSITIONS = {
    "SinusoidalPE": "sinusoidal",
    "LearnedPE": "learned",
    "RoPE": "rotary",
    "ALiBi": "alibi",
}


def _sizes(source_model: SourceModel) -> dict[str, Any]:
    """Returns the sizes of an attention, with the number of key/value heads where it differs."""
    if source_model.kind == "MultiHeadAttention":
        return attention_sizes(source_model, "W_q", "W_k", "W_v", "W_o")
    sizes = attention_sizes(source_model, "W_q", "W_o")
    found = source_model.shape("W_k.weight", 2)[0] // (sizes["d_model"] // sizes["num_heads"])
    known = 1 if source_model.kind == "MultiQueryAttention" else source_model.number(*NUM_KV_HEADS)
    return {**sizes, "num_kv_heads": known or found}


def _attention(
    source_model: SourceModel, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = TwoInputAttention
) -> MultiHeadAttention:
    return kind(**_sizes(source_model), attention_dropout=source_model.dropout(), rngs=rngs)


def _is_gated(source_model: SourceModel) -> bool:
    return any(source_model.has(name) for name in ("w_gate", "w_up", "w_down"))


def _feed_forward(source_model: SourceModel, rngs: nnx.Rngs) -> FeedForward | GatedFeedForward:
    rate = source_model.dropout()
    if _is_gated(source_model):
        d_ff, d_model = source_model.shape("w_gate.weight", 2)
        return GatedFeedForward(d_model, d_ff, output_dropout=rate, rngs=rngs)
    activation = demand_activation(source_model, "net.1", "gelu")
    return feed_forward(
        source_model,
        "net.0",
        activation=activation,
        hidden_dropout=rate,
        output_dropout=rate,
        rngs=rngs,
    )


def _block(source_model: SourceModel, rngs: nnx.Rngs) -> PreNormBlock | PostNormBlock:
    components = (
        _attention(source_model.child("attention"), rngs, MultiHeadAttention),
        _feed_forward(source_model.child("ffn"), rngs),
        layer_norm(source_model, "norm1"),
        layer_norm(source_model, "norm2"),
    )
    kind = PreNormBlock if is_pre_norm(source_model) else PostNormBlock
    return kind(*components, residual_dropout=source_model.dropout())


def _layer_settings(source_model: SourceModel) -> dict[str, Any]:
    """Returns fields of a config, from one of the layers."""
    attention, ffn = source_model.child("attention"), source_model.child("ffn")
    gated = _is_gated(ffn)
    rate = ffn.dropout()
    return {
        **_sizes(attention),
        "d_ff": ffn.shape("w_gate.weight" if gated else "net.0.weight", 2)[0],
        "activation": "swiglu" if gated else demand_activation(ffn, "net.1", "gelu"),
        "feed_forward_bias": not gated,
        "norm_eps": one_eps(source_model, "norm1", "norm2"),
        "attention_dropout": attention.dropout(),
        "hidden_dropout": 0.0 if gated else rate,
        "feed_forward_dropout": rate,
        "residual_dropout": source_model.dropout(),
    }


def _transformer(source_model: SourceModel, rngs: nnx.Rngs) -> TransformerLM:
    pre_norm = source_model.has("final_norm")
    orders = [
        layer.setting("pre_norm", default=pre_norm) for layer in source_model.children("layers")
    ]
    if any(order != pre_norm for order in orders):
        raise UsageError(
            "a pre-norm Transformer has a final_norm and a post-norm one has none: got "
            f"pre_norm={orders} {'with' if pre_norm else 'without'} it"
        )
    config = TransformerLMConfig(
        **alike(source_model.children("layers"), _layer_settings),
        vocab_size=source_model.shape("tok_emb.weight", 2)[0],
        num_layers=source_model.count("layers"),
        block="pre_norm" if pre_norm else "post_norm",
        final_norm=pre_norm,
        causal=False,
        embedding_dropout=source_model.dropout(),
        **_positions(source_model),
    )
    model = TransformerLM(config, rngs=rngs)
    model.final_norm = layer_norm(source_model, "final_norm") if pre_norm else None
    return model


def _positions(source_model: SourceModel) -> dict[str, Any]:
    kind = source_model.child("pos_enc").kind
    if kind not in ("", "Identity", *POSITIONS):
        raise unsupported("pos_enc", f"be one of {', '.join(POSITIONS)}", kind)
    if "pos_enc.pe" in source_model.shapes:
        positions, length = "sinusoidal", source_model.shape("pos_enc.pe", 3)[1]
    elif source_model.has("pos_enc.pe"):
        positions, length = "learned", source_model.shape("pos_enc.pe.weight", 2)[0]
    elif source_model.has("pos_enc.cos"):
        positions, length = "rotary", source_model.shape("pos_enc.cos", 4)[2]
    else:
        # Tables may have been left out of the arrays, and ALiBi has none: a setting decides.
        has_module = source_model.module is not None
        positions = POSITIONS.get(kind, "none") if has_module else source_model.setting("positions")
        length = source_model.setting("max_len", default=8192)
    interleaved = {"rotary_interleaved": True} if positions == "rotary" else {}
    return {"positions": positions, "context_length": length, **interleaved}


def _settings(module: TransformerLM) -> dict[str, Any]:
    config = module.config
    return {
        **describe(module),
        "max_len": config.context_length,
        "positions": config.position.positions,
    }


def _sinusoidal(source_model: SourceModel, rngs: nnx.Rngs) -> AddedSinusoids:
    _, max_length, d_model = source_model.shape("pe", 3)
    return AddedSinusoids(max_length, d_model)


def _alibi(source_model: SourceModel, rngs: nnx.Rngs) -> ALiBiTable:
    slopes = source_model.setting("slopes", default=None)
    return ALiBiTable(source_model.setting(*NUM_HEADS) if slopes is None else len(slopes))


def _heads(module: ALiBi) -> dict[str, Any]:
    return {"num_heads": module.num_heads}


def _learned(source_model: SourceModel, rngs: nnx.Rngs) -> AddedPositions:
    return AddedPositions(*source_model.shape("pe.weight", 2), rngs=rngs)


def _rotary(source_model: SourceModel, rngs: nnx.Rngs) -> RotaryOnHeads:
    _, _, max_length, half = source_model.shape("cos", 4)
    return RotaryOnHeads(2 * half, max_length, interleaved=True)


def _feed_forward_rules(module: nnx.Module) -> Rules:
    return GATED if isinstance(module, GatedFeedForward) else PLAIN


def _block_rules(module: Block) -> Rules:
    return (
        *under("attention", "attention", ATTENTION),
        *under("feed_forward", "ffn", _feed_forward_rules(module.feed_forward)),
        *NORMS,
    )


def _transformer_rules(module: TransformerLM) -> Rules:
    return (
        *names(token_embedding="tok_emb", position_embedding="pos_enc.pe", final_norm="final_norm"),
        *under("blocks.*", "layers.*", _block_rules(module.blocks[0])),
    )


DIALECTS = (
    StateDictAdapter(
        "unified",
        (
            *(
                ModuleMapping((kind,), MultiHeadAttention, _attention, ATTENTION, settings=describe)
                for kind in ("MultiHeadAttention", "MultiQueryAttention", "GroupedQueryAttention")
            ),
            ModuleMapping(("FeedForward",), FeedForward, _feed_forward, PLAIN),
            ModuleMapping(("SwiGLUFFN",), GatedFeedForward, _feed_forward, GATED),
            ModuleMapping(("TransformerBlock",), Block, _block, _block_rules, settings=describe),
            ModuleMapping(
                ("Transformer",),
                TransformerLM,
                _transformer,
                _transformer_rules,
                aliases={"head.weight": "tok_emb.weight"},
                buffers=(
                    sinusoid_buffer("pos_enc.pe"),
                    *rotary_table_buffers("pos_enc.cos", "pos_enc.sin"),
                ),
                settings=_settings,
            ),
            ModuleMapping(
                ("SinusoidalPE",),
                SinusoidalPositions,
                _sinusoidal,
                (),
                buffers=(sinusoid_buffer("pe"),),
            ),
            ModuleMapping(("LearnedPE",), LearnedPositions, _learned, names({"": "pe"})),
            ModuleMapping(
                ("RoPE",),
                Rotary,
                _rotary,
                (),
                buffers=rotary_table_buffers("cos", "sin"),
            ),
            ModuleMapping(("ALiBi",), ALiBi, _alibi, (), settings=_heads),
        ),
    ),
)
