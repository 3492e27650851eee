"""Hugging Face's ``falcon`` (arXiv 2311.16867), in its three layouts.

Falcon-RW has ALiBi, and branches one after the other; Falcon-7B has parallel branches with one
norm, and one key/value head for all; the newer Falcon-40B has two norms, and groups of heads.

In training, transformers drops entries of weights only where there is ALiBi, and entries of the
sum of two parallel branches; here they are dropped everywhere, and of each branch by itself.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import fused_stack, language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Fixed,
    Flag,
    Mapped,
    Required,
    Row,
    Values,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    norms = None
    if module.config.block.block == "parallel" and not module.config.block.shared_norm:
        norms = {"attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
    return fused_stack(
        module, "h.*", "self_attention", norms, token_embedding="word_embeddings", final_norm="ln_f"
    )


@dataclass(frozen=True)
class Layout(Row):
    """How many heads, norms and branches at once a block has, as four settings say together."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the number of key/value heads, the kind of block, and whether it has one norm."""
        # Null is false in all of these.
        is_new = bool(source_model.nullable("new_decoder_architecture", False))
        is_parallel = bool(source_model.nullable("parallel_attn", True))
        is_shared = bool(source_model.nullable("multi_query", True))
        norms = source_model.nullable("num_ln_in_parallel_attn")
        num_heads = values["num_heads"]
        heads = source_model.setting("num_kv_heads", default=num_heads)
        if is_new and not is_parallel:
            raise unsupported("parallel_attn", "be True with new_decoder_architecture", False)
        if is_parallel and norms not in ((None, 1, 2) if is_new else (None, 1)):
            words = "be 1 or 2 with new_decoder_architecture, and otherwise 1"
            raise unsupported("num_ln_in_parallel_attn", words, norms)
        if not is_new and not is_shared and heads != num_heads:
            raise unsupported("num_kv_heads", "be num_attention_heads without multi_query", heads)
        return {
            "num_kv_heads": heads if is_new else 1 if is_shared else num_heads,
            "block": "parallel" if is_parallel else "pre_norm",
            "shared_norm": is_parallel and not (is_new and norms != 1),
        }

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the four settings: the older layout where it can hold the model."""
        heads, is_parallel = config.key_value_heads, config.block.block == "parallel"
        norms = 2 if is_parallel and not config.block.shared_norm else 1
        is_new = norms == 2 or heads not in (1, config.attention.num_heads)
        return {
            "new_decoder_architecture": is_new,
            "parallel_attn": is_parallel,
            "multi_query": is_new or heads == 1,
            "num_ln_in_parallel_attn": norms if is_new else None,
            "num_kv_heads": heads if is_new else config.attention.num_heads,
        }


def _has_alibi(values: Values) -> bool:
    return bool(values["positions"] == "alibi")


SETTINGS = (
    Mapped(("hidden_size", "n_embed"), "d_model"),
    Mapped("num_attention_heads", "num_heads"),
    Required("head_dim", even_head_width),
    Mapped("num_hidden_layers", "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Layout(),
    Mapped(
        "ffn_hidden_size",
        "d_ff",
        lambda source_model, values: 4 * values["d_model"],
        written_from="feed_forward_width",
    ),
    Mapped("activation", "activation", "gelu", ACTIVATIONS),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Mapped(
        "bias", ("qkv_bias", "output_bias", "feed_forward_bias"), False, BOOLEAN, is_nullable=True
    ),
    RotaryPositions(),
    Mapped("alibi", "positions", False, Flag("alibi", "rotary"), is_nullable=True),
    # The bias is added to scores before they are scaled.
    Fixed(
        "alibi_scale",
        lambda source_model, values: (
            1 / math.sqrt(even_head_width(values)) if _has_alibi(values) else 1.0
        ),
    ),
    Fixed("alibi_in_bfloat16", lambda source_model, values: _has_alibi(values)),
    ATTENTION_DROPOUT,
    Mapped("hidden_dropout", "residual_dropout", 0.0),
    Required("apply_residual_connection_post_layernorm", False),
    # The width of the feed-forward again.
    Inert(("ff_factor",)),
)


DIALECTS = (language_model("falcon", SETTINGS, _body),)
