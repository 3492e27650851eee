"""Hugging Face's ``phi``: Phi-1, 1.5 and 2 (arXiv 2306.11644): parallel branches with one norm."""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialect import Buffer
from jaxformer.porting.dialects.hugging_face import (
    activation,
    head_width,
    inverse_frequencies,
    language_model,
    rotary,
    their_activation,
    their_rotary,
    turned_names,
)
from jaxformer.porting.foreign import Foreign
from jaxformer.porting.rules import Rules, names, under
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


def _settings(foreign: Foreign) -> dict[str, Any]:
    d_model = foreign.setting("hidden_size")
    num_heads = foreign.setting("num_attention_heads")
    head_width(foreign, d_model, num_heads)
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": foreign.setting("num_key_value_heads", default=num_heads),
        "num_layers": foreign.setting("num_hidden_layers"),
        "context_length": foreign.setting("max_position_embeddings"),
        "d_ff": foreign.setting("intermediate_size"),
        "activation": activation(foreign, "hidden_act"),
        "norm_eps": foreign.setting("layer_norm_eps", default=1e-5),
        "block": "parallel",
        "shared_norm": True,
        "query_key_norm": bool(foreign.setting("qk_layernorm", default=False)),
        "head_bias": True,
        "embedding_dropout": foreign.setting("embd_pdrop", default=0.0),
        "attention_dropout": foreign.setting("attention_dropout", default=0.0),
        "residual_dropout": foreign.setting("resid_pdrop", default=0.0),
        **rotary(foreign, share=0.5),
    }


def _their_settings(config: TransformerLMConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.d_model,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads or config.num_heads,
        "num_hidden_layers": config.num_layers,
        "max_position_embeddings": config.context_length,
        "intermediate_size": config.d_ff or 4 * config.d_model,
        "hidden_act": their_activation(config.activation),
        "layer_norm_eps": config.norm_eps,
        "qk_layernorm": config.query_key_norm,
        "embd_pdrop": config.embedding_dropout,
        "attention_dropout": config.attention_dropout,
        "resid_pdrop": config.residual_dropout,
        "partial_rotary_factor": config.rotary_fraction,
        **their_rotary(config),
    }


DIALECTS = (
    language_model(
        "phi",
        _settings,
        _their_settings,
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
