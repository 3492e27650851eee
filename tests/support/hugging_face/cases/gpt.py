"""GPT-BigCode, GPT-Neo, GPT-J and CodeGen."""

from tests.support.hugging_face.case import Case
from tests.support.hugging_face.cases.gpt2 import GPT2

NEO = {
    "hidden_size": 24,
    "num_heads": 4,
    "num_layers": 2,
    "max_position_embeddings": 320,
    "attention_types": [[["global", "local"], 1]],
    "window_size": 19,
}
TURNED = {**GPT2, "n_embd": 40, "rotary_dim": 6}

CASES = {
    "gpt_bigcode": Case("gpt_bigcode", "GPTBigCodeForCausalLM", GPT2),
    "gpt_bigcode many queries untied unscaled": Case(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        {
            **GPT2,
            "multi_query": False,
            "tie_word_embeddings": False,
            "n_inner": 41,
            "activation_function": "relu",
            "scale_attn_weights": False,
        },
    ),
    "gpt_bigcode body": Case("gpt_bigcode", "GPTBigCodeModel", GPT2),
    "gpt_neo": Case("gpt_neo", "GPTNeoForCausalLM", NEO),
    "gpt_neo untied local": Case(
        "gpt_neo",
        "GPTNeoForCausalLM",
        {
            **NEO,
            "num_layers": 3,
            "attention_types": [[["local", "local", "global"], 1]],
            "intermediate_size": 41,
            "tie_word_embeddings": False,
            "activation_function": "silu",
        },
    ),
    "gpt_neo body global": Case(
        "gpt_neo",
        "GPTNeoModel",
        {**NEO, "attention_types": [[["global"], 2]], "window_size": 256},
    ),
    "gptj": Case("gptj", "GPTJForCausalLM", TURNED),
    "gptj tied whole heads": Case(
        "gptj",
        "GPTJForCausalLM",
        {
            **GPT2,
            "rotary_dim": 6,
            "n_inner": 41,
            "tie_word_embeddings": True,
            "activation_function": "relu",
        },
    ),
    "gptj body": Case("gptj", "GPTJModel", TURNED),
    "codegen": Case("codegen", "CodeGenForCausalLM", TURNED),
    "codegen tied eight heads": Case(
        "codegen",
        "CodeGenForCausalLM",
        {
            **GPT2,
            "n_head": 8,
            "n_embd": 32,
            "rotary_dim": 2,
            "n_inner": 41,
            "tie_word_embeddings": True,
            "activation_function": "gelu",
        },
    ),
    "codegen body": Case("codegen", "CodeGenModel", TURNED),
}
