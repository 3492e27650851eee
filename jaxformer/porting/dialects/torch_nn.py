"""``torch.nn``: PyTorch's own attention, encoder, decoder and both together."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.config import TransformerConfig
from jaxformer.encoder_decoder import Decoder, Encoder
from jaxformer.errors import UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.norms import LayerNorm
from jaxformer.porting.dialects.parts import (
    activation_name,
    alike,
    describe,
    feed_forward,
    layer_norm,
    one_eps,
    width_of,
)
from jaxformer.porting.dialects.torch_signatures import (
    PostNormDecoderLayer,
    PostNormEncoderLayer,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
    Seq2Seq,
    TorchAttention,
    TorchDecoder,
    TorchEncoder,
)
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import Fused, Rule, names, under
from jaxformer.porting.mapping.source_model import Foreign

ATTENTION = (
    Rule(("q_proj", "k_proj", "v_proj"), ("in_proj",), Fused(), joiner="_"),
    *names(o_proj="out_proj"),
)
COMMON = (
    *under("attention", "self_attn", ATTENTION),
    *under("feed_forward", "", names(up_proj="linear1", down_proj="linear2")),
    *names(attention_norm="norm1"),
)
ENCODER_LAYER = (*COMMON, *names(feed_forward_norm="norm2"))
DECODER_LAYER = (
    *COMMON,
    *under("cross_attention", "multihead_attn", ATTENTION),
    *names(cross_attention_norm="norm2", feed_forward_norm="norm3"),
)
ENCODER = (*under("blocks.*", "layers.*", ENCODER_LAYER), *names(final_norm="norm"))
DECODER = (*under("blocks.*", "layers.*", DECODER_LAYER), *names(final_norm="norm"))
BOTH = (*under("encoder", "encoder", ENCODER), *under("decoder", "decoder", DECODER))
# The same arrays serve either layout of the inputs, which ours has only where it came from torch.
LAYOUT = frozenset({"batch_first"})


def _attention(
    foreign: Foreign, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = TorchAttention
) -> MultiHeadAttention:
    use_bias = _has_biases(foreign)
    attention = kind(
        **_attention_settings(foreign), use_bias=use_bias, output_bias=use_bias, rngs=rngs
    )
    return _laid_out(attention, foreign) if isinstance(attention, TorchAttention) else attention


def _attention_settings(foreign: Foreign) -> dict[str, Any]:
    if foreign.setting("add_zero_attn", default=False) or foreign.has("bias_k"):
        raise UsageError("add_bias_kv and add_zero_attn are not ours to make: both must be False")
    if foreign.has("k_proj_weight"):
        raise UsageError("kdim and vdim other than embed_dim are not ours to make")
    d_model = width_of(foreign, "out_proj")
    return {
        "d_model": d_model,
        "num_heads": foreign.num_heads(d_model),
        "attention_dropout": foreign.dropout(),
    }


def _has_biases(foreign: Foreign) -> bool:
    """Whether a module has biases: all of its parts have, or none."""
    return any(name.endswith("bias") for name in foreign.shapes)


def _laid_out(module: Any, attention: Foreign) -> Any:
    """The module, called with inputs in the layout of an attention of theirs."""
    module.batch_first = bool(attention.setting("batch_first", default=False))
    return module


def _activation(foreign: Foreign) -> str:
    return activation_name(foreign.setting("activation", default="relu"))


def _rates(foreign: Foreign) -> dict[str, float]:
    """The rates of a layer beside those of its attentions; all branches have one."""
    places = [f"dropout{n}" for n in (1, 2, 3)]
    found = {foreign.child(p).dropout() for p in places if foreign.child(p).module is not None}
    if len(found) > 1:
        raise UsageError(f"the branches of {foreign.kind} drop at rates that differ: {found}")
    return {
        "hidden_dropout": foreign.child("dropout").dropout(),
        "residual_dropout": found.pop() if found else foreign.child("dropout1").dropout(),
    }


def _layer(foreign: Foreign, rngs: nnx.Rngs) -> Block:
    """A TransformerEncoderLayer or a TransformerDecoderLayer."""
    is_decoder = foreign.kind == "TransformerDecoderLayer"
    use_bias = _has_biases(foreign)
    rates = _rates(foreign)
    cross: dict[str, Any] = {}
    if is_decoder:
        attention = foreign.child("multihead_attn")
        cross["cross_attention"] = _attention(attention, rngs, MultiHeadAttention)
        cross["cross_attention_norm"] = layer_norm(foreign, "norm2", use_bias=use_bias)
    kinds = (
        (PostNormDecoderLayer, PreNormDecoderLayer)
        if is_decoder
        else (PostNormEncoderLayer, PreNormEncoderLayer)
    )
    layer = kinds[bool(foreign.setting("norm_first", default=False))](
        _attention(foreign.child("self_attn"), rngs, MultiHeadAttention),
        feed_forward(
            foreign,
            "linear1",
            activation=_activation(foreign),
            use_bias=use_bias,
            hidden_dropout=rates["hidden_dropout"],
            rngs=rngs,
        ),
        layer_norm(foreign, "norm1", use_bias=use_bias),
        layer_norm(foreign, "norm3" if is_decoder else "norm2", use_bias=use_bias),
        residual_dropout=rates["residual_dropout"],
        **cross,
    )
    return _laid_out(layer, foreign.child("self_attn"))


def _layer_settings(foreign: Foreign) -> dict[str, Any]:
    """Settings of a config, from one of its layers."""
    attentions = [foreign.child(n) for n in ("self_attn", "multihead_attn") if foreign.has(n)]
    use_bias = _has_biases(foreign)
    return {
        **alike(attentions, _attention_settings),
        "d_ff": foreign.shape("linear1.weight", 2)[0],
        "activation": _activation(foreign),
        "block": "pre_norm" if foreign.setting("norm_first", default=False) else "post_norm",
        "norm_eps": one_eps(foreign, "norm1", "norm2", "norm3"),
        "norm_bias": use_bias,
        "qkv_bias": use_bias,
        "output_bias": use_bias,
        "feed_forward_bias": use_bias,
        **_rates(foreign),
    }


def _stack(foreign: Foreign, rngs: nnx.Rngs) -> Encoder | Decoder:
    """A TransformerEncoder or a TransformerDecoder."""
    settings = alike(foreign.children("layers"), _layer_settings)
    # Neither reads the context's length: there is no table of positions.
    config = TransformerConfig(
        **settings, positions="none", context_length=1, final_norm=foreign.has("norm")
    )
    num_layers = foreign.count("layers")
    stack: Encoder | Decoder = (
        TorchDecoder(config, num_layers, causal=False, rngs=rngs)
        if foreign.has("layers.0.multihead_attn")
        else TorchEncoder(config, num_layers, rngs=rngs)
    )
    if config.final_norm:
        kind = foreign.child("norm").kind
        if kind not in ("", "LayerNorm"):
            raise UsageError(f"the final norm {kind} is not ours to make: it must be a LayerNorm")
        stack.final_norm = layer_norm(foreign, "norm", use_bias=foreign.has("norm.bias"))
    return _laid_out(stack, foreign.child("layers.0.self_attn"))


def _transformer(foreign: Foreign, rngs: nnx.Rngs) -> Seq2Seq:
    parts: list[Any] = []
    for name, kind in (("encoder", "TransformerEncoder"), ("decoder", "TransformerDecoder")):
        part = foreign.child(name)
        if part.kind not in ("", kind):
            raise UsageError(f"custom_{name}={part.kind} is not ours to make: it must be a {kind}")
        parts.append(_stack(part, rngs))
    return Seq2Seq(*parts)


def _settings(module: Any) -> dict[str, Any]:
    """Arguments of their constructor that the shapes of the arrays do not tell."""
    settings = describe(module)
    settings["norm_first"] = settings.pop("pre_norm", False)
    for _, node in nnx.iter_modules(module):
        if isinstance(node, FeedForward):
            settings["activation"] = node.activation
        if isinstance(node, LayerNorm):
            settings.setdefault("layer_norm_eps", node.eps)
    return settings


def _counterpart(name: str, ours: type, build: Any, rules: Any) -> Counterpart:
    return Counterpart((name,), ours, build, rules, settings=_settings, translated=LAYOUT)


DIALECTS = (
    Dialect(
        "torch.nn",
        (
            _counterpart("MultiheadAttention", MultiHeadAttention, _attention, ATTENTION),
            _counterpart("TransformerEncoderLayer", Block, _layer, ENCODER_LAYER),
            _counterpart("TransformerDecoderLayer", Block, _layer, DECODER_LAYER),
            _counterpart("TransformerEncoder", Encoder, _stack, ENCODER),
            _counterpart("TransformerDecoder", Decoder, _stack, DECODER),
            _counterpart("Transformer", Seq2Seq, _transformer, BOTH),
        ),
    ),
)
