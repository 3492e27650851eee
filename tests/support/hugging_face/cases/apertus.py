"""Apertus, HunYuan, Ministral and Gemma 3."""

from tests.support.hugging_face.case import GROUPED, LINEAR, LLAMA3, Case

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
ALPHA = {"type": "dynamic", "alpha": 50.0, "factor": 1.0}

CASES = {
    "apertus": Case("apertus", "ApertusForCausalLM", {**GROUPED, "pad_token_id": 0}),
    "apertus biases tied": Case(
        "apertus",
        "ApertusForCausalLM",
        {
            **GROUPED,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "pad_token_id": 0,
            "rope_parameters": {**LLAMA3, "rope_theta": 700.0},
        },
    ),
    "hunyuan_v1_dense": Case(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**GROUPED, "head_dim": 10, "rope_scaling": ALPHA},
    ),
    "hunyuan_v1_dense biases tied": Case(
        "hunyuan_v1_dense",
        "HunYuanDenseV1ForCausalLM",
        {**GROUPED, "head_dim": 6, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "ministral": Case(
        "ministral",
        "MinistralForCausalLM",
        {
            **GROUPED,
            "head_dim": 6,
            "num_hidden_layers": 3,
            "sliding_window": 19,
            "layer_types": WINDOWS,
        },
    ),
    "ministral all sliding tied": Case(
        "ministral",
        "MinistralForCausalLM",
        {**GROUPED, "head_dim": 10, "sliding_window": 23, "tie_word_embeddings": True},
    ),
    "gemma3_text": Case(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 19,
            "layer_types": WINDOWS,
            "rope_theta": 900.0,
            "rope_local_base_freq": 90.0,
            "rope_scaling": LINEAR,
        },
    ),
    "gemma3_text capped untied biases": Case(
        "gemma3_text",
        "Gemma3ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "sliding_window": 19,
            "sliding_window_pattern": 2,
            "attention_bias": True,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
        without_effect=frozenset(
            {"attn_logit_softcapping", "sliding_window_pattern", "_sliding_window_pattern"}
        ),
    ),
    "gemma3_text body": Case(
        "gemma3_text",
        "Gemma3TextModel",
        {**GROUPED, "head_dim": 10, "sliding_window": 19},
        without_effect=frozenset({"final_logit_softcapping"}),
    ),
}
