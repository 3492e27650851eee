"""Rotary positions that are scaled, each kind in a type that has it."""

from tests.support.hugging_face.case import GROUPED, LENGTH, PARTIAL, Case

# Where pairs are few, so that fast, slow and blended ones are there.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
FACTORS = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 7.0]}
LONG = {"rope_type": "longrope", **FACTORS, "original_max_position_embeddings": 64}

# transformers 4 reads no yarn or longrope without a factor: it is written where it was derived, and
# DeepSeek's two numbers are written as the one that they make.
FACTOR_WRITTEN = frozenset({"rope_parameters"})

CASES = {
    "llama yarn": Case("llama", "LlamaForCausalLM", {**GROUPED, "rope_parameters": YARN}),
    "llama yarn mscale": Case(
        "llama",
        "LlamaForCausalLM",
        {
            **GROUPED,
            "head_dim": 12,
            "rope_theta": 900.0,
            "rope_parameters": {
                **YARN,
                "beta_fast": 9.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 0.7,
                "mscale_all_dim": 1.3,
            },
        },
        without_effect=FACTOR_WRITTEN,
    ),
    "qwen3 yarn old form": Case(
        "qwen3",
        "Qwen3ForCausalLM",
        {
            **GROUPED,
            "head_dim": 10,
            "rope_scaling": {**YARN, "attention_factor": 1.3, "factor": None},
        },
        without_effect=FACTOR_WRITTEN,
    ),
    "llama longrope": Case(
        "llama",
        "LlamaForCausalLM",
        {**GROUPED, "rope_parameters": LONG},
        without_effect=FACTOR_WRITTEN,
    ),
    "llama longrope short": Case(
        "llama",
        "LlamaForCausalLM",
        {
            **GROUPED,
            "original_max_position_embeddings": LENGTH + 3,
            "rope_scaling": {**LONG, "attention_factor": 1.2, "factor": 5.0},
        },
        # It is written within rope_parameters.
        without_effect=frozenset({"original_max_position_embeddings"}),
    ),
    "llama dynamic": Case(
        "llama",
        "LlamaForCausalLM",
        {**GROUPED, "rope_parameters": {"rope_type": "dynamic", "factor": 3.0}},
    ),
    "llama proportional": Case(
        "llama",
        "LlamaForCausalLM",
        {
            **GROUPED,
            "head_dim": 10,
            "rope_parameters": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.6,
                "factor": 2.0,
            },
        },
    ),
    "phi yarn": Case(
        "phi",
        "PhiForCausalLM",
        {**PARTIAL, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}},
    ),
}
