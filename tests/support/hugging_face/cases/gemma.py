"""Gemma and Gemma 2."""

from tests.support.hugging_face.case import GROUPED, LINEAR, Case

CASES = {
    "gemma": Case("gemma", "GemmaForCausalLM", {**GROUPED, "head_dim": 10, "hidden_act": "gelu"}),
    "gemma untied one head": Case(
        "gemma",
        "GemmaForCausalLM",
        {
            **GROUPED,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_scaling": LINEAR,
        },
    ),
    "gemma2": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 19,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2 uncapped full": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 19,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
        },
    ),
    "gemma2 body": Case(
        "gemma2",
        "Gemma2Model",
        {**GROUPED, "head_dim": 10, "sliding_window": 19},
        without_effect=frozenset({"final_logit_softcapping"}),
    ),
}
