"""Hugging Face's ``gemma`` and ``gemma2`` (arXiv 2403.08295 and 2408.00118).

Token embeddings are multiplied by sqrt(D). In bfloat16 transformers rounds that factor to bfloat16
first (sqrt(3072) = 55.43 becomes 55.5), which is 0.1 % away from its own float32; here it is not.
"""

import math
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import (
    GATED_ACTIVATIONS,
    activation,
    check_even,
    demand,
    language_model,
    rotary,
    source_activation,
)
from jaxformer.porting.dialects.llama import (
    OLD_BUFFERS,
    body,
    full_layers,
    layer_types,
    source_stack,
)
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM

# The first Gemma's files say gelu where they mean its tanh approximation.
FIRST_ACTIVATIONS = {
    source: "geglu_tanh" if target == "geglu" else target
    for source, target in {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}.items()
}


def _settings(source_model: SourceModel) -> dict[str, Any]:
    d_model = source_model.setting("hidden_size")
    num_heads = source_model.setting("num_attention_heads")
    demand(source_model, use_bidirectional_attention=False)
    bias = bool(source_model.setting("attention_bias", default=False))
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": source_model.setting("num_key_value_heads", default=num_heads),
        "head_dim": source_model.setting("head_dim", default=256),
        "num_layers": source_model.setting("num_hidden_layers"),
        "context_length": source_model.setting("max_position_embeddings"),
        "d_ff": source_model.setting("intermediate_size"),
        "norm": "rms_norm",
        "norm_eps": source_model.setting("rms_norm_eps", default=1e-6),
        "norm_unit_offset": True,
        "embedding_scale": math.sqrt(d_model),
        "qkv_bias": bias,
        "output_bias": bias,
        "feed_forward_bias": False,
        "attention_dropout": source_model.setting("attention_dropout", default=0.0),
        **rotary(source_model),
    }


def _gemma(source_model: SourceModel) -> dict[str, Any]:
    return {
        **_settings(source_model),
        "activation": activation(
            source_model, "hidden_activation", "hidden_act", table=FIRST_ACTIVATIONS
        ),
    }


def _gemma2(source_model: SourceModel) -> dict[str, Any]:
    settings = _settings(source_model)
    num_layers = settings["num_layers"]
    check_even(settings["d_model"], settings["num_heads"])
    # In this and the two caps null says that there is none.
    window = source_model.config.get("sliding_window", 4096)
    kinds = source_model.setting(
        "layer_types",
        default=[("sliding", "full")[n % 2] + "_attention" for n in range(num_layers)],
    )
    if window is not None:
        settings |= {
            "sliding_window": window,
            "full_attention_layers": full_layers(kinds, num_layers, 0),
        }
    return {
        **settings,
        "activation": activation(source_model, "hidden_activation", table=GATED_ACTIVATIONS),
        "branch_output_norm": True,
        "attention_scale": 1
        / math.sqrt(source_model.setting("query_pre_attn_scalar", default=256)),
        "score_soft_cap": source_model.config.get("attn_logit_softcapping", 50.0),
        "logit_soft_cap": source_model.config.get("final_logit_softcapping", 30.0),
    }


def _source_gemma(config: TransformerLMConfig) -> dict[str, Any]:
    source = source_activation(config.activation, FIRST_ACTIVATIONS)
    return {**source_stack(config), "hidden_act": source, "hidden_activation": source}


def _their_gemma2(config: TransformerLMConfig) -> dict[str, Any]:
    source = source_activation(config.activation, GATED_ACTIVATIONS)
    stack = source_stack(config)
    scale = config.attention_scale
    return {
        **stack,
        "hidden_act": source,
        "hidden_activation": source,
        "query_pre_attn_scalar": stack["head_dim"] if scale is None else round(scale**-2),
        "attn_logit_softcapping": config.score_soft_cap,
        "final_logit_softcapping": config.logit_soft_cap,
        "sliding_window": config.sliding_window,
        "layer_types": layer_types(config),
    }


def _body(module: TransformerLM) -> Rules:
    return body(
        module, attention_norm="input_layernorm", feed_forward_norm="post_attention_layernorm"
    )


def _body2(module: TransformerLM) -> Rules:
    return body(
        module,
        attention_norm="input_layernorm",
        attention_output_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_output_norm="post_feedforward_layernorm",
    )


def _dialect(name: str, start: str, *declaration: Any) -> StateDictAdapter:
    return language_model(
        name,
        *declaration,
        classes=(f"{start}ForCausalLM", f"{start}Model"),
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        tied_by_default=True,
        buffers=OLD_BUFFERS,
        translated=frozenset({"interleaved"}),
    )


DIALECTS = (
    _dialect("gemma", "Gemma", _gemma, _source_gemma, _body),
    _dialect("gemma2", "Gemma2", _gemma2, _their_gemma2, _body2),
)
