"""Dialect ``charlm``: the character model's attention, one module for each head, and its block.

It has no class for a whole model, so that a ``TransformerLM`` is not exported to it.
"""

from typing import Any

import numpy as np
from flax import nnx

from jaxformer.attention import MultiHeadAttention
from jaxformer.feed_forward import FeedForward
from jaxformer.porting.dialects.common.reading import alike, demand_activation, layer_norm
from jaxformer.porting.dialects.common.signatures import CausalAttention, CausalBlock
from jaxformer.porting.mapping.adapter import Buffer, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import ArrayPerHead, Shape
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.source_model import SourceModel

HEAD = {"q_proj": "Q_weights", "k_proj": "K_weights", "v_proj": "V_weights"}
FEED_FORWARD = names(up_proj="linear_layers.0", down_proj="linear_layers.2")
MASK = "casual_attention_mask"


def _attention_rules(attention: MultiHeadAttention) -> Rules:
    heads = ArrayPerHead(attention.num_heads)
    return (
        *(Rule((target,), (f"heads.#.{source}",), heads) for target, source in HEAD.items()),
        *names(o_proj="linear"),
    )


def _block_rules(block: CausalBlock) -> Rules:
    return (
        *under("attention", "multi_head", _attention_rules(block.attention)),
        *under("feed_forward", "feed_forward", FEED_FORWARD),
        *names(attention_norm="layer_norm_1", feed_forward_norm="layer_norm_2"),
    )


def _context(source_model: SourceModel, path: str = "") -> int | None:
    """Returns the length of the mask, or of a setting where the checkpoint has no mask."""
    if source_model.has(path + MASK):
        return source_model.shape(path + MASK, 2)[0]
    return source_model.number("context_size", "context_length", "block_size")


def _has_biases(head: SourceModel) -> bool:
    return any(head.has(f"{source}.bias") for source in HEAD.values())


def _head(source_model: SourceModel, rngs: nnx.Rngs) -> CausalAttention:
    head_dim, d_model = source_model.shape("Q_weights.weight", 2)
    return CausalAttention(
        d_model,
        1,
        head_dim=head_dim,
        use_bias=_has_biases(source_model),
        output_projection=False,
        attention_dropout=source_model.dropout(),
        context_length=_context(source_model),
        rngs=rngs,
    )


def _sizes(source_model: SourceModel) -> dict[str, Any]:
    head = source_model.child("heads.0")
    head_dim, d_model = head.shape("Q_weights.weight", 2)
    return {
        "d_model": d_model,
        "num_heads": source_model.count("heads"),
        "head_dim": head_dim,
        "use_bias": _has_biases(head),
        **alike(source_model.children("heads"), lambda h: {"attention_dropout": h.dropout()}),
        "output_dropout": source_model.dropout(),
    }


def _attention(source_model: SourceModel, rngs: nnx.Rngs) -> CausalAttention:
    context = _context(source_model, "heads.0.")
    return CausalAttention(**_sizes(source_model), context_length=context, rngs=rngs)


def _feed_forward(source_model: SourceModel, rngs: nnx.Rngs) -> FeedForward:
    _, d_model = source_model.shape("linear_layers.0.weight", 2)
    return FeedForward(
        d_model,
        activation=demand_activation(source_model, "linear_layers.1", "gelu"),
        output_dropout=source_model.dropout(),
        rngs=rngs,
    )


def _block(source_model: SourceModel, rngs: nnx.Rngs) -> CausalBlock:
    return CausalBlock(
        MultiHeadAttention(**_sizes(source_model.child("multi_head")), rngs=rngs),
        _feed_forward(source_model.child("feed_forward"), rngs),
        layer_norm(source_model, "layer_norm_1"),
        layer_norm(source_model, "layer_norm_2"),
        context_length=_context(source_model, "multi_head.heads.0."),
    )


def _mask(module: CausalAttention | CausalBlock, shape: Shape | None) -> np.ndarray | None:
    length = module.context_length
    return None if length is None else np.tril(np.ones((length, length), np.float32))


DIALECTS = (
    StateDictAdapter(
        "charlm",
        (
            ModuleMapping(
                ("AttentionHead",),
                CausalAttention,
                _head,
                names(HEAD),
                buffers=(Buffer(MASK, _mask),),
            ),
            ModuleMapping(
                ("MultiHeadAttention",),
                CausalAttention,
                _attention,
                _attention_rules,
                buffers=(Buffer(f"heads.*.{MASK}", _mask),),
            ),
            ModuleMapping(("FeedForward",), FeedForward, _feed_forward, FEED_FORWARD),
            ModuleMapping(
                ("Block",),
                CausalBlock,
                _block,
                _block_rules,
                buffers=(Buffer(f"multi_head.heads.*.{MASK}", _mask),),
            ),
        ),
    ),
)
