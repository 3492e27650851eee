"""What a token is drawn from: the same on both sides, ties and edges included."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.logits import draw, filter_logits, most_probable
from tests.support.tiers import full_after
from torch_ref.logits import filter_logits as torch_filter_logits

V = 31


@pytest.mark.parametrize("temperature", [0.3, 2.5])
@pytest.mark.parametrize("top_k", [None, 5, V + 9])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.6, 1.0])
def test_filtered_logits_equal_those_of_torch(temperature, top_k, top_p):
    logits = np.random.default_rng(7).normal(0, 2, (6, V))
    logits[1, 3:9] = logits[1].max()
    logits[2] = 0.0
    settings = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
    kept = np.asarray(filter_logits(jnp.asarray(logits), **settings))
    twin = torch_filter_logits(torch.from_numpy(logits), **settings).numpy()
    assert kept.dtype == np.float64
    # XLA divides by a scalar as a product with its inverse: one unit in the last place.
    np.testing.assert_allclose(kept, twin, rtol=3e-16, atol=0)
    finite = np.isfinite(kept)
    assert finite.any(axis=-1).all()
    np.testing.assert_allclose(kept[finite], (logits / temperature)[finite], rtol=3e-16, atol=0)


def both_filters(logits, **settings):
    logits = np.asarray(logits, np.float64)
    kept = np.isfinite(np.asarray(filter_logits(jnp.asarray(logits), **settings)))
    twin = torch_filter_logits(torch.from_numpy(logits), **settings).isfinite().numpy()
    np.testing.assert_array_equal(kept, twin)
    return kept.astype(int).tolist()


@pytest.mark.parametrize("settings", [{"temperature": 1e-30}, {"top_p": 1e-30}])
def test_the_smallest_settings_leave_the_most_probable_token(settings):
    logits = np.random.default_rng(7).normal(0, 9, (6, V)).astype(np.float32)
    kept = filter_logits(jnp.asarray(logits), **settings)
    assert np.isfinite(kept).any(axis=-1).all()
    drawn = draw(jax.random.key(0), kept)
    assert drawn.tolist() == logits.argmax(axis=-1).tolist()
    twin = torch_filter_logits(torch.from_numpy(logits), **settings).softmax(dim=-1)
    assert twin.argmax(dim=-1).tolist() == drawn.tolist()
    assert twin.amax(dim=-1).tolist() == [1.0] * 6


def test_top_k_keeps_every_token_tied_with_the_kth():
    assert both_filters([1.0, 3.0, 2.0, 2.0, 0.0], top_k=2) == [0, 1, 1, 1, 0]


def test_top_p_keeps_the_token_that_crosses_and_no_more():
    probabilities = np.array([0.125, 0.5, 0.25, 0.0625, 0.0625])
    logits = np.log(probabilities)
    assert both_filters(logits, top_p=0.4) == [0, 1, 0, 0, 0]
    assert both_filters(logits, top_p=0.6) == [0, 1, 1, 0, 0]
    assert both_filters(logits, top_p=0.76) == [1, 1, 1, 0, 0]
    assert both_filters(logits, top_p=0.9) == [1, 1, 1, 1, 0]
    assert both_filters(logits, top_p=0.99) == [1, 1, 1, 1, 1]
    # Equal logits have probabilities without rounding: two quarters reach one half exactly.
    assert both_filters(np.zeros(4), top_p=0.5) == [1, 1, 0, 0]
    assert both_filters(np.zeros(4), top_p=0.50001) == [1, 1, 1, 0]


def test_top_p_counts_the_probability_that_top_k_left():
    logits = np.log([0.4, 0.2, 0.2, 0.2])
    assert both_filters(logits, top_p=0.5) == [1, 1, 0, 0]
    assert both_filters(logits, top_k=1, top_p=0.5) == [1, 0, 0, 0]
    assert both_filters(np.log([0.4, 0.25, 0.2, 0.15]), top_k=2, top_p=0.6) == [1, 0, 0, 0]


def test_filtering_widens_bfloat16():
    assert filter_logits(jnp.ones((1, 3), jnp.bfloat16)).dtype == jnp.float32
    assert torch_filter_logits(torch.ones(1, 3).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("dtype", full_after(1, ["float32", "float64"]))
@pytest.mark.parametrize("shift", full_after(1, [40.0, 0.0, -40.0]))
def test_a_large_vocabulary_is_cut_at_the_same_token(dtype, shift):
    logits = (np.random.default_rng(3).normal(0, 2, (3, 5003)) + shift).astype(dtype)
    logits[2, ::2] = -np.inf
    for settings in ({"top_k": 1}, {"top_k": 40}, {"top_k": 5002}, {"top_p": 0.5}, {"top_p": 0.99}):
        kept = np.asarray(filter_logits(jnp.asarray(logits), **settings))
        twin = torch_filter_logits(torch.from_numpy(logits), **settings).numpy()
        np.testing.assert_array_equal(kept, twin)


def test_zeros_of_either_sign_are_tied():
    assert both_filters([0.0, -0.0, -1.0, 0.0], top_k=1) == [1, 1, 0, 1]
    assert both_filters([-1.0, -0.0, 0.0, -2.0], top_k=2) == [0, 1, 1, 0]
    assert both_filters([-50.0, -0.0, 0.0, -50.0], top_p=0.4) == [0, 1, 0, 0]


def test_a_share_that_rounding_keeps_out_of_reach_keeps_everything():
    assert both_filters(np.linspace(-1, 1, 7), top_p=1 - 2**-53) == [1] * 7


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", full_after(1, map(pytest.param, [(9, 4), (36,), (18,)])), ids=str)
def test_most_probable_is_argmax(dtype, shape):
    logits = np.random.default_rng(3).normal(size=(9, 4, 300)).astype(np.float32)
    logits[1, :, 7] = logits[1, :, 200] = 50.0
    logits[2, 0] = 0.0
    logits[3, 1, 11] = np.inf
    logits[4, 1] = -np.inf
    logits[5, 0, [40, 90]] = np.nan
    logits[6] = np.nan
    # 18 rows are few, 36 are not; what is special is in the first two of each four.
    rows = logits if math.prod(shape) == 36 else logits[:, :2]
    array = jnp.asarray(rows.reshape(*shape, 300), dtype)
    # A sum that is made twice may be rounded in two ways.
    found = jax.jit(lambda x: most_probable(jnp.tanh(x / 3) * 3 + x))(array)
    wanted = jax.jit(lambda x: jnp.argmax(jnp.tanh(x / 3) * 3 + x, axis=-1))(array)
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype == wanted.dtype == most_probable(array).dtype
    np.testing.assert_array_equal(most_probable(array), jnp.argmax(array, axis=-1))
    few = array[..., 6:9]
    np.testing.assert_array_equal(most_probable(few), jnp.argmax(few, axis=-1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_draws_are_those_of_jax(dtype):
    logits = np.random.default_rng(5).normal(0, 3, (200, 50))
    logits[:, ::3] = -np.inf
    array = jnp.asarray(logits, dtype)
    for seed in range(3):
        key = jax.random.key(seed)
        wanted = jax.random.categorical(key, array)
        for function in (draw, jax.jit(draw)):
            np.testing.assert_array_equal(function(key, array), wanted)
