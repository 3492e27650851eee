"""Family ``minimal``: attention with as little as it needs, and a pre-norm block."""

from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import PreNormBlock
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.dialects.parts import (
    NORMS,
    attention_sizes,
    describe,
    feed_forward,
    layer_norm,
)
from jaxformer.porting.dialects.signatures import SelfAttention
from jaxformer.porting.mapping.dialect import Counterpart, Dialect
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import Foreign

ATTENTION = names(q_proj="w_q", k_proj="w_k", v_proj="w_v", o_proj="w_o")
FEED_FORWARD = names(up_proj="linear1", down_proj="linear2")
BLOCK = (
    *under("attention", "attention", ATTENTION),
    *under("feed_forward", "feed_forward", FEED_FORWARD),
    *NORMS,
)


def _attention(
    foreign: Foreign, rngs: nnx.Rngs, kind: type[MultiHeadAttention] = SelfAttention
) -> MultiHeadAttention:
    sizes = attention_sizes(foreign, "w_q", "w_k", "w_v", "w_o")
    return kind(**sizes, use_bias=False, attention_dropout=foreign.dropout(), rngs=rngs)


def _feed_forward(foreign: Foreign, rngs: nnx.Rngs) -> FeedForward:
    return feed_forward(
        foreign, "linear1", activation="gelu", hidden_dropout=foreign.dropout(), rngs=rngs
    )


def _block(foreign: Foreign, rngs: nnx.Rngs) -> PreNormBlock:
    return PreNormBlock(
        _attention(foreign.child("attention"), rngs, MultiHeadAttention),
        _feed_forward(foreign.child("feed_forward"), rngs),
        layer_norm(foreign, "norm1"),
        layer_norm(foreign, "norm2"),
        residual_dropout=foreign.dropout(),
    )


DIALECTS = (
    Dialect(
        "minimal",
        (
            Counterpart(
                ("MinimalAttention",), MultiHeadAttention, _attention, ATTENTION, settings=describe
            ),
            Counterpart(("FeedForward",), FeedForward, _feed_forward, FEED_FORWARD),
            Counterpart(("TransformerBlock",), PreNormBlock, _block, BLOCK, settings=describe),
        ),
    ),
)
