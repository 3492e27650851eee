"""Hugging Face's ``gpt_neox``: GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373)."""

from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    causal_mask,
    inverse_frequencies,
    language_model,
)
from jaxformer.porting.dialects.common.hugging_face_parts import (
    fused_block,
    partly_rotary,
    source_partly_rotary,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Rules, Shape, names, under
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    return (
        *names(token_embedding="embed_in", final_norm="final_layer_norm"),
        *under("blocks.*", "layers.*", fused_block(module, "attention")),
    )


def _settings(source_model: SourceModel) -> dict[str, Any]:
    bias = bool(source_model.setting("attention_bias", default=True))
    is_parallel = source_model.setting("use_parallel_residual", default=True)
    return {
        **partly_rotary(source_model, share=0.25),
        "block": "parallel" if is_parallel else "pre_norm",
        "qkv_bias": bias,
        "output_bias": bias,
        "embedding_dropout": source_model.setting("hidden_dropout", default=0.0),
        "residual_dropout": source_model.setting("hidden_dropout", default=0.0),
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        **source_partly_rotary(config),
        "use_parallel_residual": config.block == "parallel",
        "attention_bias": config.qkv_bias,
        "hidden_dropout": config.residual_dropout,
        "rotary_emb_base": config.rotary_base,
        "rotary_pct": config.rotary_fraction,
    }


def _blocked(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    return np.array(-1e9, np.float32)


DIALECTS = (
    language_model(
        "gpt_neox",
        _settings,
        _source_settings,
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
