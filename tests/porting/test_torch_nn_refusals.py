"""What of ``torch.nn`` is rejected, and which jaxformer modules torch.nn can hold."""

from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import ParallelBlock, PostNormBlock, PreNormBlock
from jaxformer.config import TransformerConfig
from jaxformer.encoder_decoder import Decoder, Encoder
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.feed_forward import FeedForward
from jaxformer.norms import LayerNorm
from jaxformer.parameters import get_parameters
from jaxformer.porting.api import from_torch, to_torch
from tests.porting.test_torch_nn_dialect import D, F, N, layer, stack
from tests.support.ported_modules import state_of, to_tensor

pytestmark = [
    pytest.mark.usefixtures("float64"),
    pytest.mark.filterwarnings("ignore:enable_nested_tensor is True:UserWarning"),
]


def with_activation(function: Any) -> nn.Module:
    return layer(activation=function)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MultiheadAttention(D, N, add_bias_kv=True), "add_bias_kv and add_zero_attn"),
        (lambda: nn.MultiheadAttention(D, N, add_zero_attn=True), "add_bias_kv and add_zero_attn"),
        (lambda: nn.MultiheadAttention(D, N, kdim=20), "kdim and vdim must be equal to embed_dim"),
        (lambda: with_activation(torch.tanh), "unsupported: activation must be .*: got .*tanh"),
        (lambda: with_activation(lambda x: x), "unsupported: activation must be .*: got .*lambda"),
        (
            lambda: nn.TransformerEncoder(layer(), 1, nn.RMSNorm(D)),
            "the final norm must be a LayerNorm: got .RMSNorm",
        ),
        (
            lambda: nn.Transformer(D, N, 1, 1, F, custom_encoder=nn.Identity()),
            "custom_encoder must be a TransformerEncoder: got .Identity",
        ),
        (lambda: nn.GRU(3, 5), "torch.nn has no class GRU"),
    ],
)
def test_unsupported_modules_are_rejected(make, message):
    with pytest.raises(UsageError, match=message):
        from_torch(make(), "torch.nn")


def test_layers_must_be_alike():
    source = stack("Encoder", 3)
    source.layers[2].norm_first = True
    with pytest.raises(UsageError, match="number 2 differ in block"):
        from_torch(source, "torch.nn")


def test_missing_unexpected_and_misshapen_arrays_are_listed():
    state = state_of(layer("Decoder"))
    state["self_attn.in_proj_bia"] = state.pop("self_attn.in_proj_bias")
    state["norm3.weight"] = state["norm3.weight"][1:]
    state["norm3.bias"] = state["norm3.bias"][2:]
    settings = {"class": "TransformerDecoderLayer", "nhead": N}
    with pytest.raises(CheckpointError) as refusal:
        from_torch(state, "torch.nn", settings)
    for part in (
        "missing self_attn.in_proj_bias (target attention.q_proj.bias, attention.k_proj.bias, ",
        "(is it self_attn.in_proj_bia?)",
        "unexpected self_attn.in_proj_bia",
        "norm3.bias has shape (22,), not (23,)",
    ):
        assert part in str(refusal.value)


def built(kind: str, **settings: Any) -> Any:
    """jaxformer modules that were not imported from torch."""
    rngs = nnx.Rngs(0)
    if kind in ("Encoder", "Decoder"):
        config = TransformerConfig(
            d_model=D, num_heads=N, d_ff=F, context_length=1, positions="none",
            **{"block": "post_norm", "activation": "relu", **settings},
        )  # fmt: skip
        return Encoder(config, 2, rngs=rngs) if kind == "Encoder" else Decoder(
            config, 2, causal=False, rngs=rngs
        )  # fmt: skip
    attention = MultiHeadAttention(D, N, rngs=rngs)
    if kind == "MultiHeadAttention":
        return attention
    block = {"pre": PreNormBlock, "post": PostNormBlock, "parallel": ParallelBlock}[kind]
    return block(attention, FeedForward(D, F, rngs=rngs), LayerNorm(D), LayerNorm(D))


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        ("MultiHeadAttention", lambda: nn.MultiheadAttention(D, N, batch_first=True)),
        ("pre", lambda: layer(norm_first=True, activation="gelu", batch_first=True)),
        ("Encoder", lambda: stack("Encoder", 2, nn.LayerNorm(D), batch_first=True)),
        ("Decoder", lambda: stack("Decoder", 2, nn.LayerNorm(D), batch_first=True)),
    ],
)
def test_a_module_built_by_hand_goes_to_torch(kind, make):
    module, source = built(kind), make().double()
    state = {name: to_tensor(array) for name, array in to_torch(module, "torch.nn").items()}
    source.load_state_dict(state, strict=True)
    again = get_parameters(from_torch(source, "torch.nn"))
    for name, parameter in get_parameters(module).items():
        np.testing.assert_array_equal(parameter, again[name])


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (built("parallel"), "the class is 'ParallelBlock' in jaxformer"),
        (built("Encoder", sliding_window=3), "window is 3 in jaxformer and None in "),
        (built("Encoder", num_kv_heads=2), "num_kv_heads is 2 in jaxformer and 4 in "),
        (built("Encoder", norm="rms_norm"), "is 'RMSNorm' in jaxformer and 'LayerNorm' in "),
        (built("Encoder", qkv_bias=False), "q_proj.bias is None in jaxformer"),
    ],
)
def test_what_torch_cannot_hold_is_not_exported(module, message):
    with pytest.raises(UsageError, match=message):
        to_torch(module, "torch.nn")
