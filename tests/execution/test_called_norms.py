"""Norms as custom calls: right, always the same, and taken only where they may be."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.execution.called_norms import FEWEST_NUMBERS, fits, norm, norm_beside
from jaxformer.execution.called_products import products_of
from jaxformer.execution.sharding import layout
from jaxformer.hardware import norm_calls
from jaxformer.norms import LayerNorm, NoNorm, RMSNorm
from jaxformer.norms import norm_beside as of_modules
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, use_build

pytestmark = needs_calls
ROUNDING = np.finfo(np.float32).eps / 2
# A block and a row more, fewer numbers than a register has, some registers and a rest, wide rows.
SHAPES = [(33, 128), (7, 5), (2, 40, 37), (100, 771)]
# Whether it centres, has a factor, has a bias.
KINDS = [(True, True, True), (True, True, False), (True, False, False), (False, True, False)]
EPS = 1e-5


@pytest.fixture(autouse=True)
def known():
    """XLA knows the calls by their names."""
    assert norm_calls.are_known()


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    use_build(request.param, norm_calls, monkeypatch)


def draw(shape, kind, seed=0):
    """Rows that are not centred, what the norm multiplies by and adds, and a gradient."""
    random = np.random.default_rng(seed)
    x, dy = 2 + 3 * random.standard_normal(shape, np.float32), random.standard_normal(shape)
    factor, bias = 1 + random.standard_normal((2, shape[-1]), np.float32)
    _, has_factor, has_bias = kind
    return x, factor if has_factor else None, bias if has_bias else None, np.float32(dy)


def compiled_norm(kind):
    return jax.jit(lambda x, factor, bias: norm(x, factor, bias, eps=EPS, centres=kind[0]))


def exact_and_bounds(kind, x, factor, bias, dy):
    """The result and its gradients in float64, and how far roundings bring float32 from them.

    To first order: a sum of n terms is within n roundings of the sum of their absolute values.
    """
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    width = x.shape[-1]
    f = np.ones(width) if factor is None else factor.astype(np.float64)
    b = np.zeros(width) if bias is None else bias.astype(np.float64)

    def mean(y):
        return y.mean(-1, keepdims=True)

    m = mean(x) * kind[0]
    of_m = (width + 1) * ROUNDING * mean(np.abs(x)) * kind[0]
    c = x - m
    of_c = of_m + ROUNDING * np.abs(c)
    variance = mean(c * c) + EPS
    of_variance = mean(2 * np.abs(c) * of_c) + (width + 3) * ROUNDING * variance
    scale, relative = variance**-0.5, of_variance / (2 * variance) + 3 * ROUNDING
    n = c * scale
    of_n = of_c * scale + np.abs(n) * (relative + ROUNDING)
    y = n * f + b
    of_y = np.abs(f) * of_n + ROUNDING * (np.abs(n * f) + np.abs(y))

    g = dy * f
    shift, slope = mean(g) * kind[0], mean(n * g)
    of_shift = (width + 2) * ROUNDING * mean(np.abs(g)) * kind[0]
    of_slope = mean(of_n * np.abs(g)) + (width + 3) * ROUNDING * mean(np.abs(n * g))
    inside = g - shift - n * slope
    of_inside = (
        of_shift + of_n * np.abs(slope) + np.abs(n) * of_slope
        + 3 * ROUNDING * (np.abs(g) + np.abs(shift) + np.abs(n * slope))
    )  # fmt: skip
    dx = scale * inside
    of_dx = scale * of_inside + np.abs(dx) * (relative + ROUNDING)

    def total(terms, of_terms):
        rows = terms.reshape(-1, width)
        of_sum = len(rows) * ROUNDING * np.abs(rows).sum(0)
        return rows.sum(0), of_sum + of_terms.reshape(-1, width).sum(0)

    of_products = np.abs(dy) * of_n + ROUNDING * np.abs(dy * n)
    pairs = [(y, of_y), (dx, of_dx)]
    pairs += [] if factor is None else [total(dy * n, of_products)]
    pairs += [] if bias is None else [total(dy, 0 * dy)]
    return pairs


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_norm_and_its_gradients_are_right_to_rounding(shape, kind):
    x, factor, bias, dy = draw(shape, kind)
    y, pull = jax.vjp(compiled_norm(kind), x, factor, bias)
    found = [y, *(gradient for gradient in pull(jnp.asarray(dy)) if gradient is not None)]
    for array, (exact, bound) in zip(
        found, exact_and_bounds(kind, x, factor, bias, dy), strict=True
    ):
        assert array.shape == exact.shape
        assert np.all(np.abs(np.asarray(array, np.float64) - exact) <= bound)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_goes_on_beside_a_norm_adds_its_gradient(shape, kind):
    x, factor, bias, dy = draw(shape, kind)
    beside, settings = dy[..., ::-1].copy(), {"eps": EPS, "centres": kind[0]}
    (passed, y), pull = jax.vjp(lambda *given: norm_beside(*given, **settings), x, factor, bias)
    expected, pull_norm = jax.vjp(lambda *given: norm(*given, **settings), x, factor, bias)
    np.testing.assert_array_equal(passed, x)
    np.testing.assert_array_equal(y, expected)
    found, of_norm = pull((jnp.asarray(beside), jnp.asarray(dy))), pull_norm(jnp.asarray(dy))
    for one, other in zip(found[1:], of_norm[1:], strict=True):
        np.testing.assert_array_equal(one, other)
    # Both sums are rounded, and one of the norms before its sum.
    summed = of_norm[0] + beside
    assert np.all(abs(found[0] - summed) <= 1.01 * ROUNDING * (abs(of_norm[0]) + 2 * abs(summed)))


@pytest.mark.parametrize("make", [LayerNorm, RMSNorm])
def test_a_block_takes_the_call_for_both(make):
    layer, x = make(64), jnp.asarray(draw((80, 64), KINDS[0])[0])
    for norm_of, called in ((layer, True), (NoNorm(), False)):
        with products_of("jaxformer"):
            program = jax.make_jaxpr(lambda x, norm_of=norm_of: of_modules(norm_of, x))(x)
            passed, y = of_modules(norm_of, x)
        assert ("jaxformer_norm" in str(program)) == called
        np.testing.assert_array_equal(passed, x)
        np.testing.assert_allclose(y, norm_of(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rms", [False, True])
def test_a_row_that_is_not_finite_is_none_alone(rms):
    kind = (not rms, True, not rms)
    x, factor, bias, _ = draw((40, 32), kind)
    x[3, 7], x[5, 0] = np.nan, np.inf
    found = np.isfinite(compiled_norm(kind)(x, factor, bias))
    assert not found[3].any()
    assert found[[i for i in range(40) if i not in (3, 5)]].all()


def test_many_at_once_end_and_give_the_same_bits():
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    kind = KINDS[0]
    arrays = draw((1500, 96), kind)

    @jax.jit
    def compiled(x, factor, bias, dy):
        y, pull = jax.vjp(compiled_norm(kind), x, factor, bias)
        return y, *pull(dy)

    def run(number):
        return [np.asarray(a) for a in compiled(*jax.device_put(arrays, jax.devices()[number % 4]))]

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, range(100)):
            for array, expected in zip(found, first, strict=True):
                np.testing.assert_array_equal(array, expected)


def test_only_many_rows_in_float32_outside_a_mesh_are_called(monkeypatch):
    width = 64
    x, scale = jnp.ones((FEWEST_NUMBERS // width, width)), jnp.ones(width)
    assert not fits(x, scale, None)
    with products_of("jaxformer"):
        assert fits(x, scale, None)
        assert fits(x)
        assert not fits(x[1:], scale)
        assert not fits(x.astype(jnp.bfloat16), scale)
        assert not fits(x, jnp.ones((4, width)))
        with layout(object()):
            assert not fits(x, scale)
        monkeypatch.setattr(norm_calls, "are_known", lambda: False)
        assert not fits(x, scale)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_the_layers_take_it_and_give_the_same(kind, unit_offset):
    layer = kind(128, unit_offset=unit_offset)
    layer.scale[...] = jnp.linspace(-1, 2, 128)
    x = jnp.asarray(draw((2, 40, 128), KINDS[0])[0])

    def outputs(layer, x):
        return jnp.sum(jnp.sin(layer(x)))

    expected, of_layer = nnx.value_and_grad(outputs)(layer, x)
    with products_of("jaxformer"):
        assert "jaxformer_norm" in str(jax.make_jaxpr(lambda x: layer(x))(x))
        found, gradients = nnx.value_and_grad(outputs)(layer, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients.scale[...], of_layer.scale[...], rtol=1e-3, atol=1e-5)


def test_the_switch_of_custom_calls_turns_it_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not norm_calls.are_known.__wrapped__()
