"""nanoGPT's model and its ckpt.pt through ``from_torch`` and ``to_torch``."""

import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.api import from_torch, to_torch
from jaxformer.transformer_lm import TransformerLM
from parity_tests.families.nanogpt import GPT, GPTConfig
from parity_tests.verdict import judge_float64
from tests.support.ported_modules import (
    DTYPES,
    perturb,
    round_trip,
    run_source,
    run_target,
    same_bits,
    settings_of,
    state_of,
    to_tensor,
)

pytestmark = pytest.mark.usefixtures("float64")

ARGS = {
    "n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 19, "bias": False, "vocab_size": 31,
    "dropout": 0.2,
}  # fmt: skip
TOKENS = np.random.default_rng(3).integers(0, 31, (3, 11))


def model(*, keep_mask: bool = False, **settings: object) -> GPT:
    torch.manual_seed(5)
    return perturb(GPT(GPTConfig(**{**ARGS, **settings}), keep_mask)).eval()


def call(module, tokens):
    return module(tokens)


@pytest.mark.parametrize("bias", [False, True])
def test_the_model_computes_the_same(bias):
    source = model(bias=bias)
    target = from_torch(source, "nanogpt")
    expected = run_source(source, call, {"tokens": TOKENS})
    judge_float64(run_target(target, call, {"tokens": TOKENS}, "nanogpt"), expected)


@pytest.mark.parametrize("bias", [False, True])
def test_settings_and_rates_are_those_of_the_model_built_by_hand(bias):
    rates = ("embedding", "attention", "output", "feed_forward")
    built = TransformerLM(
        TransformerLMConfig(
            vocab_size=31, d_model=24, num_heads=3, num_layers=2, context_length=19,
            norm_bias=bias, qkv_bias=bias, output_bias=bias, feed_forward_bias=bias,
            **{f"{place}_dropout": 0.2 for place in rates},
        ),
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    source = model(bias=bias).train()
    target = from_torch(source, "nanogpt")
    assert settings_of(target) == settings_of(built)
    assert not target.embedding_dropout.deterministic
    derived = ("num_kv_heads", "head_dim", "d_ff")
    same = {name: target.config.settings()[name] for name in derived}
    assert target.config == built.config.replace(**same)
    fresh = model(bias=bias)
    fresh.load_state_dict({n: to_tensor(a) for n, a in to_torch(built, "nanogpt").items()})
    again = from_torch(fresh, "nanogpt")
    np.testing.assert_array_equal(
        again.blocks[1].attention.v_proj.kernel[...], built.blocks[1].attention.v_proj.kernel[...]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keep_mask", [False, True])
def test_it_comes_back_bit_for_bit(dtype, keep_mask):
    source = model(keep_mask=keep_mask, bias=keep_mask)
    back = round_trip(source, "nanogpt", dtype)
    fresh = model(keep_mask=keep_mask, bias=keep_mask).to(getattr(torch, dtype))
    fresh.load_state_dict({name: to_tensor(array) for name, array in back.items()}, strict=True)
    tokens = torch.from_numpy(TOKENS)
    assert torch.equal(source(tokens), fresh(tokens))


def test_a_checkpoint_of_a_compiled_model_and_its_arguments():
    source = model(keep_mask=True).float()
    state = state_of(source)
    compiled = {f"_orig_mod.{name}": array for name, array in state.items()}
    target = from_torch(compiled, "nanogpt", ARGS)
    assert target.embedding_dropout.rate == 0.2
    assert target.embedding_dropout.deterministic
    same_bits(to_torch(target), state)
    by_module = from_torch(source, "nanogpt")
    np.testing.assert_array_equal(target(TOKENS), by_module(TOKENS))
    assert settings_of(from_torch(state, "nanogpt", {"n_head": 3, "dropout": 0.2})) == (
        settings_of(by_module)
    )


def test_what_is_wrong_is_refused():
    state = state_of(model(keep_mask=True))
    with pytest.raises(CheckpointError, match=r"transformer.wpe.weight has shape \(19, 24\)"):
        from_torch(state, "nanogpt", {**ARGS, "block_size": 20})
    with pytest.raises(CheckpointError, match=r"missing transformer.h.2.ln_1.weight"):
        from_torch(state, "nanogpt", {**ARGS, "n_layer": 3})
    with pytest.raises(CheckpointError, match=r"missing transformer.h.0.attn.c_attn.bias"):
        from_torch(state, "nanogpt", {**ARGS, "bias": True})
    with pytest.raises(UsageError, match="give it as config"):
        from_torch(state, "nanogpt")
    mask = state["transformer.h.1.attn.bias"]
    with pytest.raises(CheckpointError, match=r"the buffer transformer.h.1.attn.bias differs by 1"):
        from_torch({**state, "transformer.h.1.attn.bias": np.ones_like(mask)}, "nanogpt", ARGS)
    with pytest.raises(CheckpointError, match=r"lm_head.weight must equal transformer.wte.weight"):
        from_torch({**state, "lm_head.weight": 2 * state["lm_head.weight"]}, "nanogpt", ARGS)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"activation": "gelu_tanh"}, "activation is 'gelu_tanh' in jaxformer and 'gelu' in "),
        ({"d_ff": 34}, r"up_proj.kernel is \(24, 34\) in jaxformer and \(24, 96\) in "),
        ({"qkv_bias": False}, "k_proj.bias is None in jaxformer"),
        ({"positions": "rotary"}, "attention.position is 'Rotary' in jaxformer"),
        ({"tie_embeddings": False}, "lm_head.kernel"),
    ],
)
def test_what_the_class_cannot_hold_is_not_exported(settings, message):
    sizes = {"vocab_size": 31, "d_model": 24, "num_heads": 3, "num_layers": 2, "context_length": 19}
    built = TransformerLM(TransformerLMConfig(**{**sizes, **settings}), rngs=nnx.Rngs(0))
    with pytest.raises(UsageError, match=message):
        to_torch(built, "nanogpt")
