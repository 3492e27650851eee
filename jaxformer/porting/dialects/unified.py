"""Family ``unified``: one stack with pluggable parts (names as its users' PyTorch classes have)."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.feed_forward import FeedForward, GatedFeedForward
from jaxformer.porting.dialects.parts import (
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
    rotary_tables_of,
    sinusoids,
)
from jaxformer.porting.dialects.signatures import (
    AddedPositions,
    AddedSinusoids,
    ALiBiTable,
    RotaryOnHeads,
    TwoInputAttention,
)
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.source_model import NUM_HEADS, Foreign
from jaxformer.positions import ALiBi, LearnedPositions, Rotary, SinusoidalPositions
from jaxformer.transformer_lm import TransformerLM

ATTENTION = names(q_proj="W_q", k_proj="W_k", v_proj="W_v", o_proj="W_o")
# Of the two sets of names a feed-forward has one; the arrays tell which.
PLAIN = names(up_proj="net.0", down_proj="net.3")
GATED = names(gate_proj="w_gate", up_proj="w_up", down_proj="w_down")

POSITIONS = {
    "SinusoidalPE": "sinusoidal",
    "LearnedPE": "learned",
    "RoPE": "rotary",
    "ALiBi": "alibi",
}


def _sizes(foreign: Foreign) -> dict[str, Any]:
    """Sizes of an attention; of a class that has key/value heads of its own, their number."""
    if foreign.kind == "MultiHeadAttention":
        return attention_sizes(foreign, "W_q", "W_k", "W_v", "W_o")
    sizes = attention_sizes(foreign, "W_q", "W_o")
    found = foreign.shape("W_k.weight", 2)[0] // (sizes["d_model"] // sizes["num_heads"])
    known = 1 if foreign.kind == "MultiQueryAttention" else foreign.number(*NUM_KV_HEADS)
    return {**sizes, "num_kv_heads": known or found}


def _attention(
    foreign: Foreign, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = TwoInputAttention
) -> MultiHeadAttention:
    return kind(**_sizes(foreign), attention_dropout=foreign.dropout(), rngs=rngs)


def _is_gated(foreign: Foreign) -> bool:
    return any(foreign.has(name) for name in ("w_gate", "w_up", "w_down"))


def _feed_forward(foreign: Foreign, rngs: nnx.Rngs) -> FeedForward | GatedFeedForward:
    rate = foreign.dropout()
    if _is_gated(foreign):
        d_ff, d_model = foreign.shape("w_gate.weight", 2)
        return GatedFeedForward(d_model, d_ff, output_dropout=rate, rngs=rngs)
    activation = demand_activation(foreign, "net.1", "gelu")
    return feed_forward(
        foreign, "net.0", activation=activation, hidden_dropout=rate, output_dropout=rate, rngs=rngs
    )


def _block(foreign: Foreign, rngs: nnx.Rngs) -> PreNormBlock | PostNormBlock:
    parts = (
        _attention(foreign.child("attention"), rngs, MultiHeadAttention),
        _feed_forward(foreign.child("ffn"), rngs),
        layer_norm(foreign, "norm1"),
        layer_norm(foreign, "norm2"),
    )
    kind = PreNormBlock if is_pre_norm(foreign) else PostNormBlock
    return kind(*parts, residual_dropout=foreign.dropout())


def _layer_settings(foreign: Foreign) -> dict[str, Any]:
    """Settings of a config, from one of its layers."""
    attention, ffn = foreign.child("attention"), foreign.child("ffn")
    gated = _is_gated(ffn)
    rate = ffn.dropout()
    return {
        **_sizes(attention),
        "d_ff": ffn.shape("w_gate.weight" if gated else "net.0.weight", 2)[0],
        "activation": "swiglu" if gated else demand_activation(ffn, "net.1", "gelu"),
        "feed_forward_bias": not gated,
        "norm_eps": one_eps(foreign, "norm1", "norm2"),
        "attention_dropout": attention.dropout(),
        "hidden_dropout": 0.0 if gated else rate,
        "feed_forward_dropout": rate,
        "residual_dropout": foreign.dropout(),
    }


def _transformer(foreign: Foreign, rngs: nnx.Rngs) -> TransformerLM:
    pre_norm = foreign.has("final_norm")
    said = [layer.setting("pre_norm", default=pre_norm) for layer in foreign.children("layers")]
    if any(order != pre_norm for order in said):
        raise UsageError(
            "a pre-norm Transformer has a final_norm and a post-norm one has none: got "
            f"pre_norm={said} {'with' if pre_norm else 'without'} it"
        )
    config = TransformerLMConfig(
        **alike(foreign.children("layers"), _layer_settings),
        vocab_size=foreign.shape("tok_emb.weight", 2)[0],
        num_layers=foreign.count("layers"),
        block="pre_norm" if pre_norm else "post_norm",
        final_norm=pre_norm,
        causal=False,
        embedding_dropout=foreign.dropout(),
        **_positions(foreign),
    )
    model = TransformerLM(config, rngs=rngs)
    model.final_norm = layer_norm(foreign, "final_norm") if pre_norm else None
    return model


def _positions(foreign: Foreign) -> dict[str, Any]:
    kind = foreign.child("pos_enc").kind
    if kind not in ("", "Identity", *POSITIONS):
        raise UsageError(f"pos_enc={kind} is not ours to make: {', '.join(POSITIONS)} are")
    if "pos_enc.pe" in foreign.shapes:
        positions, length = "sinusoidal", foreign.shape("pos_enc.pe", 3)[1]
    elif foreign.has("pos_enc.pe"):
        positions, length = "learned", foreign.shape("pos_enc.pe.weight", 2)[0]
    elif foreign.has("pos_enc.cos"):
        positions, length = "rotary", foreign.shape("pos_enc.cos", 4)[2]
    else:
        # Tables may have been left out of the arrays, and ALiBi has none: a setting must tell.
        told = foreign.module is not None
        positions = POSITIONS.get(kind, "none") if told else foreign.setting("positions")
        length = foreign.setting("max_len", default=8192)
    interleaved = {"rotary_interleaved": True} if positions == "rotary" else {}
    return {"positions": positions, "context_length": length, **interleaved}


def _settings(module: TransformerLM) -> dict[str, Any]:
    config = module.config
    return {
        **describe(module),
        "max_len": config.context_length,
        "positions": config.positions,
    }


def _sinusoidal(foreign: Foreign, rngs: nnx.Rngs) -> AddedSinusoids:
    _, max_length, d_model = foreign.shape("pe", 3)
    return AddedSinusoids(max_length, d_model)


def _alibi(foreign: Foreign, rngs: nnx.Rngs) -> ALiBiTable:
    slopes = foreign.setting("slopes", default=None)
    return ALiBiTable(foreign.setting(*NUM_HEADS) if slopes is None else len(slopes))


def _heads(module: ALiBi) -> dict[str, Any]:
    return {"num_heads": module.num_heads}


def _learned(foreign: Foreign, rngs: nnx.Rngs) -> AddedPositions:
    return AddedPositions(*foreign.shape("pe.weight", 2), rngs=rngs)


def _rotary(foreign: Foreign, rngs: nnx.Rngs) -> RotaryOnHeads:
    _, _, max_length, half = foreign.shape("cos", 4)
    return RotaryOnHeads(2 * half, max_length, interleaved=True)


def _feed_forward_rules(module: FeedForward | GatedFeedForward) -> Rules:
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
    Dialect(
        "unified",
        (
            *(
                Counterpart((kind,), MultiHeadAttention, _attention, ATTENTION, settings=describe)
                for kind in ("MultiHeadAttention", "MultiQueryAttention", "GroupedQueryAttention")
            ),
            Counterpart(("FeedForward",), FeedForward, _feed_forward, PLAIN),
            Counterpart(("SwiGLUFFN",), GatedFeedForward, _feed_forward, GATED),
            Counterpart(("TransformerBlock",), Block, _block, _block_rules, settings=describe),
            Counterpart(
                ("Transformer",),
                TransformerLM,
                _transformer,
                _transformer_rules,
                aliases={"head.weight": "tok_emb.weight"},
                buffers=(
                    sinusoids("pos_enc.pe"),
                    *rotary_tables_of("pos_enc.cos", "pos_enc.sin"),
                ),
                settings=_settings,
            ),
            Counterpart(
                ("SinusoidalPE",),
                SinusoidalPositions,
                _sinusoidal,
                (),
                buffers=(sinusoids("pe"),),
            ),
            Counterpart(("LearnedPE",), LearnedPositions, _learned, names({"": "pe"})),
            Counterpart(
                ("RoPE",),
                Rotary,
                _rotary,
                (),
                buffers=rotary_tables_of("cos", "sin"),
            ),
            Counterpart(("ALiBi",), ALiBi, _alibi, (), settings=_heads),
        ),
    ),
)
