"""What two of Hugging Face's dialects at a time declare alike."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.hugging_face import (
    activation,
    head_width,
    rotary,
    their_activation,
    their_rotary,
)
from jaxformer.porting.mapping.rules import FusedByHead, Rule, Rules, names, under
from jaxformer.porting.mapping.source_model import Foreign
from jaxformer.transformer_lm import TransformerLM


def fused_block(module: TransformerLM, attention: str) -> Rules:
    """A block of BLOOM or GPT-NeoX: queries, keys and values in one array, head by head.

    Args:
        module: ours.
        attention: the name of theirs.
    """
    qkv = ("q_proj", "k_proj", "v_proj")
    heads = FusedByHead(module.config.num_heads)
    return (
        *under(
            "attention",
            attention,
            (Rule(qkv, ("query_key_value",), heads), *names(o_proj="dense")),
        ),
        *under("feed_forward", "mlp", names(up_proj="dense_h_to_4h", down_proj="dense_4h_to_h")),
        *names(attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"),
    )


def partly_rotary(foreign: Foreign, share: float) -> dict[str, Any]:
    """The settings that GPT-NeoX and Phi read alike.

    Args:
        foreign: the model.
        share: how much of a head is turned where the config.json does not say.
    """
    d_model = foreign.setting("hidden_size")
    num_heads = foreign.setting("num_attention_heads")
    head_width(foreign, d_model, num_heads)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": foreign.setting("num_hidden_layers"),
        "context_length": foreign.setting("max_position_embeddings"),
        "d_ff": foreign.setting("intermediate_size"),
        "activation": activation(foreign, "hidden_act"),
        "norm_eps": foreign.setting("layer_norm_eps", default=1e-5),
        "attention_dropout": foreign.setting("attention_dropout", default=0.0),
        **rotary(foreign, share=share),
    }


def their_partly_rotary(config: TransformerLMConfig) -> dict[str, Any]:
    """The settings that GPT-NeoX and Phi write alike."""
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "hidden_act": their_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        **their_rotary(config),
    }
