"""Dialect ``minimal``: attention without biases on q, k and v, and a pre-norm block."""

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import PreNormBlock
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.dialects.common.reading import (
    NORMS,
    attention_sizes,
    describe,
    feed_forward,
    layer_norm,
)
from jaxformer.porting.dialects.common.signatures import SelfAttention
from jaxformer.porting.mapping.adapter import ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import SourceModel

ATTENTION = names(q_proj="w_q", k_proj="w_k", v_proj="w_v", o_proj="w_o")
FEED_FORWARD = names(up_proj="linear1", down_proj="linear2")
BLOCK = (
    *under("attention", "attention", ATTENTION),
    *under("feed_forward", "feed_forward", FEED_FORWARD),
    *NORMS,
)


def _attention(
    source_model: SourceModel, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = SelfAttention
) -> MultiHeadAttention:
    sizes = attention_sizes(source_model, "w_q", "w_k", "w_v", "w_o")
    return kind(**sizes, use_bias=False, attention_dropout=source_model.dropout(), rngs=rngs)


def _feed_forward(source_model: SourceModel, rngs: nnx.Rngs) -> FeedForward:
    return feed_forward(
        source_model, "linear1", activation="gelu", hidden_dropout=source_model.dropout(), rngs=rngs
    )


def _block(source_model: SourceModel, rngs: nnx.Rngs) -> PreNormBlock:
    return PreNormBlock(
        _attention(source_model.child("attention"), rngs, MultiHeadAttention),
        _feed_forward(source_model.child("feed_forward"), rngs),
        layer_norm(source_model, "norm1"),
        layer_norm(source_model, "norm2"),
        residual_dropout=source_model.dropout(),
    )


DIALECTS = (
    StateDictAdapter(
        "minimal",
        (
            ModuleMapping(
                ("MinimalAttention",), MultiHeadAttention, _attention, ATTENTION, settings=describe
            ),
            ModuleMapping(("FeedForward",), FeedForward, _feed_forward, FEED_FORWARD),
            ModuleMapping(("TransformerBlock",), PreNormBlock, _block, BLOCK, settings=describe),
        ),
    ),
)
