"""GPT-NeoX and Phi, which turn a part of each head."""

from tests.support.hugging_face.case import LINEAR, PARTIAL, Case

CASES = {
    "gpt_neox": Case("gpt_neox", "GPTNeoXForCausalLM", {**PARTIAL, "rotary_pct": 0.5}),
    "gpt_neox sequential tied": Case(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **PARTIAL,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rotary_emb_base": 500.0,
        },
    ),
    "gpt_neox linear": Case(
        "gpt_neox", "GPTNeoXForCausalLM", {**PARTIAL, "rotary_pct": 1.0, "rope_scaling": LINEAR}
    ),
    "phi": Case("phi", "PhiForCausalLM", PARTIAL),
    "phi norms grouped tied": Case(
        "phi",
        "PhiForCausalLM",
        {
            **PARTIAL,
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.25,
        },
    ),
}
