"""Mixtral, Qwen 2 and 3 with experts, OLMoE and gpt-oss."""

from tests.support.hugging_face.case import GROUPED, LINEAR, SIZES, Case

# Several experts a token, of a number that no other size has.
QWEN = {**GROUPED, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
QWEN2 = {**QWEN, "shared_expert_intermediate_size": 28}
OLMOE = {**SIZES, "num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None}

GPT_OSS = {
    **GROUPED,
    "head_dim": 10,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 19,
    "rope_parameters": {"rope_type": "default", "rope_theta": 3e4},
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}

CASES = {
    "mixtral": Case("mixtral", "MixtralForCausalLM", {**GROUPED, "num_local_experts": 6}),
    "mixtral four of five window tied": Case(
        "mixtral",
        "MixtralForCausalLM",
        {
            **SIZES,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "num_local_experts": 5,
            "num_experts_per_tok": 4,
            "sliding_window": 19,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
            "output_router_logits": True,
            "router_aux_loss_coef": 0.02,
            "rope_scaling": LINEAR,
        },
    ),
    "mixtral body": Case(
        "mixtral", "MixtralModel", {**GROUPED, "num_local_experts": 3, "num_experts_per_tok": 3}
    ),
    "qwen2_moe": Case(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {**QWEN2, "num_hidden_layers": 3, "decoder_sparse_step": 2},
    ),
    "qwen2_moe windows normalised tied": Case(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **QWEN2,
            "num_hidden_layers": 3,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 19,
            "qkv_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh",
        },
    ),
    "qwen2_moe body": Case("qwen2_moe", "Qwen2MoeModel", {**QWEN2, "num_experts": 4}),
    "qwen3_moe": Case(
        "qwen3_moe", "Qwen3MoeForCausalLM", {**QWEN, "head_dim": 10, "norm_topk_prob": True}
    ),
    "qwen3_moe dense window biases tied": Case(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {
            **QWEN,
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "use_sliding_window": True,
            "sliding_window": 23,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.3,
        },
    ),
    "qwen3_moe body": Case("qwen3_moe", "Qwen3MoeModel", QWEN),
    "olmoe": Case("olmoe", "OlmoeForCausalLM", OLMOE),
    "olmoe clipped groups biases tied": Case(
        "olmoe",
        "OlmoeForCausalLM",
        {
            **OLMOE,
            "num_key_value_heads": 2,
            "clip_qkv": 1.5,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
        },
    ),
    "gpt_oss": Case("gpt_oss", "GptOssForCausalLM", GPT_OSS),
    "gpt_oss yarn tied no biases": Case(
        "gpt_oss",
        "GptOssForCausalLM",
        {
            **GPT_OSS,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "num_key_value_heads": 1,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
    "gpt_oss body limits": Case(
        "gpt_oss", "GptOssModel", {**GPT_OSS, "swiglu_limit": 0.5, "swiglu_alpha": 1.25}
    ),
    "olmoe body": Case("olmoe", "OlmoeModel", {**OLMOE, "num_experts": 4}),
}
