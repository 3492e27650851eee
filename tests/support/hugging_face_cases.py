"""The tiny models of transformers that the dialects of Hugging Face are tried on."""

import dataclasses
from typing import Any

# B, T and V; T is beyond the sliding windows and where a wrong position shows.
BATCH, LENGTH, VOCAB = 2, 303, 37
SIZES = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 44,
    "max_position_embeddings": 320,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
# Widths of heads of which a part can be turned.
PARTIAL = {**SIZES, "hidden_size": 32}
GPT2 = {"n_embd": 24, "n_head": 4, "n_layer": 2, "n_positions": 320}
BLOOM = {"hidden_size": 24, "n_head": 6, "n_layer": 2, "seq_length": 320}
OPT = {
    **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
    "ffn_dim": 44,
    "word_embed_proj_dim": 24,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# The shapes of rotary settings before transformers 5.
OLD_LINEAR = {"type": "linear", "factor": 3.0}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model: its dialect, its class in transformers, and the settings that are not defaults."""

    dialect: str
    kind: str
    settings: dict[str, Any]
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES = {
    "gpt2": Case("gpt2", "GPT2LMHeadModel", GPT2),
    "gpt2 untied relu": Case(
        "gpt2",
        "GPT2LMHeadModel",
        {**GPT2, "tie_word_embeddings": False, "n_inner": 41, "activation_function": "relu"},
    ),
    "gpt2 body": Case("gpt2", "GPT2Model", GPT2),
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
    "gemma": Case("gemma", "GemmaForCausalLM", {**GROUPED, "head_dim": 10, "hidden_act": "gelu"}),
    "gemma untied one head": Case(
        "gemma",
        "GemmaForCausalLM",
        {
            **GROUPED,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "tie_word_embeddings": False,
            "attention_bias": True,
            "rope_scaling": LINEAR,
        },
    ),
    "gemma2": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 19,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma2 uncapped full": Case(
        "gemma2",
        "Gemma2ForCausalLM",
        {
            **GROUPED,
            "head_dim": 8,
            "query_pre_attn_scalar": 8,
            "sliding_window": 19,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "silu",
        },
    ),
    "gemma2 body": Case("gemma2", "Gemma2Model", {**GROUPED, "head_dim": 10, "sliding_window": 19}),
    "gpt_neox": Case("gpt_neox", "GPTNeoXForCausalLM", {**PARTIAL, "rotary_pct": 0.5}),
    "gpt_neox sequential tied": Case(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        {
            **PARTIAL,
            "use_parallel_residual": False,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_new",
            "rotary_emb_base": 500.0,
        },
    ),
    "gpt_neox linear": Case(
        "gpt_neox", "GPTNeoXForCausalLM", {**PARTIAL, "rotary_pct": 1.0, "rope_scaling": LINEAR}
    ),
    "bloom": Case("bloom", "BloomForCausalLM", BLOOM),
    "bloom twelve heads untied": Case(
        "bloom",
        "BloomForCausalLM",
        {**BLOOM, "hidden_size": 36, "n_head": 12, "tie_word_embeddings": False},
    ),
    "bloom body": Case("bloom", "BloomModel", BLOOM),
    "bert": Case("bert", "BertModel", SIZES),
    "bert no pooler": Case(
        "bert", "BertModel", {**SIZES, "type_vocab_size": 3}, {"add_pooling_layer": False}
    ),
    "bert masked": Case("bert", "BertForMaskedLM", {**SIZES, "hidden_act": "gelu_new"}),
    "bert masked untied": Case(
        "bert", "BertForMaskedLM", {**SIZES, "tie_word_embeddings": False, "hidden_act": "relu"}
    ),
    "phi": Case("phi", "PhiForCausalLM", PARTIAL),
    "phi norms grouped tied": Case(
        "phi",
        "PhiForCausalLM",
        {
            **PARTIAL,
            "num_key_value_heads": 2,
            "qk_layernorm": True,
            "tie_word_embeddings": True,
            "partial_rotary_factor": 0.25,
        },
    ),
    "opt": Case("opt", "OPTForCausalLM", OPT),
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
    ),
    "opt no final norm": Case("opt", "OPTForCausalLM", {**OPT, "_remove_final_layer_norm": True}),
    "opt body": Case("opt", "OPTModel", OPT),
}
ROTARY = (
    "llama", "llama linear", "llama llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2",
    "gpt_neox", "gpt_neox linear", "phi",
)  # fmt: skip
MAKES_TEXT = (
    "gpt2", "llama biases tied head_dim", "llama llama3", "mistral", "qwen2 window tied",
    "qwen3 window bias", "gemma", "gemma2", "gpt_neox", "bloom", "phi norms grouped tied", "opt",
)  # fmt: skip
