"""Dialect ``prepost``: multi-head attention, post-norm and pre-norm blocks."""

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.porting.dialects.common.reading import (
    NORMS,
    attention_sizes,
    demand_activation,
    describe,
    feed_forward,
    is_pre_norm,
    layer_norm,
)
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import SourceModel

ATTENTION = names(q_proj="w_q", k_proj="w_k", v_proj="w_v", o_proj="w_o")
BLOCK = (
    *under("attention", "attention", ATTENTION),
    *under("feed_forward", "ff", names(up_proj="0", down_proj="2")),
    *NORMS,
)


def _attention(source_model: SourceModel, rngs: nnx.Rngs) -> MultiHeadAttention:
    sizes = attention_sizes(source_model, "w_q", "w_k", "w_v", "w_o")
    return MultiHeadAttention(**sizes, attention_dropout=source_model.dropout(), rngs=rngs)


def _block(source_model: SourceModel, rngs: nnx.Rngs) -> Block:
    components = (
        _attention(source_model.child("attention"), rngs),
        feed_forward(
            source_model.child("ff"),
            "0",
            activation=demand_activation(source_model, "ff.1", "relu"),
            rngs=rngs,
        ),
        layer_norm(source_model, "norm1"),
        layer_norm(source_model, "norm2"),
    )
    # Both classes have the same arrays: without a class or a module a setting decides.
    is_class_known = source_model.module is not None or "class" in source_model.config
    pre_norm = source_model.kind.startswith("Pre") if is_class_known else is_pre_norm(source_model)
    return (PreNormBlock if pre_norm else PostNormBlock)(
        *components, residual_dropout=source_model.dropout()
    )


DIALECTS = (
    StateDictAdapter(
        "prepost",
        (
            ModuleMapping(
                ("MultiHeadAttention",),
                MultiHeadAttention,
                _attention,
                ATTENTION,
                settings=describe,
            ),
            ModuleMapping(
                ("PostNormTransformerBlock", "TransformerBlock"),
                PostNormBlock,
                _block,
                BLOCK,
                settings=describe,
            ),
            ModuleMapping(
                ("PreNormTransformerBlock",), PreNormBlock, _block, BLOCK, settings=describe
            ),
        ),
    ),
)
