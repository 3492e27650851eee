"""StarCoder 2, StableLM and Nemotron."""

from tests.support.hugging_face.case import GROUPED, LINEAR, PARTIAL, Case

SHARED = {**PARTIAL, "num_key_value_heads": 2}

CASES = {
    "starcoder2": Case("starcoder2", "Starcoder2ForCausalLM", {**GROUPED, "sliding_window": 19}),
    "starcoder2 no window untied no bias": Case(
        "starcoder2",
        "Starcoder2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 10,
            "use_bias": False,
            "tie_word_embeddings": False,
            "hidden_act": "relu",
            "rope_scaling": LINEAR,
        },
    ),
    "stablelm": Case("stablelm", "StableLmForCausalLM", SHARED),
    "stablelm parallel norms tied bias": Case(
        "stablelm",
        "StableLmForCausalLM",
        {
            **SHARED,
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "stablelm body norms": Case("stablelm", "StableLmModel", {**SHARED, "qk_layernorm": True}),
    "nemotron": Case("nemotron", "NemotronForCausalLM", SHARED),
    "nemotron biases tied head_dim": Case(
        "nemotron",
        "NemotronForCausalLM",
        {
            **GROUPED,
            "head_dim": 12,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
    ),
    "nemotron body": Case("nemotron", "NemotronModel", SHARED),
}
