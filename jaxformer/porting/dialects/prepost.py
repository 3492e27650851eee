"""Family ``prepost``: multi-head attention, post-norm and pre-norm blocks."""

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import Block, PostNormBlock, PreNormBlock
from jaxformer.porting.dialects.parts import (
    NORMS,
    attention_sizes,
    demand_activation,
    describe,
    feed_forward,
    is_pre_norm,
    layer_norm,
)
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import Foreign

ATTENTION = names(q_proj="w_q", k_proj="w_k", v_proj="w_v", o_proj="w_o")
BLOCK = (
    *under("attention", "attention", ATTENTION),
    *under("feed_forward", "ff", names(up_proj="0", down_proj="2")),
    *NORMS,
)


def _attention(foreign: Foreign, rngs: nnx.Rngs) -> MultiHeadAttention:
    sizes = attention_sizes(foreign, "w_q", "w_k", "w_v", "w_o")
    return MultiHeadAttention(**sizes, attention_dropout=foreign.dropout(), rngs=rngs)


def _block(foreign: Foreign, rngs: nnx.Rngs) -> Block:
    parts = (
        _attention(foreign.child("attention"), rngs),
        feed_forward(
            foreign.child("ff"),
            "0",
            activation=demand_activation(foreign, "ff.1", "relu"),
            rngs=rngs,
        ),
        layer_norm(foreign, "norm1"),
        layer_norm(foreign, "norm2"),
    )
    # The classes have the same arrays, so that without a class or a module a setting must tell.
    told = foreign.module is not None or "class" in foreign.config
    pre_norm = foreign.kind.startswith("Pre") if told else is_pre_norm(foreign)
    return (PreNormBlock if pre_norm else PostNormBlock)(*parts, residual_dropout=foreign.dropout())


DIALECTS = (
    Dialect(
        "prepost",
        (
            Counterpart(
                ("MultiHeadAttention",),
                MultiHeadAttention,
                _attention,
                ATTENTION,
                settings=describe,
            ),
            Counterpart(
                ("PostNormTransformerBlock", "TransformerBlock"),
                PostNormBlock,
                _block,
                BLOCK,
                settings=describe,
            ),
            Counterpart(
                ("PreNormTransformerBlock",), PreNormBlock, _block, BLOCK, settings=describe
            ),
        ),
    ),
)
