"""Cohere's Command R and R7B."""

from tests.support.hugging_face.case import GROUPED, LINEAR, SIZES, Case

CASES = {
    "cohere": Case(
        "cohere", "CohereForCausalLM", {**GROUPED, "use_qk_norm": True, "logit_scale": 0.3}
    ),
    "cohere untied biases head_dim": Case(
        "cohere",
        "CohereForCausalLM",
        {
            **SIZES,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "head_dim": 10,
            "logit_scale": 1.0,
            "rope_scaling": LINEAR,
        },
    ),
    "cohere body": Case(
        "cohere",
        "CohereModel",
        {**GROUPED, "use_qk_norm": True},
        without_effect=frozenset({"logit_scale"}),
    ),
    "cohere2": Case(
        "cohere2",
        "Cohere2ForCausalLM",
        {**GROUPED, "num_hidden_layers": 3, "sliding_window": 19, "sliding_window_pattern": 2},
    ),
    "cohere2 untied biases": Case(
        "cohere2",
        "Cohere2ForCausalLM",
        {
            **SIZES,
            "sliding_window": 23,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": False,
            "attention_bias": True,
        },
    ),
}
