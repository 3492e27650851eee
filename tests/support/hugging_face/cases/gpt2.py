"""GPT-2, BLOOM and OPT."""

from tests.support.hugging_face.case import SIZES, Case

GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 320}
BLOOM = {"hidden_size": 24, "n_head": 6, "n_layer": 2, "seq_length": 320}
OPT = {
    **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
    "ffn_dim": 44,
    "word_embed_proj_dim": 24,
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
}
