"""Hugging Face's ``gpt_neox``: GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373)."""

from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialect import Buffer
from jaxformer.porting.dialects.hugging_face import (
    activation,
    causal_mask,
    head_width,
    inverse_frequencies,
    language_model,
    rotary,
    their_activation,
    their_rotary,
)
from jaxformer.porting.foreign import Foreign
from jaxformer.porting.rules import FusedByHead, Rule, Rules, Shape, names, under
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    attention = (
        Rule(
            ("q_proj", "k_proj", "v_proj"),
            ("query_key_value",),
            FusedByHead(module.config.num_heads),
        ),
        *names(o_proj="dense"),
    )
    block = (
        *under("attention", "attention", attention),
        *under("feed_forward", "mlp", names(up_proj="dense_h_to_4h", down_proj="dense_4h_to_h")),
        *names(attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"),
    )
    return (
        *names(token_embedding="embed_in", final_norm="final_layer_norm"),
        *under("blocks.*", "layers.*", block),
    )


def _settings(foreign: Foreign) -> dict[str, Any]:
    d_model = foreign.setting("hidden_size")
    num_heads = foreign.setting("num_attention_heads")
    bias = bool(foreign.setting("attention_bias", default=True))
    head_width(foreign, d_model, num_heads)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_layers": foreign.setting("num_hidden_layers"),
        "context_length": foreign.setting("max_position_embeddings"),
        "d_ff": foreign.setting("intermediate_size"),
        "activation": activation(foreign, "hidden_act"),
        "norm_eps": foreign.setting("layer_norm_eps", default=1e-5),
        "block": "parallel"
        if foreign.setting("use_parallel_residual", default=True)
        else "pre_norm",
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_dropout": foreign.setting("hidden_dropout", default=0.0),
        "attention_dropout": foreign.setting("attention_dropout", default=0.0),
        "residual_dropout": foreign.setting("hidden_dropout", default=0.0),
        **rotary(foreign, share=0.25),
    }


def _their_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "hidden_act": their_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "use_parallel_residual": config.block == "parallel",
        "attention_bias": config.qkv_bias,
        "attention_dropout": config.attention_dropout,
        "hidden_dropout": config.residual_dropout,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
        **their_rotary(config),
    }


def _blocked(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.array(-1e9, np.float32)


DIALECTS = (
    language_model(
        "gpt_neox",
        _settings,
        _their_settings,
        _body,
        classes=("GPTNeoXForCausalLM", "GPTNeoXModel"),
        prefix="gpt_neox.",
        tied={"lm_head.weight": "gpt_neox.embed_in.weight"},
        tied_by_default=False,
        old_names={r"^embed_out\.": "lm_head."},
        buffers=(
            Buffer("layers.*.attention.bias", causal_mask, written=False),
            Buffer("layers.*.attention.masked_bias", _blocked, written=False),
            Buffer("layers.*.attention.rotary_emb.inv_freq", inverse_frequencies, written=False),
        ),
    ),
)
