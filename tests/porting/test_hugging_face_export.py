"""The dialects of Hugging Face: jaxformer models compute the same in transformers."""

import math

import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import UsageError
from jaxformer.parameters import get_parameters, set_parameters
from jaxformer.porting.api import export_plan, from_torch, to_torch
from jaxformer.porting.dialects import HUGGING_FACE
from jaxformer.transformer_lm import TransformerLM
from tests.support.hugging_face.building import build
from tests.support.hugging_face.case import VOCAB
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.running import assert_close, run_source, run_target, tokens
from tests.support.tiers import SLOW, first_of_each, full_after, full_except

pytestmark = pytest.mark.usefixtures("float64")

NATIVE = {
    "d_model": 24,
    "num_heads": 4,
    "num_layers": 2,
    "d_ff": 44,
    "context_length": 320,
    "vocab_size": VOCAB,
}
STACK = {
    **NATIVE,
    "num_kv_heads": 2,
    "norm": "rms_norm",
    "norm_eps": 3e-6,
    "activation": "swiglu",
    "positions": "rotary",
    "rotary_base": 300.0,
    "qkv_bias": False,
    "output_bias": False,
    "feed_forward_bias": False,
    "tie_embeddings": False,
}
GEMMA = {**STACK, "norm_unit_offset": True, "embedding_scale": math.sqrt(24), "head_dim": 10}
WIDE = {**NATIVE, "d_model": 32, "block": "parallel", "positions": "rotary"}
GPTJ = {**WIDE, "shared_norm": True, "qkv_bias": False, "output_bias": False, "head_bias": True}
FALCON = {
    **NATIVE,
    "block": "parallel",
    "positions": "rotary",
    "qkv_bias": False,
    "output_bias": False,
    "feed_forward_bias": False,
}
NEVER_PORTED = {
    "gpt2": {**NATIVE, "activation": "relu", "norm_eps": 1e-3},
    "gpt2 ": {**NATIVE, "head": "none", "tie_embeddings": False},
    "llama": STACK,
    "llama ": {**STACK, "rotary_interleaved": True, "head_dim": 10},
    "llama  ": {
        **STACK,
        "rotary_interleaved": True,
        "qkv_bias": True,
        "output_bias": True,
        "rotary_scaling": "llama3",
        "rotary_scaling_factor": 4.0,
        "rotary_original_context_length": 96,
    },
    "mistral": {**STACK, "sliding_window": 23, "rotary_interleaved": True},
    "qwen2": {**STACK, "qkv_bias": True, "sliding_window": 23, "full_attention_layers": (1,)},
    "qwen3": {**STACK, "query_key_norm": True, "rotary_interleaved": True, "head_dim": 10},
    "gemma": {**GEMMA, "activation": "geglu_tanh", "tie_embeddings": True},
    "gemma2": {
        **GEMMA,
        "activation": "geglu",
        "branch_output_norm": True,
        "score_soft_cap": 2.0,
        "logit_soft_cap": 4.0,
        "sliding_window": 23,
        "full_attention_layers": (0,),
    },
    "gpt_neox": {**WIDE, "rotary_fraction": 0.75, "tie_embeddings": False},
    "gpt_neox ": {**WIDE, "block": "pre_norm", "rotary_scaling": "linear", "rotary_base": 70.0},
    "bloom": {
        **NATIVE,
        "d_ff": None,
        "positions": "alibi",
        "embedding_norm": True,
        "activation": "gelu_bloom",
    },
    "bert": {
        **NATIVE,
        "block": "post_norm",
        "embedding_norm": True,
        "final_norm": False,
        "causal": False,
        "num_token_types": 3,
        "head": "none",
        "pooler": True,
    },
    "bert ": {
        **NATIVE,
        "block": "post_norm",
        "embedding_norm": True,
        "final_norm": False,
        "causal": False,
        "num_token_types": 3,
        "head": "masked_lm",
        "head_bias": True,
        "activation": "gelu_tanh",
    },
    "phi": {
        **WIDE,
        "num_kv_heads": 2,
        "shared_norm": True,
        "head_bias": True,
        "rotary_fraction": 0.5,
        "rotary_interleaved": True,
        "query_key_norm": True,
    },
    "gpt_bigcode": {**NATIVE, "num_kv_heads": 1, "activation": "relu"},
    "gpt_bigcode ": {**NATIVE, "attention_scale": 1.0, "tie_embeddings": False},
    "gpt_neo": {
        **NATIVE,
        "num_layers": 3,
        "qkv_bias": False,
        "attention_scale": 1.0,
        "sliding_window": 23,
        "full_attention_layers": (1,),
    },
    "gptj": {**GPTJ, "rotary_interleaved": True, "rotary_fraction": 0.75},
    "gptj ": {**GPTJ, "rotary_fraction": 0.5, "tie_embeddings": False},
    "codegen": {**GPTJ, "rotary_interleaved": True, "activation": "silu"},
    "falcon": {**FALCON, "num_kv_heads": 1, "shared_norm": True, "activation": "relu"},
    "falcon ": {**FALCON, "num_kv_heads": 2, "rotary_scaling": "linear", "rotary_base": 70.0},
    "falcon  ": {
        **NATIVE,
        "positions": "alibi",
        "alibi_in_bfloat16": True,
        "alibi_scale": 1 / math.sqrt(6),
    },
    "mpt": {
        **NATIVE,
        "d_ff": None,
        "positions": "alibi",
        "qkv_bias": False,
        "output_bias": False,
        "feed_forward_bias": False,
        "norm_bias": False,
        "qkv_clip": 0.7,
        "attention_scale": 0.3,
    },
    "persimmon": {
        **WIDE,
        "block": "pre_norm",
        "rotary_fraction": 0.75,
        "query_key_norm": True,
        "activation": "relu_squared",
        "tie_embeddings": False,
    },
    "starcoder2": {
        **STACK,
        "norm": "layer_norm",
        "activation": "gelu_tanh",
        "rotary_interleaved": True,
        "head_dim": 10,
        "sliding_window": 23,
    },
    "stablelm": {
        **STACK,
        "d_model": 32,
        "norm": "layer_norm",
        "rotary_fraction": 0.5,
        "query_key_norm": True,
        "query_key_norm_over": "own_head",
        "query_key_norm_bias": False,
    },
    "nemotron": {
        **STACK,
        "norm": "layer_norm",
        "norm_unit_offset": True,
        "activation": "relu_squared",
        "head_dim": 8,
        "rotary_fraction": 0.5,
        "rotary_interleaved": True,
    },
    "opt": {**NATIVE, "position_offset": 2, "activation": "silu"},
    "opt ": {**NATIVE, "position_offset": 2, "block": "post_norm", "final_norm": False},
    "olmo": {
        **STACK,
        "norm": "layer_norm",
        "norm_eps": 1e-5,
        "norm_scale": False,
        "norm_bias": False,
        "qkv_clip": 0.4,
        "rotary_interleaved": True,
    },
    "olmo2": {
        **STACK,
        "block": "output_norm",
        "query_key_norm": True,
        "query_key_norm_over": "all_heads",
        "rotary_interleaved": True,
    },
    "olmo3": {
        **STACK,
        "block": "output_norm",
        "query_key_norm": True,
        "query_key_norm_over": "all_heads",
        "sliding_window": 23,
        "full_attention_layers": (0,),
        "window_rotary_base": 70.0,
    },
    "exaone4": {
        **STACK,
        "block": "output_norm",
        "query_key_norm": True,
        "sliding_window": 23,
        "full_attention_layers": (0,),
        "layers_without_rotary": (0,),
        "rotary_interleaved": True,
    },
    "phi3": {**STACK, "sliding_window": 23},
    "glm": {**STACK, "qkv_bias": True, "rotary_fraction": 0.75, "head_dim": 8},
    "glm4": {**STACK, "branch_output_norm": True, "rotary_interleaved": True},
    "smollm3": {
        **STACK,
        "layers_without_rotary": (0,),
        "rotary_interleaved": True,
        "tie_embeddings": True,
    },
    "granite": STACK,
    "granite ": {**STACK, "logit_scale": 0.3, "embedding_scale": 7.0, "residual_scale": 0.5},
    "helium": STACK,
    "arcee": {**STACK, "activation": "gelu_tanh"},
    "seed_oss": {**STACK, "output_bias": True, "head_dim": 10},
    "ernie4_5": {**STACK, "rotary_interleaved": True},
    "cohere": {
        **STACK,
        "norm": "layer_norm",
        "norm_bias": False,
        "block": "parallel",
        "shared_norm": True,
        "query_key_norm": True,
        "query_key_norm_over": "own_head",
    },
    "cohere2": {
        **STACK,
        "norm": "layer_norm",
        "norm_bias": False,
        "block": "parallel",
        "shared_norm": True,
        "rotary_interleaved": True,
        "sliding_window": 23,
        "full_attention_layers": (1,),
        "layers_without_rotary": (1,),
        "logit_scale": 0.25,
    },
}


# One of each file of dialects stands in full, the others in slow.
@pytest.mark.parametrize(
    "name",
    full_except(
        first_of_each(NEVER_PORTED, lambda name: HUGGING_FACE[name.strip()], SLOW),
        lambda name: name in ("gpt2", "bert"),
    ),
)
def test_models_that_were_never_ported_are_exported(name):
    dialect = name.strip()
    target = TransformerLM(TransformerLMConfig(**NEVER_PORTED[name]), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    set_parameters(
        target, {k: p + rng.normal(0, 0.3, p.shape) for k, p in get_parameters(target).items()}
    )
    plan = export_plan(target, dialect)
    settings = plan.module_mapping.settings(target)
    attention = next(case.attention for case in CASES.values() if case.dialect == dialect)
    with in_float64():
        source = build(plan.origin.kind, settings, attention=attention).double()
    source.load_state_dict({k: torch.as_tensor(a) for k, a in to_torch(target, dialect).items()})
    again = from_torch(source, dialect)
    ids = tokens(6)
    with in_float64():
        results = run_target(target, ids)
        for found, expected in zip(results, run_source(source, ids), strict=True):
            assert_close(found, expected.detach(), 1e-11)
        for found, expected in zip(run_target(again, ids), results, strict=True):
            # Sums of reordered terms where pairs became halves.
            assert_close(found, expected, 1e-13)


def _model(**settings):
    return TransformerLM(TransformerLMConfig(**settings), rngs=nnx.Rngs(0))


# What a dialect cannot hold: its name, the config, what the error must say.
CANNOT_BE_HELD = [
    (
        "gpt2",
        {**NATIVE, "num_kv_heads": 2},
        ["blocks.*.attention.num_kv_heads is 2 in jaxformer and 4"],
    ),
    ("gpt2", {**NATIVE, "qkv_bias": False}, ["q_proj.bias"]),
    (
        "gpt2",
        {**NATIVE, "position_offset": 1},
        ["position_embedding.offset is 1 in jaxformer and 0 in "],
    ),
    ("gpt2", {**NATIVE, "head_bias": True}, ["lm_head.bias"]),
    (
        "llama",
        {**NATIVE, "activation": "relu"},
        [
            "no place for position_embedding.embedding",
            "blocks.*.attention_norm is 'LayerNorm' in jaxformer and 'RMSNorm' in ",
            "feed_forward.activation is 'relu' in jaxformer",
        ],
    ),
    (
        "llama",
        {**STACK, "qkv_bias": True},
        ["blocks.*.attention.q_proj.bias is (24,) in jaxformer and None in "],
    ),
    ("llama", {**STACK, "activation": "geglu_tanh", "sliding_window": 9}, ["sliding_window is 9"]),
    ("llama", {**STACK, "d_model": 26, "head_dim": 10}, ["hidden_size must be divisible"]),
    ("llama", {**STACK, "head_dim": 8, "rotary_fraction": 0.5}, ["partial_rotary_factor"]),
    ("mistral", {**STACK, "sliding_window": 9, "full_attention_layers": (1,)}, ["full_attention"]),
    (
        "gemma",
        {**GEMMA, "activation": "geglu"},
        ["activation is 'gelu' in jaxformer and 'gelu_tanh' in "],
    ),
    (
        "gemma",
        {**GEMMA, "activation": "geglu_tanh", "embedding_scale": None},
        ["embedding_scale is None in jaxformer and 4.89"],
    ),
    (
        "gemma",
        {**STACK, "activation": "geglu_tanh"},
        ["norm.unit_offset is False in jaxformer and True"],
    ),
    (
        "gemma2",
        {**GEMMA, "activation": "geglu", "branch_output_norm": True, "attention_scale": 0.3},
        ["blocks.*.attention.scale is 0.3 in jaxformer"],
    ),
    (
        "gpt_neox",
        {**WIDE, "rotary_interleaved": True},
        ["interleaved is True in jaxformer and False"],
    ),
    ("gpt_neox", {**WIDE, "num_kv_heads": 2}, ["num_kv_heads is 2 in jaxformer and 4 in "]),
    (
        "bloom",
        {**NATIVE, "positions": "alibi", "embedding_norm": True},
        ["gelu_bloom", "(24, 44) in jaxformer and (24, 96) in "],
    ),
    (
        "bert",
        {**NATIVE, "head": "none", "causal": False},
        ["final_norm.scale", "num_token_types is 0 in jaxformer"],
    ),
    ("phi", {**WIDE, "shared_norm": True, "tie_embeddings": False}, ["lm_head.bias"]),
    ("opt", {**NATIVE, "position_offset": 2, "norm_eps": 1e-6}, ["norm.eps is 1e-06 in jaxformer"]),
    (
        "opt",
        {**NATIVE, "position_offset": 1},
        ["position_embedding.offset is 1 in jaxformer and 2 in "],
    ),
]


@pytest.mark.parametrize(("dialect", "settings", "words"), full_after(8, CANNOT_BE_HELD))
def test_what_a_dialect_cannot_hold_is_rejected(dialect, settings, words):
    with pytest.raises(UsageError, match="cannot hold this TransformerLM") as caught:
        to_torch(_model(**settings), dialect)
    for word in words:
        assert word in str(caught.value)


def test_all_that_stands_against_an_export_is_listed():
    settings = {**STACK, "norm_eps": 1e-3, "logit_soft_cap": 2.0, "attention_scale": 0.5}
    with pytest.raises(UsageError) as caught:
        to_torch(_model(**settings, query_key_norm=True), "llama")
    message = str(caught.value)
    for word in (
        "q_norm",
        "k_norm",
        "logit_soft_cap is 2.0 in jaxformer and None in ",
        "scale is 0.5",
    ):
        assert word in message
