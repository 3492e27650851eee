"""Weights in int8 and bfloat16: torch's own quantizer, bounds of rounding, and the same texts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.continuous_generation import Request, generate_requests
from jaxformer.execution.narrow_products import product_by_blocks
from jaxformer.generation import generate, stream_samples
from jaxformer.inspection.narrowing_cost import narrowing_cost
from jaxformer.narrow_linear import NarrowLinear, is_narrow, narrow_weights, round_to_int8
from jaxformer.parameters import get_parameters
from jaxformer.speculative_generation import generate_with_draft
from parity_tests.generating import MODELS, V, build, pair, prompts, torch_generate
from tests.support.tiers import full_after
from torch_ref.narrow_linear import narrow_weights as torch_narrow_weights
from torch_ref.narrow_linear import round_to_int8 as torch_round_to_int8

DTYPES = ("int8", "bfloat16")


def weight(outputs=37, inputs=53, seed=0, dtype=np.float64):
    """Rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    made = rng.normal(size=(outputs, inputs)) * np.exp(rng.normal(size=(outputs, 1)) * 3)
    made[5] = 0
    return made.astype(dtype)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_int8_is_what_torchs_quantizer_makes(dtype):
    wide = weight(dtype=dtype)
    stored, scale = round_to_int8(jnp.asarray(wide))
    dequantized = torch.fake_quantize_per_channel_affine(
        torch.from_numpy(wide).float(), torch.from_numpy(np.array(scale)).float(),
        torch.zeros(len(wide), dtype=torch.int32), 0, -127, 127,
    )  # fmt: skip
    expected, torch_scale = torch_round_to_int8(torch.from_numpy(wide))
    # A division may be a product with the inverse, which moves numbers that lie just at a half.
    np.testing.assert_allclose(scale, torch_scale.numpy(), rtol=2 * np.finfo(dtype).eps, atol=0)
    steps = np.abs(wide / np.asarray(scale)[:, None])
    for other in (expected.numpy(), dequantized.numpy() / np.asarray(scale)[:, None]):
        difference = np.abs(np.asarray(stored, int) - np.rint(other).astype(int))
        assert np.all(np.abs(steps[difference > 0] % 1 - 0.5) < 1e-4)
        assert difference.max() <= 1
        assert difference.mean() < 2e-3


def test_no_number_is_off_by_more_than_half_a_step():
    wide = weight()
    stored, scale = map(np.asarray, round_to_int8(jnp.asarray(wide)))
    error = np.abs(stored * scale[:, None] - wide)
    assert np.all(error <= scale[:, None] / 2 * (1 + 1e-12))
    assert np.all(np.abs(stored).max(axis=1) == np.where(wide.any(axis=1), 127, 0))
    # A product is off by no more than what all these errors can add up to.
    x = np.random.default_rng(1).normal(size=(3, wide.shape[1]))
    layer = NarrowLinear(jnp.asarray(stored), jnp.asarray(scale), None)
    bound = np.abs(x).sum(axis=1)[:, None] * scale / 2
    assert np.all(np.abs(np.asarray(layer(jnp.asarray(x))) - x @ wide.T) <= bound + 1e-12)
    assert np.all(np.abs(np.asarray(layer(jnp.asarray(x)))[:, 6:] - x @ wide[6:].T) > 0)


@pytest.mark.parametrize("narrow", [np.int8, jnp.bfloat16])
@pytest.mark.parametrize("x_dtype", [np.float64, np.float32, jnp.bfloat16])
@pytest.mark.parametrize(("outputs", "rows"), [(16, 3), (48, 3), (53, 1), (53, 40), (160, 32)])
def test_a_product_by_blocks_is_the_product(narrow, x_dtype, outputs, rows):
    """Blocks of 16 rows, the last of which may reach back, on the left of few rows."""
    rng = np.random.default_rng(outputs)
    stored = jnp.asarray(rng.integers(-127, 128, (outputs, 30)), narrow)
    x = jnp.asarray(rng.normal(size=(rows, 30)), x_dtype)
    found = jax.jit(lambda x, w: product_by_blocks(x, w, block_numbers=500))(x, stored)
    assert found.dtype == (np.float64 if x_dtype == np.float64 else np.float32)
    expected = np.asarray(x, np.float64) @ np.asarray(stored, np.float64).T
    atol = (1e-12 if x_dtype == np.float64 else 1e-5) * np.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.optimized
def test_a_loop_keeps_no_copy_of_the_weights():
    """What the blocks are for: XLA would widen all of a weight before a loop that reads it."""
    for narrow in (jnp.int8, jnp.bfloat16):
        stored = jnp.zeros((4096, 256), narrow)

        def run(x, stored):
            return jax.lax.fori_loop(
                0, 5, lambda _, x: x + product_by_blocks(x, stored)[:, :256], x
            )

        x = jnp.zeros((1, 256), jnp.float32)
        memory = jax.jit(run).lower(x, stored).compile().memory_analysis()
        assert memory.temp_size_in_bytes < stored.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", full_after(1, [m for m in MODELS if m != "none"], slow_after=4))
def test_greedy_texts_are_those_of_torch_with_the_rounded_weights(name, dtype):
    """In float64, so that nothing but what was stored can differ."""
    model, twin = pair(name)
    narrow, narrow_twin = narrow_weights(model, dtype), torch_narrow_weights(twin, dtype)
    tokens = np.random.default_rng(1).integers(0, V, (2, 19))
    found = narrow(jnp.asarray(tokens))
    with torch.no_grad():
        expected = narrow_twin(torch.from_numpy(tokens)).numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * np.abs(expected).max())
    assert np.abs(np.asarray(model(jnp.asarray(tokens))) - expected).max() > 1e-3
    text = generate(narrow, prompts(), 40, greedy=True)
    np.testing.assert_array_equal(text, torch_generate(narrow_twin, prompts(), 40, greedy=True))


@pytest.mark.tier("full")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_way_to_write_takes_narrow_weights(dtype):
    model, _ = pair("rotary")
    narrow = narrow_weights(model, dtype)
    prompt = prompts(batch=1)
    key = jax.random.key(3)
    alone = generate(narrow, prompt, 30, key=key)
    (text,) = stream_samples(narrow, prompt, 30, [key])
    np.testing.assert_array_equal(np.concatenate(list(text), axis=1), alone)
    requests = [Request(prompt[0], 30, key), Request(prompt[0][:3], 9, key)]
    texts = dict(generate_requests(narrow, requests, rows=2))
    np.testing.assert_array_equal(texts[0], alone[0])
    greedy = generate(model, prompt, 30, greedy=True)
    drafted = generate_with_draft(model, narrow, prompt, 30, greedy=True)
    np.testing.assert_array_equal(drafted, greedy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_narrow_and_what_is_not(dtype):
    model, _ = build(dtype=np.float32, head_bias=True)
    narrow = narrow_weights(model, dtype)
    assert is_narrow(narrow)
    assert not is_narrow(model)
    own, found = get_parameters(model), get_parameters(narrow)
    kernels = {name for name in own if name.endswith(".kernel")}
    weights = {name.removesuffix("kernel") + "weight" for name in kernels}
    scales = {name.removesuffix("kernel") + "scale" for name in kernels if dtype == "int8"}
    assert set(found) == (set(own) - kernels) | weights | scales
    for name in weights:
        assert found[name].dtype == dtype, name
    for name in set(own) - kernels:
        assert found[name] is own[name], name
    numbers = sum(own[name].size for name in kernels)
    size = sum(found[name].nbytes for name in weights)
    assert size == numbers * jnp.dtype(dtype).itemsize


@pytest.mark.tier("full")
def test_a_layer_that_is_as_narrow_stays():
    model, _ = build(dtype=jnp.bfloat16)
    same = narrow_weights(model, "bfloat16")
    assert get_parameters(same).keys() == get_parameters(model).keys()
    tokens = jnp.asarray(prompts())
    narrow = narrow_weights(model, "int8")
    assert narrow(tokens).dtype == jnp.bfloat16
    assert get_parameters(narrow)["lm_head.scale"].dtype == jnp.float32


def test_bad_dtypes_and_weights_are_rejected():
    model, _ = build(dtype=np.float32)
    with pytest.raises(ValueError, match="dtype must be bfloat16 or int8: got int4"):
        narrow_weights(model, "int4")
    model.blocks[1].feed_forward.up_proj.kernel[...] = (
        model.blocks[1].feed_forward.up_proj.kernel[...].at[2, 3].set(jnp.nan)
    )
    with pytest.raises(ValueError, match=r"blocks.1.feed_forward.up_proj.kernel has numbers"):
        narrow_weights(model, "int8")


@pytest.mark.tier("full")
def test_the_cost_is_what_numpy_counts():
    """Of another model of the same shape, so that there is something to count."""
    model, _ = build(dtype=np.float64)
    narrow = narrow_weights(build(seed=8, dtype=np.float64)[0], "int8")
    text = np.random.default_rng(0).integers(0, V, 61)
    cost = narrowing_cost(model, narrow, text, num_tokens=30)
    length = model.config.context_length
    sums, others, most = [0.0, 0.0], 0, 0.0
    for start in range(0, 60, length):
        window = text[start : start + length + 1]
        logits = [np.asarray(side(jnp.asarray(window[None, :-1])))[0] for side in (model, narrow)]
        most = max(most, np.abs(logits[0] - logits[1]).max())
        others += int((logits[0].argmax(1) != logits[1].argmax(1)).sum())
        for side, each in enumerate(logits):
            total = np.log(np.exp(each).sum(axis=1))
            sums[side] += (total - each[np.arange(len(window) - 1), window[1:]]).sum()
    assert cost.places == 60
    assert cost.other_choices == others > 0
    assert cost.largest_difference == pytest.approx(most, rel=1e-9)
    assert cost.own_perplexity == pytest.approx(np.exp(sums[0] / 60), rel=1e-9)
    assert cost.narrow_perplexity == pytest.approx(np.exp(sums[1] / 60), rel=1e-9)
    texts = [
        generate(side, text[None, : length // 2], 30, greedy=True)[0] for side in (model, narrow)
    ]
    first = np.flatnonzero(texts[0] != texts[1])
    assert cost.same_tokens == (first[0] if len(first) else 30)
    assert str(cost).startswith("other choices on this text")
    same = str(narrowing_cost(model, model, text, num_tokens=3))
    assert same.startswith("the same choices")
    assert "3 greedy tokens are the same" in same
