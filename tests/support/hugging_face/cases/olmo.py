"""OLMo, OLMo 2, OLMo 3 and EXAONE 4."""

from tests.support.hugging_face.case import GROUPED, LINEAR, LLAMA3, SIZES, Case

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
}
CASES = {
    "olmo": Case("olmo", "OlmoForCausalLM", {**GROUPED, "clip_qkv": 0.7}),
    "olmo biases tied head_dim": Case(
        "olmo",
        "OlmoForCausalLM",
        {
            **SIZES,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
            "hidden_act": "gelu",
            "rope_scaling": LINEAR,
        },
    ),
    "olmo2": Case("olmo2", "Olmo2ForCausalLM", GROUPED),
    "olmo2 biases tied head_dim": Case(
        "olmo2",
        "Olmo2ForCausalLM",
        {
            **GROUPED,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
            "rope_scaling": LLAMA3,
            "rope_theta": 5e5,
        },
        std=2.0,
    ),
    "olmo2 body": Case("olmo2", "Olmo2Model", SIZES),
    "olmo3": Case(
        "olmo3",
        "Olmo3ForCausalLM",
        {
            **GROUPED,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_scaling": YARN,
        },
    ),
    "olmo3 bases biases tied head_dim": Case(
        "olmo3",
        "Olmo3ForCausalLM",
        {
            **SIZES,
            "num_hidden_layers": 5,
            "sliding_window": 23,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 7e3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            },
        },
        std=2.0,
    ),
    "exaone4": Case(
        "exaone4",
        "Exaone4ForCausalLM",
        {**GROUPED, "num_hidden_layers": 3, "sliding_window": 19, "sliding_window_pattern": 2},
    ),
    "exaone4 no window tied head_dim": Case(
        "exaone4",
        "Exaone4ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "sliding_window": None,
            "layer_types": ["full_attention"] * 2,
            "tie_word_embeddings": True,
            "head_dim": 10,
        },
    ),
}
