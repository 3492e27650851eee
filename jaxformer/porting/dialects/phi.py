"""Hugging Face's ``phi``: Phi-1, 1.5 and 2 (arXiv 2306.11644): parallel branches with one norm."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    inverse_frequencies,
    language_model,
    turned_names,
)
from jaxformer.porting.dialects.common.hugging_face_parts import partly_rotary, source_partly_rotary
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    turned = {
        "q_proj": "q_proj",
        "k_proj": "k_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    }
    attention = (*turned_names(module, turned), *names(v_proj="v_proj", o_proj="dense"))
    block = (
        *under("attention", "self_attn", attention),
        *under("feed_forward", "mlp", names(up_proj="fc1", down_proj="fc2")),
        *names(attention_norm="input_layernorm"),
    )
    return (
        *names(token_embedding="embed_tokens", final_norm="final_layernorm"),
        *under("blocks.*", "layers.*", block),
    )


def _settings(source_model: SourceModel) -> dict[str, Any]:
    settings = partly_rotary(source_model, share=0.5)
    return {
        **settings,
        "num_kv_heads": source_model.setting("num_key_value_heads", default=settings["num_heads"]),
        "block": "parallel",
        "shared_norm": True,
        "query_key_norm": bool(source_model.setting("qk_layernorm", default=False)),
        "head_bias": True,
        "embedding_dropout": source_model.setting("embd_pdrop", default=0.0),
        "residual_dropout": source_model.setting("resid_pdrop", default=0.0),
    }


def _source_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        **source_partly_rotary(config),
        "num_key_value_heads": config.key_value_heads,
        "qk_layernorm": config.query_key_norm,
        "embd_pdrop": config.embedding_dropout,
        "resid_pdrop": config.residual_dropout,
        "partial_rotary_factor": config.rotary_fraction,
    }


DIALECTS = (
    language_model(
        "phi",
        _settings,
        _source_settings,
        _body,
        classes=("PhiForCausalLM", "PhiModel"),
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        tied_by_default=False,
        buffers=(
            Buffer("layers.*.self_attn.rotary_emb.inv_freq", inverse_frequencies, written=False),
        ),
        translated=frozenset({"interleaved"}),
    ),
)
