"""Hugging Face's ``gemma`` and ``gemma2`` (arXiv 2403.08295 and 2408.00118).

Token embeddings are multiplied by sqrt(D). In bfloat16 transformers rounds that factor to bfloat16
first (sqrt(3072) = 55.43 becomes 55.5), which is 0.1 % away from its own float32; here it is not.
"""

import math
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.hugging_face import (
    GATED_ACTIVATIONS,
    activation,
    check_even,
    demand,
    language_model,
    rotary,
    their_activation,
)
from jaxformer.porting.dialects.llama import (
    OLD_BUFFERS,
    body,
    full_layers,
    layer_types,
    their_stack,
)
from jaxformer.porting.mapping.dialect import Dialect
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.source_model import Foreign
from jaxformer.transformer_lm import TransformerLM

# The first Gemma's files say gelu where they mean its tanh approximation.
FIRST_ACTIVATIONS = {
    theirs: "geglu_tanh" if ours == "geglu" else ours
    for theirs, ours in {"gelu_pytorch_tanh": "geglu_tanh", **GATED_ACTIVATIONS}.items()
}


def _settings(foreign: Foreign) -> dict[str, Any]:
    d_model = foreign.setting("hidden_size")
    num_heads = foreign.setting("num_attention_heads")
    demand(foreign, use_bidirectional_attention=False)
    bias = bool(foreign.setting("attention_bias", default=False))
    return {
        "d_model": d_model,
        "num_heads": num_heads,
        "num_kv_heads": foreign.setting("num_key_value_heads", default=num_heads),
        "head_dim": foreign.setting("head_dim", default=256),
        "num_layers": foreign.setting("num_hidden_layers"),
        "context_length": foreign.setting("max_position_embeddings"),
        "d_ff": foreign.setting("intermediate_size"),
        "norm": "rms_norm",
        "norm_eps": foreign.setting("rms_norm_eps", default=1e-6),
        "norm_unit_offset": True,
        "embedding_scale": math.sqrt(d_model),
        "qkv_bias": bias,
        "output_bias": bias,
        "feed_forward_bias": False,
        "attention_dropout": foreign.setting("attention_dropout", default=0.0),
        **rotary(foreign),
    }


def _gemma(foreign: Foreign) -> dict[str, Any]:
    return {
        **_settings(foreign),
        "activation": activation(
            foreign, "hidden_activation", "hidden_act", table=FIRST_ACTIVATIONS
        ),
    }


def _gemma2(foreign: Foreign) -> dict[str, Any]:
    settings = _settings(foreign)
    num_layers = settings["num_layers"]
    check_even(settings["d_model"], settings["num_heads"])
    # In this and the two caps null says that there is none.
    window = foreign.config.get("sliding_window", 4096)
    kinds = foreign.setting(
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
        "activation": activation(foreign, "hidden_activation", table=GATED_ACTIVATIONS),
        "branch_output_norm": True,
        "attention_scale": 1 / math.sqrt(foreign.setting("query_pre_attn_scalar", default=256)),
        "score_soft_cap": foreign.config.get("attn_logit_softcapping", 50.0),
        "logit_soft_cap": foreign.config.get("final_logit_softcapping", 30.0),
    }


def _their_gemma(config: TransformerLMConfig) -> dict[str, Any]:
    theirs = their_activation(config.activation, FIRST_ACTIVATIONS)
    return {**their_stack(config), "hidden_act": theirs, "hidden_activation": theirs}


def _their_gemma2(config: TransformerLMConfig) -> dict[str, Any]:
    theirs = their_activation(config.activation, GATED_ACTIVATIONS)
    stack = their_stack(config)
    scale = config.attention_scale
    return {
        **stack,
        "hidden_act": theirs,
        "hidden_activation": theirs,
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


def _dialect(name: str, start: str, *declaration: Any) -> Dialect:
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
    _dialect("gemma", "Gemma", _gemma, _their_gemma, _body),
    _dialect("gemma2", "Gemma2", _gemma2, _their_gemma2, _body2),
)
