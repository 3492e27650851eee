"""The loss of many classes as custom calls: right, always the same, taken only where it may be."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.called_losses import FEWEST_CLASSES, fits, normalizers_and_picked
from jaxformer.execution.called_products import products_of
from jaxformer.execution.sharding import layout
from jaxformer.hardware import loss_calls
from jaxformer.losses import token_losses
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, use_build

pytestmark = needs_calls
ROUNDING = np.finfo(np.float32).eps / 2
# Fewer numbers than a register has, some registers and a rest, several blocks, rows of many.
SHAPES = [(3, 5), (2, 40, 1039), (7, 64), (2, 20_011)]


@pytest.fixture(autouse=True)
def known():
    """XLA knows the calls by their names."""
    assert loss_calls.are_known()


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    use_build(request.param, loss_calls, monkeypatch)


def draw(shape, seed=0):
    """Logits, their targets, and a gradient for both results of each row."""
    random = np.random.default_rng(seed)
    logits = np.float32(4 * random.standard_normal(shape))
    targets = random.integers(0, shape[-1], shape[:-1])
    return logits, targets, random.standard_normal((2, *shape[:-1]), np.float32)


def results_and_gradients(logits, targets, gradients):
    """What the calls make, and their gradient with respect to the logits."""
    found, pull = jax.vjp(lambda x: normalizers_and_picked(x, targets), logits)
    return (*found, *pull(tuple(gradients)))


def exact_and_bounds(logits, targets, gradients):
    """The results and the gradient in float64, and how far roundings bring float32 from them.

    To first order: a difference d from the largest logit is off by a rounding of d, which its
    exponential takes as a share of itself, besides two roundings of its own; a sum of n terms is
    within n roundings of itself.
    """
    x, of_normalizer, of_picked = (y.astype(np.float64) for y in (logits, *gradients))
    largest = x.max(-1, keepdims=True)
    powers = np.exp(x - largest)
    sums = powers.sum(-1, keepdims=True)
    weights = powers / sums
    of_power = (np.abs(x - largest) + 2) * ROUNDING
    of_sum = (weights * of_power).sum(-1, keepdims=True) + x.shape[-1] * ROUNDING
    normalizers = largest + np.log(sums)
    bound = of_sum + 2 * ROUNDING * np.log(sums) + ROUNDING * np.abs(normalizers)
    chosen = np.arange(x.shape[-1]) == targets[..., None]
    along = weights * of_normalizer[..., None]
    gradient = along + chosen * of_picked[..., None]
    of_gradient = np.abs(along) * (of_power + of_sum + 3 * ROUNDING) + ROUNDING * np.abs(gradient)
    picked = (x * chosen).sum(-1)
    return [(normalizers[..., 0], bound[..., 0]), (picked, 0 * picked), (gradient, of_gradient)]


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_right_to_rounding(shape):
    arrays = draw(shape)
    expected = exact_and_bounds(*arrays)
    for array, (exact, bound) in zip(results_and_gradients(*arrays), expected, strict=True):
        assert array.shape == exact.shape
        assert np.all(np.abs(np.asarray(array, np.float64) - exact) <= bound)


def test_a_target_that_is_no_class_has_no_gradient_of_its_own():
    """As in ``token_losses`` by XLA: of the nearest class, whose losses a mask leaves out."""
    logits, _, (of_normalizer, of_picked) = draw((3, 50))
    targets = np.array([-1, 50, 7])
    _, picked, gradient = results_and_gradients(logits, targets, (0 * of_normalizer, of_picked))
    np.testing.assert_array_equal(picked, logits[[0, 1, 2], [0, 49, 7]])
    np.testing.assert_array_equal(np.nonzero(gradient), ([2], [7]))


def test_rows_with_infinite_numbers_or_none():
    logits = np.tile(np.linspace(-3, 90, 70, dtype=np.float32), (6, 1))
    logits[1, 3], logits[2, 69], logits[3, 0], logits[4] = -np.inf, np.inf, np.nan, -np.inf
    logits[5, [0, 69]] = np.nan, np.inf
    targets = np.zeros(6, np.int32)
    found, _ = normalizers_and_picked(logits, targets)
    expected = jax.nn.logsumexp(logits, axis=-1)
    np.testing.assert_allclose(found, expected, rtol=70 * ROUNDING)
    gradient = results_and_gradients(logits, targets, np.ones((2, 6), np.float32))[2]
    assert np.isfinite(gradient[:2]).all()
    assert gradient[1, 3] == 0
    assert np.isnan(gradient[2:]).any(-1).all()


@pytest.mark.parametrize("options", [{}, {"z_loss": 1e-3, "label_smoothing": 0.1}], ids=str)
def test_the_loss_takes_them_and_gives_the_same(options):
    logits, targets, (shares, _) = draw((2, 9, FEWEST_CLASSES + 5))

    def loss(logits):
        return jnp.sum(token_losses(logits, targets, **options) * shares)

    expected, of_logits = jax.value_and_grad(loss)(logits)
    with products_of("jaxformer"):
        assert "jaxformer_losses" in str(jax.make_jaxpr(jax.grad(loss))(logits))
        found, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x)))(logits)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, of_logits, atol=1e-6)


def test_logits_that_are_needed_later_stay():
    """Though their gradient is written in their place."""
    logits, targets, _ = draw((40, 3000))

    @jax.jit
    def compiled(half):
        logits = half + half
        normalizers, pull = jax.vjp(lambda x: normalizers_and_picked(x, targets)[0], logits)
        return logits, pull(jnp.ones_like(normalizers))[0]

    found, gradient = compiled(logits / 2)
    np.testing.assert_array_equal(found, logits)
    np.testing.assert_allclose(np.sum(gradient, axis=-1), 1, rtol=1e-5)


def test_many_at_once_end_and_give_the_same_bits():
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    arrays = draw((60, 5003))
    compiled = jax.jit(results_and_gradients)

    def run(number):
        device = jax.devices()[number % 4]
        return [np.asarray(a) for a in compiled(*jax.device_put(arrays, device))]

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, range(100)):
            for array, expected in zip(found, first, strict=True):
                np.testing.assert_array_equal(array, expected)


def test_only_many_classes_in_float32_outside_a_mesh_are_called(monkeypatch):
    logits = jnp.ones((3, FEWEST_CLASSES))
    assert not fits(logits)
    with products_of("jaxformer"):
        assert fits(logits)
        assert not fits(logits[:, 1:])
        assert not fits(logits.astype(jnp.bfloat16))
        with layout(object()):
            assert not fits(logits)
        monkeypatch.setattr(loss_calls, "are_known", lambda: False)
        assert not fits(logits)


def test_the_switch_of_custom_calls_turns_it_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not loss_calls.are_known.__wrapped__()
