"""GELU as a custom call: as exact as torch's, always the same, and taken only where it may be."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.execution import called_feed_forward
from jaxformer.execution.called_activations import FEWEST_NUMBERS, fits
from jaxformer.execution.called_activations import gelu as called_gelu
from jaxformer.execution.called_products import products_of
from jaxformer.execution.sharding import layout
from jaxformer.feed_forward import ACTIVATIONS, FeedForward, gelu
from jaxformer.hardware import activation_calls
from jaxformer.hardware.matrix_products import register_products
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, use_build

pytestmark = needs_calls
ROOTS = {"none": 0.0, "tanh": math.sqrt(2 / math.pi)}
# One row, which is no multiple of a register.
POINTS = np.linspace(-12, 12, 100_003, dtype=np.float32)
# Fewer columns than a register has numbers, and some registers and a rest; a block and a row more.
SHAPES = [(40, 5), (3, 11, 300), (17, 1030)]
ROUNDING = np.finfo(np.float32).eps / 2


@pytest.fixture(autouse=True)
def known():
    """XLA knows the calls by their names."""
    assert activation_calls.are_known()


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    use_build(request.param, activation_calls, monkeypatch)


def torch_gelu(x, approximation):
    x = torch.from_numpy(x).requires_grad_()
    y = torch.nn.functional.gelu(x, approximate=approximation)
    y.backward(torch.ones_like(y))
    return y.detach().numpy(), x.grad.numpy()


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("approximation", ROOTS)
def test_it_rounds_at_most_twice_as_much_as_torch(approximation):
    exact = torch_gelu(POINTS.astype(np.float64), approximation)
    expected = torch_gelu(POINTS, approximation)
    call = jax.jit(lambda x: called_gelu(x, root=ROOTS[approximation]))
    y, pull = jax.vjp(call, POINTS)
    found = [y, *pull(jnp.ones_like(y))]
    for array, of_torch, true in zip(found, expected, exact, strict=True):
        assert np.abs(array - true).max() <= 2 * np.abs(of_torch - true).max()
    # Alone, and with its slope.
    np.testing.assert_array_equal(call(POINTS), y)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_bias_is_added_and_its_gradient_is_the_sum_over_rows(shape):
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, *shape), np.float32)
    bias = random.standard_normal(shape[-1], np.float32)
    y, pull = jax.vjp(called_gelu, x, bias)
    dx, of_bias = pull(jnp.asarray(dy))
    summed = x + bias
    expected, pull = jax.vjp(called_gelu, summed)
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, pull(jnp.asarray(dy))[0])
    # A sum of n terms is within n roundings of the sum of their absolute values.
    rows = np.asarray(dx, np.float64).reshape(-1, shape[-1])
    assert np.all(abs(of_bias - rows.sum(0)) <= len(rows) * ROUNDING * abs(rows).sum(0))


@pytest.mark.parametrize("approximation", ROOTS)
def test_numbers_far_from_zero_and_those_that_are_not_finite(approximation):
    x = np.array([0.0, -0.0, 1e-30, -1e-30, 100, -100, 1e18, -1e18, np.inf, np.nan], np.float32)
    y, pull = jax.vjp(lambda x: called_gelu(x, root=ROOTS[approximation]), x)
    expected = [0, -0.0, 5e-31, -5e-31, 100, 0, 1e18, 0, np.inf, np.nan]
    np.testing.assert_array_equal(y, np.float32(expected))
    (slope,) = pull(jnp.ones_like(y))
    np.testing.assert_array_equal(slope[:6], np.float32([0.5, 0.5, 0.5, 0.5, 1, 0]))


def test_only_many_numbers_in_float32_outside_a_mesh_are_called(monkeypatch):
    x = jnp.ones(FEWEST_NUMBERS)
    assert not fits(x)
    with products_of("jaxformer"):
        assert fits(x)
        assert not fits(x[1:])
        assert not fits(x.astype(jnp.bfloat16))
        assert fits(x, jnp.ones(4))
        assert not fits(x, jnp.ones(4, jnp.bfloat16))
        with layout(object()):
            assert not fits(x)
        monkeypatch.setattr(activation_calls, "are_known", lambda: False)
        assert not fits(x)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh", "gelu_bloom"])
def test_the_activations_take_it_and_give_the_same(name):
    x = jnp.asarray(POINTS.reshape(-1, 1))
    expected = ACTIVATIONS[name](x)
    with products_of("jaxformer"):
        assert "jaxformer_gelu" in str(jax.make_jaxpr(ACTIVATIONS[name])(x))
        np.testing.assert_allclose(ACTIVATIONS[name](x), expected, rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_a_feed_forward_adds_the_bias_within_the_call(activation, monkeypatch):
    register_products("jaxformer")
    # As where products are those of torch's library.
    monkeypatch.setattr(called_feed_forward, "fits", lambda *given: False)
    layer = FeedForward(24, 96, activation=activation, rngs=nnx.Rngs(0))
    x = jnp.asarray(POINTS[: 2 * 30 * 24].reshape(2, 30, 24) / 4)

    def outputs(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    expected, gradients = nnx.value_and_grad(outputs, argnums=(0, 1))(layer, x)
    with products_of("jaxformer"):
        assert "jaxformer_gelu" in str(jax.make_jaxpr(lambda x: layer(x))(x))
        found, of_calls = nnx.value_and_grad(outputs, argnums=(0, 1))(layer, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for gradient, of_xla in zip(jax.tree.leaves(of_calls), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(gradient, of_xla, rtol=1e-3, atol=1e-5)


def test_the_same_function_of_texts_side_by_side():
    x = jnp.asarray(POINTS[: 3 * 5000].reshape(3, 5000))
    with products_of("jaxformer"):
        found = jax.vmap(lambda x: gelu(x))(x)
    np.testing.assert_array_equal(found, called_gelu(x))


def test_the_switch_of_custom_calls_turns_it_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not activation_calls.are_known.__wrapped__()
