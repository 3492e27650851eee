"""Attention block by block is the core's, on both passes, and keeps few scores in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.attention_core
from jaxformer.attention_core import scaled_dot_product_attention
from jaxformer.blocks import self_attention_mask
from jaxformer.config import TransformerLMConfig
from jaxformer.execution import attention_backends
from jaxformer.execution.attention_backends import MaskPattern, attention_kernel
from jaxformer.execution.blockwise_attention import blockwise_attention
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.layers import Dropout, seed_dropout
from jaxformer.masks import padding_mask_from_lengths
from jaxformer.training.parallel.mesh_layout import MeshLayout
from jaxformer.training.parallel.sharding_rules import AXES
from jaxformer.transformer_lm import TransformerLM
from tests.execution.test_fused_attention import CASES, compare
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

BATCH, HEAD, VALUE, SCALE = 2, 6, 5, 0.3
RANDOM = np.random.default_rng(24)


def rule(queries, keys, *, causal=True, window=None):
    return self_attention_mask(queries, keys, causal=causal, window=window)


def with_holes(length):
    """A mask by no rule: some keys are seen by nobody, some queries see nothing."""
    mask = np.array(rule(length, length))
    mask[..., 20:30] = False
    mask[..., 40:44, :] = False
    return mask


PADDING = padding_mask_from_lengths(jnp.array([131, 0]), 131)
# Name: queries, keys, query heads, key/value heads, mask, soft cap, rate of dropout.
EXACT = {
    "all at once": (131, 131, 6, 2, rule(131, 131, window=37), 1.5, 0.3),
    "padding": (131, 131, 4, 2, jnp.asarray(rule(131, 131)) & PADDING, 2.0, 0.0),
    "a mask with holes": (131, 131, 4, 4, with_holes(131), None, 0.0),
    "causal": (131, 131, 3, 3, rule(131, 131), None, 0.0),
    "window on both sides": (131, 131, 3, 1, rule(131, 131, causal=False, window=9), None, 0.0),
    "no mask": (131, 79, 3, 3, None, None, 0.2),
    "queries past all keys": (131, 79, 3, 3, rule(131, 79, window=10), None, 0.0),
    "a mask of each head": (131, 79, 4, 2, RANDOM.random((2, 4, 131, 79)) < 0.3, None, 0.0),
    "a mask of all queries": (131, 79, 4, 2, RANDOM.random((2, 1, 1, 79)) < 0.3, None, 0.0),
}


@pytest.mark.parametrize("spread", [1.0, pytest.param(20.0, marks=pytest.mark.tier("full"))])
@pytest.mark.parametrize("case", full_after(2, EXACT))
def test_it_is_torchs_on_both_passes(case, spread):
    queries, keys, heads, kv_heads, mask, soft_cap, rate = EXACT[case]
    shapes = [
        (BATCH, queries, heads, HEAD), (BATCH, keys, kv_heads, HEAD),
        (BATCH, keys, kv_heads, VALUE), (BATCH, queries, heads, VALUE),
    ]  # fmt: skip
    arrays = [spread * RANDOM.standard_normal(shape) for shape in shapes]
    dropout = Dropout(rate)
    dropout.key, dropout.first_row = jax.random.key(7), jnp.int32(3)
    keep = dropout.keep((BATCH, heads, queries, keys))

    @jax.jit
    def candidate(q, k, v, weight):
        def total(q, k, v):
            out = blockwise_attention(
                q, k, v, mask=mask, pattern=MaskPattern.read(mask, queries, keys), scale=SCALE,
                soft_cap=soft_cap, dropout=dropout, block_rows=32,
            )  # fmt: skip
            return jnp.sum(out * weight), out

        gradients, out = jax.grad(total, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    q, k, v = (torch.tensor(array, requires_grad=True) for array in arrays[:3])

    def drop(weights):
        if keep is None:
            return weights
        return torch.where(torch.tensor(np.asarray(keep)), weights / (1 - rate), 0.0)

    reference, _ = torch_ref.attention_core.scaled_dot_product_attention(
        q, k, v, mask=None if mask is None else torch.tensor(np.asarray(mask)), scale=SCALE,
        soft_cap=soft_cap, dropout=drop,
    )  # fmt: skip
    (reference * torch.tensor(arrays[3])).sum().backward()
    expected = [x.detach().numpy() for x in (reference, q.grad, k.grad, v.grad)]
    for found, value in zip(candidate(*arrays), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-12 * np.abs(value).max())


@pytest.mark.parametrize("case", full_after(1, CASES))
def test_it_rounds_as_the_core_does(case):
    compare(case, functools.partial(blockwise_attention, mask=None, block_rows=64))


@pytest.mark.tier("full")
def test_no_array_of_all_scores_is_in_memory():
    length, heads = 2048, 3
    q = jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)

    def total(q, k, v, attend):
        return jnp.sum(attend(q, k, v))

    def bytes_of(attend):
        gradient = jax.grad(functools.partial(total, attend=attend), argnums=(0, 1, 2))
        compiled = jax.jit(gradient).lower(q, q, q).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    mask = rule(length, length)
    blockwise = bytes_of(
        functools.partial(
            blockwise_attention, mask=mask, pattern=MaskPattern(True), scale=SCALE, block_rows=64
        )
    )
    core = bytes_of(lambda q, k, v: scaled_dot_product_attention(q, k, v, mask=mask)[0])
    scores = heads * length**2 * 4
    assert core > scores
    # Some blocks of 64 queries, and arrays of (T, H).
    assert blockwise < scores / 4


@pytest.mark.parametrize("around", full_after(0, [None, "scan", "remat"], slow_after=2))
@pytest.mark.parametrize(
    "settings",
    full_after(
        1, [{"num_kv_heads": 2, "score_soft_cap": 3.0, "sliding_window": 19}, {}], slow_after=1
    ),
)
def test_a_long_model_has_the_same_loss_and_gradients(settings, around, monkeypatch):
    """With dropout everywhere, and rows that are padded."""
    config = TransformerLMConfig(
        vocab_size=23, context_length=70, d_model=20, num_heads=4, head_dim=6, num_layers=2,
        d_ff=34, positions="rotary", attention_dropout=0.2, residual_dropout=0.1, **settings,
    )  # fmt: skip
    monkeypatch.setattr(attention_backends, "MOST_PLAIN_SCORES", 32**2)
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    definition, state = nnx.split(model)
    tokens = RANDOM.integers(0, 23, (3, 70))
    mask = padding_mask_from_lengths(jnp.array([70, 41, 70]), 70)
    calls = []
    original = attention_backends._blockwise_checks
    monkeypatch.setattr(
        attention_backends, "_blockwise_checks", lambda *a: calls.append(original(*a)) or calls[-1]
    )

    def loss(state, kernel, mask):
        model = nnx.merge(definition, state)
        seed_dropout(model, jax.random.key(5))
        with (
            attention_kernel(kernel),
            scanned_layers(around == "scan"),
            rematerialization("full" if around == "remat" else "none"),
        ):
            return jnp.sum(jnp.sin(model(tokens, mask)))

    for given in (None, mask):
        run = jax.jit(jax.value_and_grad(loss), static_argnums=1)
        found, expected = (run(state, kernel, given) for kernel in ("auto", "plain"))
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            scale = np.abs(other).max()
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * max(scale, 1))
    assert calls
    assert not any(any(checks.values()) for checks in calls)


@pytest.mark.tier("full")
def test_each_device_of_a_mesh_drops_its_own_part():
    sizes = tuple({"data": 2, "tensor": 2}.get(axis, 1) for axis in AXES)
    mesh = jax.make_mesh(
        sizes, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES), devices=jax.devices()[:4]
    )
    q, k, v = (jnp.asarray(RANDOM.standard_normal((2, 70, heads, 6))) for heads in (4, 2, 2))
    dropout = Dropout(0.4)
    dropout.key = jax.random.key(1)
    causal = rule(70, 70)

    def part(q, k, v, mask, bias, dropout):
        settings = {"scale": SCALE, "dropout": dropout, "block_rows": 16}
        return blockwise_attention(q, k, v, mask=mask, pattern=MaskPattern(True), **settings), None

    found = jax.jit(
        lambda *arrays: MeshLayout(mesh).share_heads(part, *arrays, causal, None, dropout)
    )
    expected, _ = scaled_dot_product_attention(q, k, v, mask=causal, scale=SCALE, dropout=dropout)
    np.testing.assert_allclose(found(q, k, v)[0], expected, rtol=0, atol=1e-13)
