"""Phi-3, GLM and GLM 4."""

from tests.support.hugging_face.case import GROUPED, PARTIAL, SIZES, Case

# Their padding is beyond so small a vocabulary.
NO_PAD = {"pad_token_id": None}
WIDE = {**PARTIAL, **NO_PAD, "num_key_value_heads": 2}
CASES = {
    "phi3": Case("phi3", "Phi3ForCausalLM", {**GROUPED, **NO_PAD}),
    "phi3 window tied partial": Case(
        "phi3",
        "Phi3ForCausalLM",
        {
            **WIDE,
            "num_key_value_heads": 1,
            "sliding_window": 19,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.75,
        },
    ),
    "phi3 longrope": Case(
        "phi3",
        "Phi3ForCausalLM",
        {
            **GROUPED,
            **NO_PAD,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "factor": 5.0,
                "short_factor": [1.0, 1.5, 2.0],
                "long_factor": [1.25, 3.0, 7.0],
            },
        },
        # The factor is left out, as transformers 4 lets none be there: the lengths make it.
        without_effect=frozenset({"rope_parameters"}),
    ),
    "glm": Case("glm", "GlmForCausalLM", {**WIDE, "head_dim": 16}),
    "glm no bias tied whole": Case(
        "glm",
        "GlmForCausalLM",
        {
            **SIZES,
            **NO_PAD,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 1.0,
        },
    ),
    "glm4": Case("glm4", "Glm4ForCausalLM", {**WIDE, "head_dim": 12}),
    "glm4 no bias tied": Case(
        "glm4",
        "Glm4ForCausalLM",
        {
            **SIZES,
            **NO_PAD,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.25,
            "hidden_act": "gelu",
        },
    ),
}
