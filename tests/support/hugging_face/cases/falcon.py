"""Falcon in its layouts, MPT and Persimmon."""

from tests.support.hugging_face.case import LINEAR, PARTIAL, SIZES, Case

FALCON = {name: value for name, value in SIZES.items() if name != "intermediate_size"}
ALIBI = {**FALCON, "alibi": True, "parallel_attn": False}
ALIBI_NOTES = (
    "`eager` adds ALiBi twice, and so does jaxformer where the config names it; no padding to the "
    "left: transformers counts ALiBi's positions, which it rounds to bfloat16, from the first real "
    "token"
)
MPT = {"d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 320}

CASES = {
    "falcon": Case("falcon", "FalconForCausalLM", FALCON, attention="sdpa"),
    "falcon new groups untied bias": Case(
        "falcon",
        "FalconForCausalLM",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "bias": True,
            "tie_word_embeddings": False,
            "ffn_hidden_size": 44,
            "activation": "gelu_new",
        },
    ),
    "falcon new one norm": Case(
        "falcon",
        "FalconForCausalLM",
        {
            **FALCON,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "rope_scaling": LINEAR,
        },
    ),
    "falcon alibi": Case(
        "falcon",
        "FalconForCausalLM",
        {**ALIBI, "multi_query": False, "bias": True},
        attention="sdpa",
        left_padding=False,
        notes=ALIBI_NOTES,
    ),
    "falcon alibi six heads body": Case(
        "falcon",
        "FalconModel",
        {**ALIBI, "num_attention_heads": 6, "parallel_attn": True},
        attention="sdpa",
        left_padding=False,
        notes=ALIBI_NOTES,
    ),
    "falcon alibi eager": Case(
        "falcon",
        "FalconForCausalLM",
        {**ALIBI, "num_attention_heads": 6, "tie_word_embeddings": False},
        left_padding=False,
        notes=ALIBI_NOTES,
    ),
    "mpt": Case("mpt", "MptForCausalLM", MPT),
    "mpt clipped untied six heads": Case(
        "mpt",
        "MptForCausalLM",
        {
            **MPT,
            "n_heads": 6,
            "tie_word_embeddings": False,
            "attn_config": {"clip_qkv": 0.9, "softmax_scale": 0.3},
        },
    ),
    "mpt body": Case("mpt", "MptModel", MPT),
    "persimmon": Case("persimmon", "PersimmonForCausalLM", PARTIAL),
    "persimmon no norms tied": Case(
        "persimmon",
        "PersimmonForCausalLM",
        {
            **PARTIAL,
            "qk_layernorm": False,
            "tie_word_embeddings": True,
            "hidden_act": "silu",
            "partial_rotary_factor": 0.25,
            "rope_theta": 500.0,
        },
    ),
    "persimmon body": Case("persimmon", "PersimmonModel", PARTIAL),
}
