"""Hugging Face's ``gpt2``: GPT-2, with (in, out) matrices and one for queries, keys and values."""

from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    activation,
    causal_mask,
    demand,
    language_model,
    source_activation,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Fused, Rule, Shape, names, under, untransposed
from jaxformer.porting.mapping.source_model import SourceModel

BLOCK = (
    *under(
        "attention",
        "attn",
        untransposed(
            (
                Rule(("q_proj", "k_proj", "v_proj"), ("c_attn",), Fused()),
                *names(o_proj="c_proj"),
            )
        ),
    ),
    *under("feed_forward", "mlp", untransposed(names(up_proj="c_fc", down_proj="c_proj"))),
    *names(attention_norm="ln_1", feed_forward_norm="ln_2"),
)
BODY = (
    *names(token_embedding="wte", position_embedding="wpe", final_norm="ln_f"),
    *under("blocks.*", "h.*", BLOCK),
)


def _settings(source_model: SourceModel) -> dict[str, Any]:
    demand(
        source_model,
        scale_attn_weights=True,
        scale_attn_by_inverse_layer_idx=False,
        add_cross_attention=False,
    )
    return {
        "d_model": source_model.setting("n_embd", "hidden_size"),
        "num_heads": source_model.setting("n_head", "num_attention_heads"),
        "num_layers": source_model.setting("n_layer", "num_hidden_layers"),
        "context_length": source_model.setting("n_positions", "max_position_embeddings"),
        "d_ff": source_model.setting("n_inner", default=None),
        "activation": activation(source_model, "activation_function"),
        "norm_eps": source_model.setting("layer_norm_epsilon", default=1e-5),
        "embedding_dropout": source_model.setting("embd_pdrop", default=0.0),
        "attention_dropout": source_model.setting("attn_pdrop", default=0.0),
        "output_dropout": source_model.setting("resid_pdrop", default=0.0),
        "feed_forward_dropout": source_model.setting("resid_pdrop", default=0.0),
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        "n_embd": config.d_model,
        "n_head": config.num_heads,
        "n_layer": config.num_layers,
        "n_positions": config.context_length,
        "n_inner": config.d_ff,
        "activation_function": source_activation(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "embd_pdrop": config.embedding_dropout,
        "attn_pdrop": config.attention_dropout,
        "resid_pdrop": config.feed_forward_dropout,
    }


def _blocked(module: Any, shape: Shape | None) -> np.ndarray:
    return np.array(-1e4, np.float32)


DIALECTS = (
    language_model(
        "gpt2",
        _settings,
        _source_settings,
        BODY,
        classes=("GPT2LMHeadModel", "GPT2Model"),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        tied_by_default=True,
        buffers=(
            Buffer("h.*.attn.bias", causal_mask, written=False),
            Buffer("h.*.attn.masked_bias", _blocked, written=False),
        ),
    ),
)
