"""Random configurations of every family, of torch.nn, nanoGPT and torch_ref, there and back."""

from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jaxformer.porting.api import from_torch, to_torch
from parity_tests.families import charlm, encdec, minimal, nanogpt, prepost, unified
from parity_tests.harness import TORCH
from tests.support.ported_modules import DTYPES, same_bits, state_of
from tests.support.tiers import full_except

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]
Draw = Any


@st.composite
def sizes(draw: Draw) -> dict[str, Any]:
    """Sizes of a small model; heads of an even width, so that rotary positions fit."""
    num_heads = draw(st.integers(1, 6))
    return {
        "D": num_heads * 2 * draw(st.integers(1, 4)),
        "N": num_heads,
        "K": draw(st.sampled_from([k for k in range(1, num_heads + 1) if num_heads % k == 0])),
        "F": draw(st.integers(1, 30)),
        "L": draw(st.integers(1, 3)),
        "M": draw(st.integers(1, 3)),
        "V": draw(st.integers(1, 20)),
        "S": draw(st.integers(1, 20)),
        "rate": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "flags": draw(st.tuples(*[st.booleans()] * 4)),
        "choice": draw(st.integers(0, 100)),
    }


def pick(s: dict[str, Any], *makers: Any) -> Any:
    return makers[s["choice"] % len(makers)]()


def make_prepost(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    block = (s["D"], s["N"], s["F"], s["rate"])
    source = pick(
        s,
        lambda: prepost.MultiHeadAttention(s["D"], s["N"], s["rate"]),
        lambda: prepost.PreNormTransformerBlock(*block),
        lambda: prepost.TransformerBlock(*block),
    )
    return source, {"num_heads": s["N"]}


def make_encdec(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    layer = (s["D"], s["N"], s["F"], s["rate"])
    source = pick(
        s,
        lambda: encdec.RelativePositionalAttention(s["D"], s["N"], s["F"]),
        lambda: encdec.MultiQueryAttention(s["D"], s["N"]),
        lambda: encdec.PositionalEncoding(s["D"], s["S"], s["rate"]),
        lambda: encdec.LearnedPositionalEmbedding(s["D"], s["S"]),
        lambda: encdec.DecoderLayer(*layer),
        lambda: encdec.TransformerEncoder(s["L"], *layer),
        lambda: encdec.GPT(s["V"], s["D"], s["N"], s["L"], s["F"], s["S"], s["rate"]),
        lambda: encdec.Transformer(
            s["V"], s["F"], s["D"], s["N"], s["L"], s["M"], s["F"], s["S"], s["rate"]
        ),
    )
    return source, {"num_heads": s["N"]}


def make_charlm(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    config = {
        "context_size": s["S"], "embedding_dim": s["D"], "heads_num": s["N"], "head_size": s["F"],
        "dropout_rate": s["rate"], "use_bias": s["flags"][0],
    }  # fmt: skip
    kinds = (charlm.AttentionHead, charlm.MultiHeadAttention, charlm.FeedForward, charlm.Block)
    return pick(s, *((lambda kind=kind: kind(config)) for kind in kinds)), {}


def make_unified(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    gated, pre_norm, whole, grouped = s["flags"]
    attention = {"n_kv_heads": s["K"]} if grouped else {}
    attention_class = unified.GroupedQueryAttention if grouped else unified.MultiHeadAttention
    ffn = unified.SwiGLUFFN if gated else unified.FeedForward
    told = {"num_heads": s["N"], "pre_norm": pre_norm, **attention}
    if not whole:
        parts = (attention_class(s["D"], s["N"], **attention), ffn(s["D"], s["F"]))
        return unified.TransformerBlock(*parts, s["D"], s["rate"], pre_norm), told
    positions = (unified.SinusoidalPE, unified.LearnedPE, unified.RoPE, unified.ALiBi)
    source = unified.Transformer(
        s["V"], s["D"], s["N"], s["L"], s["F"], s["rate"], s["S"], attention_class, attention, ffn,
        positions[s["choice"] % 4], pre_norm,
    )  # fmt: skip
    alibi = {"positions": "alibi", "max_len": s["S"]} if s["choice"] % 4 == 3 else {}
    return source, told | alibi


def make_minimal(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    source = pick(
        s,
        lambda: minimal.MinimalAttention(s["D"], s["N"]),
        lambda: minimal.TransformerBlock(s["D"], s["N"], s["F"], s["rate"]),
    )
    return source, {"num_heads": s["N"]}


def make_torch_nn(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    bias, norm_first, batch_first, final = s["flags"]
    told = {"norm_first": norm_first, "batch_first": batch_first,
            "activation": ("relu", "gelu")[s["choice"] % 2], "layer_norm_eps": 1e-3}  # fmt: skip
    layer = (s["D"], s["N"], s["F"], s["rate"])
    norm = nn.LayerNorm(s["D"], 1e-3) if final else None
    source = pick(
        s,
        lambda: nn.MultiheadAttention(s["D"], s["N"], bias=bias, batch_first=batch_first),
        lambda: nn.TransformerDecoderLayer(*layer, bias=bias, **told),
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(*layer, bias=bias, **told), s["L"], norm
        ),
        lambda: nn.Transformer(s["D"], s["N"], s["L"], s["M"], s["F"], bias=bias, **told),
    )
    return source, {"nhead": s["N"], **told}


def make_nanogpt(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    args = {
        "n_layer": s["L"], "n_head": s["N"], "n_embd": s["D"], "block_size": s["S"],
        "bias": s["flags"][0], "vocab_size": s["V"], "dropout": s["rate"],
    }  # fmt: skip
    return nanogpt.GPT(nanogpt.GPTConfig(**args), keep_mask=s["flags"][1]), args


def make_torch_ref(s: dict[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    tied, bias, post_norm, gated = s["flags"]
    config = {
        "d_model": s["D"], "num_heads": s["N"], "num_kv_heads": s["K"], "d_ff": s["F"],
        "num_layers": s["L"], "vocab_size": s["V"], "context_length": s["S"],
        "tie_embeddings": tied, "qkv_bias": bias, "block": ("pre_norm", "post_norm")[post_norm],
        "activation": ("relu", "swiglu")[gated], "norm": ("layer_norm", "rms_norm")[bias],
        "positions": ("none", "learned", "sinusoidal", "rotary", "alibi", "relative")[
            s["choice"] % 6
        ],
    }  # fmt: skip
    source = TORCH.transformer_lm.TransformerLM(TORCH.config.TransformerLMConfig(**config))
    return source, {"class": "TransformerLM", **config}


MAKERS = {
    "prepost": make_prepost,
    "encdec": make_encdec,
    "charlm": make_charlm,
    "unified": make_unified,
    "minimal": make_minimal,
    "torch.nn": make_torch_nn,
    "nanogpt": make_nanogpt,
    "torch_ref": make_torch_ref,
}


def strided(array: np.ndarray, way: int) -> np.ndarray:
    """The same values in another order of memory: reversed, with gaps or by columns."""
    if array.ndim == 0 or way == 0:
        return array
    if way == 1:
        return np.ascontiguousarray(array[::-1])[::-1]
    if way == 2:
        gaps = np.zeros((*array.shape[:-1], 2 * array.shape[-1]), array.dtype)
        gaps[..., ::2] = array
        return gaps[..., ::2]
    return np.asfortranarray(array)


@pytest.mark.parametrize(
    "dialect", full_except(MAKERS, lambda dialect: dialect in ("encdec", "nanogpt"))
)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(s=sizes(), dtype=st.sampled_from(DTYPES), way=st.integers(0, 3))
@pytest.mark.tier("full")
def test_random_configurations_come_back_bit_for_bit(dialect, s, dtype, way):
    source, told = MAKERS[dialect](s)
    random = np.random.default_rng(s["choice"])
    with jax.enable_x64(True), torch.no_grad():
        for parameter in source.parameters():
            parameter.copy_(torch.from_numpy(random.standard_normal(parameter.shape)))
        expected = state_of(source.to(getattr(torch, dtype)))
        same_bits(to_torch(from_torch(source, dialect)), expected)
        # What is not contiguous in torch: a transposed copy in every parameter's place.
        for parameter in source.parameters():
            parameter.data = parameter.data.mT.contiguous().mT if parameter.ndim > 1 else parameter
        same_bits(to_torch(from_torch(source, dialect)), expected)
        arrays = {name: strided(array, way) for name, array in expected.items()}
        found = from_torch(arrays, dialect, {"class": type(source).__name__, **told})
        same_bits(to_torch(found), expected)
