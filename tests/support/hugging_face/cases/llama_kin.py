"""SmolLM 3, Granite, Helium, Arcee, Seed-OSS and ERNIE 4.5."""

from tests.support.hugging_face.case import GROUPED, LINEAR, SIZES, Case

# Their padding is beyond so small a vocabulary, or one of the tokens of the proof.
NO_PAD = {"pad_token_id": None}
CASES = {
    "smollm3": Case(
        "smollm3",
        "SmolLM3ForCausalLM",
        {
            **GROUPED,
            **NO_PAD,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 19,
        },
    ),
    "smollm3 untied biases head_dim": Case(
        "smollm3",
        "SmolLM3ForCausalLM",
        {
            **SIZES,
            **NO_PAD,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 23,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
        },
    ),
    "smollm3 no window": Case(
        "smollm3", "SmolLM3ForCausalLM", {**GROUPED, **NO_PAD, "num_hidden_layers": 5}
    ),
    "granite": Case(
        "granite",
        "GraniteForCausalLM",
        {
            **GROUPED,
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.22,
            "logits_scaling": 3.0,
        },
    ),
    "granite biases tied head_dim": Case(
        "granite",
        "GraniteForCausalLM",
        {
            **SIZES,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
            "attention_multiplier": 0.4,
            "residual_multiplier": 0.5,
            "logits_scaling": 0.7,
            "rope_scaling": LINEAR,
        },
    ),
    "granite body": Case(
        "granite",
        "GraniteModel",
        {**GROUPED, "embedding_multiplier": 2, "logits_scaling": 8.0},
        without_effect=frozenset({"logits_scaling"}),
    ),
    "helium": Case("helium", "HeliumForCausalLM", {**GROUPED, **NO_PAD, "head_dim": 6}),
    "helium biases tied": Case(
        "helium",
        "HeliumForCausalLM",
        {
            **SIZES,
            **NO_PAD,
            "num_key_value_heads": 4,
            "head_dim": 6,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "arcee": Case("arcee", "ArceeForCausalLM", GROUPED),
    "arcee biases tied head_dim": Case(
        "arcee",
        "ArceeForCausalLM",
        {
            **GROUPED,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
            "hidden_act": "gelu",
        },
    ),
    "seed_oss": Case("seed_oss", "SeedOssForCausalLM", {**GROUPED, "head_dim": 10}),
    "seed_oss other biases tied": Case(
        "seed_oss",
        "SeedOssForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4_5": Case("ernie4_5", "Ernie4_5ForCausalLM", {**GROUPED, "head_dim": 10}),
    "ernie4_5 biases untied": Case(
        "ernie4_5",
        "Ernie4_5ForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "use_bias": True,
            "tie_word_embeddings": False,
            "rope_scaling": LINEAR,
        },
    ),
}
