"""A feed-forward as custom calls: the numbers of its parts, and taken only where it may be."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.execution import called_activations, called_feed_forward, called_products
from jaxformer.execution.called_feed_forward import feed_forward, fits
from jaxformer.execution.called_products import FEWEST_ROWS, products_of
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.execution.sharding import layout
from jaxformer.feed_forward import GELU_ROOTS, FeedForward
from jaxformer.hardware import activation_calls, matrix_products
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, register_narrow, use_build

pytestmark = needs_calls
FUSED = "jaxformer_product_gelu"
# Rows, model, hidden: no multiple of anything; cut by rows, by columns; a long sum; several blocks.
SHAPES = [(33, 7, 301), (300, 40, 9), (66, 9, 1600), (50, 900, 70), (450, 400, 830)]


@pytest.fixture(autouse=True)
def known():
    """XLA knows the calls by their names."""
    matrix_products.register_products("jaxformer")
    assert activation_calls.are_known()


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """Whose calls: for this processor, or for registers of half the width, which it has too."""
    use_build(request.param, activation_calls, monkeypatch)
    if request.param == "narrower registers":
        register_narrow(matrix_products.NAME, matrix_products._FORMS, "jaxformer_")
        monkeypatch.setattr(called_feed_forward, "LIBRARY", "narrow")


def by_parts(x, up, bias, down, root):
    library = called_feed_forward.LIBRARY
    hidden = called_products.product(library, x, up)
    return called_products.product(library, called_activations.gelu(hidden, bias, root=root), down)


def weights(rows, width, hidden):
    random = np.random.default_rng(0)
    shapes = (rows, width), (width, hidden), (hidden,), (hidden, width)
    x, up, bias, down = (random.standard_normal(shape, np.float32) for shape in shapes)
    return x, up / np.float32(np.sqrt(width)), bias, down


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("root", [0.0, GELU_ROOTS["gelu_tanh"]], ids=["exact", "tanh"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_numbers_are_those_of_its_parts(shape, root, has_bias):
    x, up, bias, down = weights(*shape)
    given = x, up, bias if has_bias else None, down
    whole = jax.jit(functools.partial(feed_forward, root=root))
    parts = jax.jit(functools.partial(by_parts, root=root))
    found, pull = jax.vjp(whole, *given)
    expected, pull_parts = jax.vjp(parts, *given)
    np.testing.assert_array_equal(found, expected)
    dz = jnp.asarray(x[::-1])
    for one, other in zip(pull(dz), pull_parts(dz), strict=True):
        np.testing.assert_array_equal(one, other)
    # Without gradients slopes are not made.
    np.testing.assert_array_equal(whole(*given), expected)


def test_only_float32_by_jaxformer_that_keeps_everything_outside_a_mesh_is_called():
    x, up, bias, down = map(jnp.asarray, weights(FEWEST_ROWS, 8, 200))
    assert not fits(x, up, bias, down)
    with products_of("torch"):
        assert not fits(x, up, bias, down)
    with products_of("jaxformer"):
        assert fits(x, up, bias, down)
        assert fits(x, up, None, down)
        assert not fits(x[1:], up, bias, down)
        assert not fits(x, up[:, :100], bias[:100], down[:100])
        assert not fits(x[:, :0], up[:0], bias, down[:, :0])
        assert not fits(x, up, bias, down.astype(jnp.bfloat16))
        with layout(object()):
            assert not fits(x, up, bias, down)
        with rematerialization("dots"):
            assert not fits(x, up, bias, down)


@pytest.mark.parametrize("use_bias", [True, False])
@pytest.mark.parametrize("activation", GELU_ROOTS)
def test_a_feed_forward_takes_it_and_gives_the_same(activation, use_bias):
    layer = FeedForward(24, 96, activation=activation, use_bias=use_bias, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 30, 24), np.float32))

    def outputs(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    expected, gradients = nnx.value_and_grad(outputs, argnums=(0, 1))(layer, x)
    with products_of("jaxformer"):
        assert FUSED in str(jax.make_jaxpr(lambda x: layer(x))(x))
        found, of_calls = nnx.value_and_grad(outputs, argnums=(0, 1))(layer, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    for gradient, of_xla in zip(jax.tree.leaves(of_calls), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(gradient, of_xla, rtol=1e-3, atol=1e-5)


def test_dropout_between_the_products_or_another_activation_is_no_such_call():
    x = jnp.ones((2, 30, 24))
    dropped = FeedForward(24, 96, hidden_dropout=0.5, rngs=nnx.Rngs(0))
    dropped.hidden_dropout.key = jax.random.key(0)
    others = dropped, FeedForward(24, 96, activation="silu", rngs=nnx.Rngs(0))
    with products_of("jaxformer"):
        for layer in others:
            assert FUSED not in str(jax.make_jaxpr(lambda x, layer=layer: layer(x))(x))
        dropped.eval()
        assert FUSED in str(jax.make_jaxpr(lambda x: dropped(x))(x))


def test_texts_side_by_side():
    x, *given = weights(3 * 40, 20, 300)
    call = functools.partial(feed_forward, root=0.0)
    found = jax.vmap(lambda x: call(x, *given))(x.reshape(3, 40, 20))
    np.testing.assert_array_equal(found.reshape(120, 20), call(x, *given))
