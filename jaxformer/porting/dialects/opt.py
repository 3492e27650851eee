"""Hugging Face's ``opt``: OPT (arXiv 2205.01068); position t has row t + 2 of the learned table."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    activation,
    demand,
    head_width,
    language_model,
    source_activation,
)
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.source_model import SourceModel

BLOCK = (
    *under(
        "attention",
        "self_attn",
        names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj"),
    ),
    *under("feed_forward", "", names(up_proj="fc1", down_proj="fc2")),
    *names(attention_norm="self_attn_layer_norm", feed_forward_norm="final_layer_norm"),
)
BODY = under(
    "",
    "decoder",
    (
        *names(
            token_embedding="embed_tokens",
            position_embedding="embed_positions",
            final_norm="final_layer_norm",
        ),
        *under("blocks.*", "layers.*", BLOCK),
    ),
)


def _settings(source_model: SourceModel) -> dict[str, Any]:
    d_model = source_model.setting("hidden_size")
    num_heads = source_model.setting("num_attention_heads")
    head_width(source_model, d_model, num_heads)
    demand(source_model, word_embed_proj_dim=d_model, layer_norm_elementwise_affine=True)
    pre_norm = bool(source_model.setting("do_layer_norm_before", default=True))
    bias = bool(source_model.setting("enable_bias", default=True))
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": source_model.setting("num_hidden_layers"),
        "context_length": source_model.setting("max_position_embeddings"),
        "d_ff": source_model.setting("ffn_dim"),
        "activation": activation(source_model, "activation_function"),
        "block": "pre_norm" if pre_norm else "post_norm",
        "final_norm": pre_norm
        and not source_model.setting("_remove_final_layer_norm", default=False),
        "position_offset": 2,
        "qkv_bias": bias,
        "output_bias": bias,
        "feed_forward_bias": bias,
        "attention_dropout": source_model.setting("attention_dropout", default=0.0),
        "residual_dropout": source_model.setting("dropout", default=0.0),
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    pre_norm = config.block == "pre_norm"
    return {
        "hidden_size": config.d_model,
        "word_embed_proj_dim": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "ffn_dim": config.feed_forward_width,
        "activation_function": source_activation(config.activation),
        "do_layer_norm_before": pre_norm,
        "_remove_final_layer_norm": pre_norm and not config.final_norm,
        "enable_bias": config.qkv_bias,
        "layer_norm_elementwise_affine": True,
        "attention_dropout": config.attention_dropout,
        "dropout": config.residual_dropout,
    }


DIALECTS = (
    language_model(
        "opt",
        _settings,
        _source_settings,
        BODY,
        classes=("OPTForCausalLM", "OPTModel"),
        prefix="model.",
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        tied_by_default=True,
    ),
)
