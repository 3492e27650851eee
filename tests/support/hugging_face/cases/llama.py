"""Llama, Mistral, Qwen 2 and Qwen 3."""

from tests.support.hugging_face.case import GROUPED, LLAMA3, OLD_LINEAR, Case

CASES = {
    "llama": Case("llama", "LlamaForCausalLM", GROUPED),
    "llama biases tied head_dim": Case(
        "llama",
        "LlamaForCausalLM",
        {
            **GROUPED,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "head_dim": 10,
        },
    ),
    "llama linear": Case("llama", "LlamaForCausalLM", {**GROUPED, "rope_scaling": OLD_LINEAR}),
    "llama llama3": Case(
        "llama", "LlamaForCausalLM", {**GROUPED, "rope_scaling": LLAMA3, "rope_theta": 5e5}
    ),
    "llama body": Case("llama", "LlamaModel", GROUPED),
    "mistral": Case("mistral", "MistralForCausalLM", {**GROUPED, "sliding_window": 19}),
    "mistral no window": Case(
        "mistral", "MistralForCausalLM", {**GROUPED, "sliding_window": None, "head_dim": 10}
    ),
    "qwen2": Case("qwen2", "Qwen2ForCausalLM", GROUPED),
    "qwen2 window tied": Case(
        "qwen2",
        "Qwen2ForCausalLM",
        {
            **GROUPED,
            "use_sliding_window": True,
            "sliding_window": 19,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        # It says which layers have a window; layer_types says it too.
        without_effect=frozenset({"max_window_layers"}),
    ),
    "qwen3": Case("qwen3", "Qwen3ForCausalLM", {**GROUPED, "head_dim": 10}),
    "qwen3 window bias": Case(
        "qwen3",
        "Qwen3ForCausalLM",
        {
            **GROUPED,
            "num_hidden_layers": 3,
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 19,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
