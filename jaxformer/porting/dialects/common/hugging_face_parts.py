"""What two of Hugging Face's dialects at a time declare alike."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    activation,
    head_width,
    rotary,
    source_activation,
    source_rotary,
)
from jaxformer.porting.mapping.rules import FusedByHead, Rule, Rules, names, under
from jaxformer.porting.mapping.source_model import SourceModel
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


def partly_rotary(source_model: SourceModel, share: float) -> dict[str, Any]:
    """The settings that GPT-NeoX and Phi read alike.

    Args:
        source_model: the model.
        share: how much of a head is turned where the config.json does not say.
    """
    d_model = source_model.setting("hidden_size")
    num_heads = source_model.setting("num_attention_heads")
    head_width(source_model, d_model, num_heads)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": source_model.setting("num_hidden_layers"),
        "context_length": source_model.setting("max_position_embeddings"),
        "d_ff": source_model.setting("intermediate_size"),
        "activation": activation(source_model, "hidden_act"),
        "norm_eps": source_model.setting("layer_norm_eps", default=1e-5),
        "attention_dropout": source_model.setting("attention_dropout", default=0.0),
        **rotary(source_model, share=share),
    }


def source_partly_rotary(config: TransformerLMConfig) -> dict[str, Any]:
    """The settings that GPT-NeoX and Phi write alike."""
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "intermediate_size": config.feed_forward_width,
        "hidden_act": source_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "attention_dropout": config.attention_dropout,
        **source_rotary(config),
    }
