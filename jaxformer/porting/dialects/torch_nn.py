"""Dialect ``torch.nn``: PyTorch's own attention, encoder, decoder and Transformer."""

from typing import Any

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block
from jaxformer.config import TransformerConfig
from jaxformer.encoder_decoder import Decoder, Encoder
from jaxformer.errors import UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.norms import LayerNorm
from jaxformer.porting.dialects.common.reading import (
    activation_name,
    alike,
    describe,
    feed_forward,
    layer_norm,
    one_eps,
    width_of,
)
from jaxformer.porting.dialects.common.torch_signatures import (
    PostNormDecoderLayer,
    PostNormEncoderLayer,
    PreNormDecoderLayer,
    PreNormEncoderLayer,
    Seq2Seq,
    TorchAttention,
    TorchDecoder,
    TorchEncoder,
)
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Fused
from jaxformer.porting.mapping.rules import Rule, names, under
from jaxformer.porting.mapping.settings import unsupported
from jaxformer.porting.mapping.source_model import SourceModel

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
# Only modules that were imported from torch have this attribute; the arrays are the same.
LAYOUT = frozenset({"batch_first"})


def _attention(
    source_model: SourceModel, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = TorchAttention
) -> MultiHeadAttention:
    use_bias = _has_biases(source_model)
    attention = kind(
        **_attention_settings(source_model), use_bias=use_bias, output_bias=use_bias, rngs=rngs
    )
    return (
        _with_layout(attention, source_model)
        if isinstance(attention, TorchAttention)
        else attention
    )


def _attention_settings(source_model: SourceModel) -> dict[str, Any]:
    if source_model.setting("add_zero_attn", default=False) or source_model.has("bias_k"):
        raise UsageError(
            "unsupported: add_bias_kv and add_zero_attn must be False: got one of them"
        )
    if source_model.has("k_proj_weight"):
        raise UsageError("unsupported: kdim and vdim must be equal to embed_dim: got others")
    d_model = width_of(source_model, "out_proj")
    return {
        "d_model": d_model,
        "num_heads": source_model.num_heads(d_model),
        "attention_dropout": source_model.dropout(),
    }


def _has_biases(source_model: SourceModel) -> bool:
    """Whether a module has biases; either all of its submodules have them or none."""
    return any(name.endswith("bias") for name in source_model.shapes)


def _with_layout(module: Any, attention: SourceModel) -> Any:
    """Returns the module with the ``batch_first`` of a source attention."""
    module.batch_first = bool(attention.setting("batch_first", default=False))
    return module


def _activation(source_model: SourceModel) -> str:
    return activation_name(source_model.setting("activation", default="relu"))


def _rates(source_model: SourceModel) -> dict[str, float]:
    """Returns the rates of a layer without those of its attentions; all branches have one."""
    places = [f"dropout{n}" for n in (1, 2, 3)]
    found = {
        source_model.child(p).dropout() for p in places if source_model.child(p).module is not None
    }
    if len(found) > 1:
        raise unsupported(f"the branches of {source_model.kind}", "have one dropout rate", found)
    return {
        "hidden_dropout": source_model.child("dropout").dropout(),
        "residual_dropout": found.pop() if found else source_model.child("dropout1").dropout(),
    }


def _layer(source_model: SourceModel, rngs: nnx.Rngs) -> Block:
    """Builds a TransformerEncoderLayer or a TransformerDecoderLayer."""
    is_decoder = source_model.kind == "TransformerDecoderLayer"
    use_bias = _has_biases(source_model)
    rates = _rates(source_model)
    cross: dict[str, Any] = {}
    if is_decoder:
        attention = source_model.child("multihead_attn")
        cross["cross_attention"] = _attention(attention, rngs, MultiHeadAttention)
        cross["cross_attention_norm"] = layer_norm(source_model, "norm2", use_bias=use_bias)
    kinds = (
        (PostNormDecoderLayer, PreNormDecoderLayer)
        if is_decoder
        else (PostNormEncoderLayer, PreNormEncoderLayer)
    )
    layer = kinds[bool(source_model.setting("norm_first", default=False))](
        _attention(source_model.child("self_attn"), rngs, MultiHeadAttention),
        feed_forward(
            source_model,
            "linear1",
            activation=_activation(source_model),
            use_bias=use_bias,
            hidden_dropout=rates["hidden_dropout"],
            rngs=rngs,
        ),
        layer_norm(source_model, "norm1", use_bias=use_bias),
        layer_norm(source_model, "norm3" if is_decoder else "norm2", use_bias=use_bias),
        residual_dropout=rates["residual_dropout"],
        **cross,
    )
    return _with_layout(layer, source_model.child("self_attn"))


def _layer_settings(source_model: SourceModel) -> dict[str, Any]:
    """Returns fields of a config, from one of the layers."""
    attentions = [
        source_model.child(n) for n in ("self_attn", "multihead_attn") if source_model.has(n)
    ]
    use_bias = _has_biases(source_model)
    return {
        **alike(attentions, _attention_settings),
        "d_ff": source_model.shape("linear1.weight", 2)[0],
        "activation": _activation(source_model),
        "block": "pre_norm" if source_model.setting("norm_first", default=False) else "post_norm",
        "norm_eps": one_eps(source_model, "norm1", "norm2", "norm3"),
        "norm_bias": use_bias,
        "qkv_bias": use_bias,
        "output_bias": use_bias,
        "feed_forward_bias": use_bias,
        **_rates(source_model),
    }


def _stack(source_model: SourceModel, rngs: nnx.Rngs) -> Encoder | Decoder:
    """Builds a TransformerEncoder or a TransformerDecoder."""
    settings = alike(source_model.children("layers"), _layer_settings)
    # Neither uses the context length: there is no table of positions.
    config = TransformerConfig(
        **settings, positions="none", context_length=1, final_norm=source_model.has("norm")
    )
    num_layers = source_model.count("layers")
    stack: Encoder | Decoder = (
        TorchDecoder(config, num_layers, causal=False, rngs=rngs)
        if source_model.has("layers.0.multihead_attn")
        else TorchEncoder(config, num_layers, rngs=rngs)
    )
    if config.norm.final_norm:
        kind = source_model.child("norm").kind
        if kind not in ("", "LayerNorm"):
            raise unsupported("the final norm", "be a LayerNorm", kind)
        stack.final_norm = layer_norm(source_model, "norm", use_bias=source_model.has("norm.bias"))
    return _with_layout(stack, source_model.child("layers.0.self_attn"))


def _transformer(source_model: SourceModel, rngs: nnx.Rngs) -> Seq2Seq:
    stacks: list[Any] = []
    for name, kind in (("encoder", "TransformerEncoder"), ("decoder", "TransformerDecoder")):
        stack = source_model.child(name)
        if stack.kind not in ("", kind):
            raise unsupported(f"custom_{name}", f"be a {kind}", stack.kind)
        stacks.append(_stack(stack, rngs))
    return Seq2Seq(*stacks)


def _settings(module: Any) -> dict[str, Any]:
    """Returns the torch constructor's arguments that the shapes of the arrays do not show."""
    settings = describe(module)
    settings["norm_first"] = settings.pop("pre_norm", False)
    for _, node in nnx.iter_modules(module):
        if isinstance(node, FeedForward):
            settings["activation"] = node.activation
        if isinstance(node, LayerNorm):
            settings.setdefault("layer_norm_eps", node.eps)
    return settings


def _module_mapping(name: str, target: type, build: Any, rules: Any) -> ModuleMapping:
    return ModuleMapping((name,), target, build, rules, settings=_settings, translated=LAYOUT)


DIALECTS = (
    StateDictAdapter(
        "torch.nn",
        (
            _module_mapping("MultiheadAttention", MultiHeadAttention, _attention, ATTENTION),
            _module_mapping("TransformerEncoderLayer", Block, _layer, ENCODER_LAYER),
            _module_mapping("TransformerDecoderLayer", Block, _layer, DECODER_LAYER),
            _module_mapping("TransformerEncoder", Encoder, _stack, ENCODER),
            _module_mapping("TransformerDecoder", Decoder, _stack, DECODER),
            _module_mapping("Transformer", Seq2Seq, _transformer, BOTH),
        ),
    ),
)
