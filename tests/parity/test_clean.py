"""Equal models are never judged to have a bug: random ones of every dialect."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import torch_ref.transformer_lm
from jaxformer.parity.comparison.modules import compare_with
from jaxformer.parity.recording.torch_values import in_narrow
from parity_tests.families import charlm, encdec, minimal, nanogpt, prepost, unified
from tests.support.subjects import HUGGING_FACE, B, D, F, Subject, V, causal, randomize
from tests.support.tiers import SLOW, full_except, tier_of
from torch_ref.config import TransformerLMConfig

pytestmark = pytest.mark.usefixtures("float64")

Random = np.random.Generator
CONTEXT = 320
STDS = (0.02, 0.3, 1.0)
# Only two lengths, because each new shape is compiled; at the long one rotary angles are large.
SHORT, LONG = 11, 300
AT_LENGTH = (3, 13, 25, 36)


def pick(random: Random, *options: Any) -> Any:
    return options[random.integers(len(options))]


def flag(random: Random) -> bool:
    return bool(random.integers(2))


def tokens(random: Random, length: int, least: int = 3) -> np.ndarray:
    return random.integers(least, V, (B, length))


def padding(random: Random, length: int) -> np.ndarray:
    """Returns which tokens are real (B, T); the end of the second row may be padding."""
    lengths = np.array([length, length - random.integers(length // 2)])
    return np.arange(length) < lengths[:, None]


def hugging_face(dialect: str, random: Random, length: int) -> Subject:
    kinds = {
        "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gemma": "GemmaForCausalLM",
        "gemma2": "Gemma2ForCausalLM", "gpt_neox": "GPTNeoXForCausalLM",
        "bloom": "BloomForCausalLM", "bert": pick(random, "BertForMaskedLM", "BertModel"),
        "phi": "PhiForCausalLM", "opt": "OPTForCausalLM",
    }  # fmt: skip
    heads = pick(random, 2, 4)
    rotary = {
        "num_key_value_heads": pick(random, 1, 2),
        "rope_theta": pick(random, 1e4, 5e5),
        "rms_norm_eps": pick(random, 1e-6, 1e-5),
    }
    window = {"sliding_window": pick(random, 5, 1000)}
    of = {
        "gpt2": {
            "n_embd": D, "n_head": pick(random, 2, 4, 6), "n_layer": 2, "n_positions": CONTEXT,
            "activation_function": pick(random, "gelu_new", "gelu", "relu"),
        },
        "llama": {**rotary, "attention_bias": flag(random), "mlp_bias": flag(random)},
        "mistral": {**rotary, **window},
        "qwen2": {**rotary, **window, "use_sliding_window": flag(random), "max_window_layers": 1},
        "qwen3": {**rotary, "head_dim": pick(random, 6, 12), "attention_bias": flag(random)},
        "gemma": {**rotary, "head_dim": pick(random, 6, 12)},
        "gemma2": {
            **rotary, **window, "head_dim": 6, "query_pre_attn_scalar": pick(random, 6, 7),
            "attn_logit_softcapping": pick(random, None, 5.0),
            "final_logit_softcapping": pick(random, None, 3.0),
        },
        "gpt_neox": {
            "rotary_pct": pick(random, 0.67, 1.0), "use_parallel_residual": flag(random),
            "attention_bias": flag(random), "hidden_act": pick(random, "gelu", "gelu_new"),
        },
        "bloom": {"n_head": pick(random, 2, 4, 6), "n_layer": 2, "seq_length": CONTEXT},
        "bert": {"hidden_act": pick(random, "gelu", "gelu_new", "relu"), "pad_token_id": 0},
        "phi": {"partial_rotary_factor": 0.67, "qk_layernorm": flag(random)},
        "opt": {
            "ffn_dim": F, "word_embed_proj_dim": D, "do_layer_norm_before": flag(random),
            "enable_bias": flag(random),
        },
    }[dialect]  # fmt: skip
    cls = getattr(transformers, kinds[dialect])
    sizes = HUGGING_FACE | {
        "num_attention_heads": heads, "num_hidden_layers": 2, "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": flag(random),
    }  # fmt: skip
    if dialect == "bloom":
        # Porting rejects settings that the class does not have.
        del sizes["intermediate_size"], sizes["max_position_embeddings"]
    config = cls.config_class(**{**sizes, **of})
    ids, seen = tokens(random, length), padding(random, length)
    if dialect == "bert":
        ids = np.where(seen, ids, 0)
    return Subject(
        dialect, cls(config).float(), [ids, seen.astype(np.int64)], [ids, seen[:, None, None, :]],
        dialect, call=lambda module, given: module(given[0], attention_mask=given[1]),
    )  # fmt: skip


def twin(random: Random, length: int) -> Subject:
    block = pick(random, "pre_norm", "post_norm", "parallel")
    config = TransformerLMConfig(
        d_model=D,
        num_heads=pick(random, 2, 4),
        num_kv_heads=pick(random, None, 1, 2),
        d_ff=F,
        num_layers=2,
        vocab_size=V,
        context_length=CONTEXT,
        block=block,
        norm=pick(random, "layer_norm", "rms_norm"),
        norm_eps=pick(random, 1e-6, 1e-5),
        activation=pick(random, "relu", "gelu", "gelu_tanh", "swiglu", "geglu"),
        positions=pick(random, "learned", "sinusoidal", "rotary", "alibi", "relative"),
        query_key_norm=flag(random),
        branch_output_norm=flag(random),
        embedding_norm=flag(random),
        shared_norm=block == "parallel" and flag(random),
        qkv_bias=flag(random),
        output_bias=flag(random),
        feed_forward_bias=flag(random),
        causal=flag(random),
        tie_embeddings=flag(random),
        sliding_window=pick(random, None, 5),
        score_soft_cap=pick(random, None, 4.0),
        logit_soft_cap=pick(random, None, 3.0),
    )
    given = [tokens(random, length), padding(random, length)[:, None, None, :]]
    return Subject("torch_ref", torch_ref.transformer_lm.TransformerLM(config), given, given)


def unified_model(random: Random, length: int) -> Subject:
    module = unified.Transformer(
        V, D, pick(random, 2, 4), 2, F, 0.1, CONTEXT,
        ffn_cls=pick(random, unified.FeedForward, unified.SwiGLUFFN),
        attn_cls=pick(random, unified.MultiHeadAttention, unified.MultiQueryAttention),
        pos_enc_cls=pick(
            random, unified.SinusoidalPE, unified.LearnedPE, unified.RoPE, unified.ALiBi
        ),
        pre_norm=flag(random),
    )  # fmt: skip
    allowed = causal(length) & padding(random, length)[:, None, None, :]
    additive = np.where(allowed, 0.0, -np.inf).astype(np.float32)
    ids = tokens(random, length)
    return Subject("unified", module, [ids, additive], [ids, allowed], "unified")


def translation(random: Random, length: int) -> Subject:
    module = encdec.Transformer(V, V, D, pick(random, 2, 4), 2, 1, F, CONTEXT)
    given = [
        tokens(random, length + 2), tokens(random, length),
        padding(random, length + 2)[:, None, None, :], causal(length)[None, None],
    ]  # fmt: skip
    return Subject("encdec", module, given, given, "encdec")


def block(random: Random, length: int) -> Subject:
    x = random.standard_normal((B, length, D)).astype(np.float32) * pick(random, 0.02, 1.0, 20.0)
    heads = pick(random, 2, 4)
    name = pick(random, "charlm", "prepost", "minimal")
    if name == "charlm":
        config = {
            "context_size": CONTEXT, "embedding_dim": D, "heads_num": heads,
            "head_size": D // heads, "dropout_rate": 0.1, "use_bias": flag(random),
        }  # fmt: skip
        return Subject(name, charlm.Block(config), [x], [x], name)
    cls = minimal.TransformerBlock
    if name == "prepost":
        cls = pick(random, prepost.PreNormTransformerBlock, prepost.PostNormTransformerBlock)
    # Padding on the left, so that the first queries may attend to nothing.
    mask = causal(length) & padding(random, length)[:, ::-1][:, None, None, :]
    return Subject(name, cls(D, heads, F), [x, mask], [x, mask], name)


def torch_nn(random: Random, length: int) -> Subject:
    first = flag(random)
    settings = {
        "nhead": pick(random, 2, 4), "dim_feedforward": F, "batch_first": first,
        "norm_first": flag(random), "activation": pick(random, "relu", "gelu"),
    }  # fmt: skip
    x, seen = random.standard_normal((B, length, D)).astype(np.float32), padding(random, length)
    x = x if first else np.ascontiguousarray(x.swapaxes(0, 1))
    layer = nn.TransformerEncoderLayer(D, **settings)
    module = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    reference = [x, ~causal(length), ~seen]
    return Subject("torch.nn", module, reference, [x, causal(length), seen])


def nano(random: Random, length: int) -> Subject:
    config = nanogpt.GPTConfig(
        vocab_size=V, n_embd=D, n_head=pick(random, 2, 4), n_layer=2, block_size=CONTEXT,
        bias=flag(random),
    )  # fmt: skip
    given = [tokens(random, length)]
    return Subject("nanogpt", nanogpt.GPT(config), given, given, "nanogpt")


TRANSFORMERS = (
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gpt_neox", "bloom", "bert",
    "phi", "opt",
)  # fmt: skip
FAMILIES = [
    *(
        (name, lambda random, length, name=name: hugging_face(name, random, length))
        for name in TRANSFORMERS
    ),
    ("torch_ref", twin),
    ("torch_ref", twin),
    ("torch_ref", twin),
    ("unified", unified_model),
    ("encdec", translation),
    ("blocks", block),
    ("torch.nn", torch_nn),
    ("nanogpt", nano),
]  # fmt: skip
# Of these the default tier has one model each.
FIRST = ("gpt2", "blocks", "nanogpt")
# Every family in both dtypes, and with different scales of weights.
CASES = [
    pytest.param(
        3 * place + turn,
        make,
        dtype,
        STDS[(place + turn) % 3],
        LONG if 3 * place + turn in AT_LENGTH else SHORT,
        id=f"{3 * place + turn}-{name}-{dtype}",
        marks=[SLOW] * ((turn == 2 and place < 8) or 3 * place + turn in (3, 13)),
    )
    for place, (name, make) in enumerate(FAMILIES)
    for turn, dtype in enumerate(("float32", "bfloat16", "float32"))
]


def test_there_are_enough():
    assert sum(tier_of(case.marks) != "slow" for case in CASES) >= 50


# The families of transformers differ in what tests/porting/test_hugging_face.py compares.
@pytest.mark.parametrize(
    ("number", "make", "dtype", "std", "length"),
    full_except(CASES, lambda number, *_: number % 3 == 0 and FAMILIES[number // 3][0] in FIRST),
)
def test_a_clean_model_has_no_bug(number, make, dtype, std, length):
    random = np.random.default_rng(number)
    torch.manual_seed(number)
    subject = make(random, length)
    randomize(subject.torch_module, std, seed=number)
    if hasattr(subject.torch_module, "cls"):
        # transformers ties the two biases only together with the matrix, but uses one of them.
        predictions = subject.torch_module.cls.predictions
        predictions.bias.data.copy_(predictions.decoder.bias.data)
    subject.torch_module = in_narrow(subject.torch_module, dtype)
    report = compare_with(
        subject.reference, subject.reference.port(), subject.jax_inputs, dtype=dtype
    )
    assert not report.root_causes, [
        (n.path, n.stage, n.message, n.worst) for n in report.root_causes
    ]
    assert report.verdict != "bug"
    measured = [node for node in report if node.forward is not None]
    assert measured[0].path == ""
    assert len(measured) > len(report.nodes) / 2
    rounded = [n.in_context for n in measured if n.in_context and n.in_context.candidate_rounding]
    assert len(rounded) > len(measured) / 2
