"""DeepSeek-V3: latent attention with and without latent queries, experts in groups."""

from tests.support.hugging_face.case import SIZES, Case

LATENT = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 14,
    "q_lora_rank": 18,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "pad_token_id": None,
}
EXPERTS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 300.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 80,
}

CASES = {
    "deepseek_v3": Case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {**LATENT, **EXPERTS, "rope_parameters": YARN},
        attention="sdpa",
    ),
    "deepseek_v3 plain queries halves biases tied": Case(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **LATENT,
            **EXPERTS,
            "num_hidden_layers": 3,
            "q_lora_rank": None,
            "n_shared_experts": 2,
            "n_group": 3,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 0.75,
            "rope_interleave": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
        attention="sdpa",
    ),
    "deepseek_v3 body one group": Case(
        "deepseek_v3",
        "DeepseekV3Model",
        {**LATENT, **EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        attention="sdpa",
    ),
}
