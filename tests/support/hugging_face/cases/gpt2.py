"""GPT-2 and its forerunner, BLOOM, OPT, BioGPT and XGLM."""

from tests.support.hugging_face.case import SIZES, Case

GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 320}
BLOOM = {"hidden_size": 24, "n_head": 6, "n_layer": 2, "seq_length": 320}
OPT = {
    **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
    "ffn_dim": 44,
    "word_embed_proj_dim": 24,
}
XGLM = {
    "d_model": 24,
    "attention_heads": 4,
    "num_layers": 2,
    "ffn_dim": 44,
    "max_position_embeddings": 320,
}

CASES = {
    "gpt2": Case("gpt2", "GPT2LMHeadModel", GPT2),
    "gpt2 untied relu": Case(
        "gpt2",
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 41, "activation_function": "relu"},
    ),
    "gpt2 body": Case("gpt2", "GPT2Model", GPT2),
    "bloom": Case("bloom", "BloomForCausalLM", BLOOM),
    "bloom twelve heads untied": Case(
        "bloom",
        "BloomForCausalLM",
        {**BLOOM, "hidden_size": 36, "n_head": 12, "tie_word_embeddings": False},
    ),
    "bloom body": Case("bloom", "BloomModel", BLOOM),
    "opt": Case("opt", "OPTForCausalLM", OPT, counts_tokens=True),
    "opt post-norm no bias untied": Case(
        "opt",
        "OPTForCausalLM",
        {
            **OPT,
            "do_layer_norm_before": False,
            "enable_bias": False,
            "tie_word_embeddings": False,
            "activation_function": "gelu",
        },
        counts_tokens=True,
    ),
    "opt no final norm": Case(
        "opt", "OPTForCausalLM", {**OPT, "_remove_final_layer_norm": True}, counts_tokens=True
    ),
    "opt body": Case("opt", "OPTModel", OPT, counts_tokens=True),
    "opt projected": Case(
        "opt",
        "OPTForCausalLM",
        {**OPT, "word_embed_proj_dim": 34, "do_layer_norm_before": False},
        counts_tokens=True,
    ),
    "opt projected untied": Case(
        "opt",
        "OPTForCausalLM",
        {**OPT, "word_embed_proj_dim": 34, "tie_word_embeddings": False},
        counts_tokens=True,
    ),
    "opt projected body": Case(
        "opt", "OPTModel", {**OPT, "word_embed_proj_dim": 14}, counts_tokens=True
    ),
    "openai-gpt": Case("openai-gpt", "OpenAIGPTLMHeadModel", GPT2, std=0.8),
    "openai-gpt untied relu": Case(
        "openai-gpt",
        "OpenAIGPTLMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "afn": "relu"},
        std=0.8,
    ),
    "openai-gpt body": Case("openai-gpt", "OpenAIGPTModel", {**GPT2, "afn": "silu"}),
    "biogpt": Case("biogpt", "BioGptForCausalLM", SIZES),
    "biogpt unscaled untied": Case(
        "biogpt",
        "BioGptForCausalLM",
        {**SIZES, "scale_embedding": False, "tie_word_embeddings": False, "hidden_act": "relu"},
    ),
    "biogpt body": Case("biogpt", "BioGptModel", SIZES),
    "xglm": Case("xglm", "XGLMForCausalLM", XGLM),
    "xglm unscaled untied": Case(
        "xglm",
        "XGLMForCausalLM",
        {**XGLM, "scale_embedding": False, "tie_word_embeddings": False, "pad_token_id": 0},
        std=1.0,
    ),
    "xglm body": Case("xglm", "XGLMModel", {**XGLM, "activation_function": "gelu_new"}),
}
