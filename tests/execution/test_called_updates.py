"""AdamW and sums of squares as custom calls: within rounding of the formulas, always the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.config import OptimizerConfig
from jaxformer.execution.called_products import products_of
from jaxformer.execution.called_updates import Moments, adamw, fits, sum_squares
from jaxformer.execution.sharding import layout
from jaxformer.hardware import update_calls
from jaxformer.optimizers import global_norm, make_optimizer, update_parameters
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, use_build

pytestmark = needs_calls
ROUNDING = np.finfo(np.float32).eps / 2
# A number, none, less than a register and more, a whole block, and blocks with a rest.
SHAPES = {
    "one": (), "none": (0, 3), "few.kernel": (5, 1), "some.scale": (3, 37),
    "block.kernel": (128, 128), "rest.kernel": (129, 300),
}  # fmt: skip
CONFIG = OptimizerConfig(beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.2, clip_norm=0.5)


@pytest.fixture(autouse=True)
def known():
    """XLA knows the calls by their names."""
    assert update_calls.are_known()


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    use_build(request.param, update_calls, monkeypatch)


def draw(seed):
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}


def after_some_updates():
    """Parameters, gradients and moments."""
    return draw(0), draw(1), Moments(draw(2), {n: np.square(x) for n, x in draw(3).items()})


def update(parameters, gradients, moments, **changes):
    settings = {
        "decays": dict.fromkeys(SHAPES, 0.1) | {"some.scale": 0.0},
        "changing": (jnp.float32(0.3), jnp.float32(0.02), jnp.int32(7)),
        "betas": (0.9, 0.99),
        "eps": 1e-6,
    }
    call = jax.jit(lambda *arrays: adamw(*arrays, **settings | changes))
    return call(parameters, gradients, moments)


@pytest.mark.usefixtures("built")
def test_an_update_is_that_of_the_formula():
    before = after_some_updates()
    x, (mu, nu) = update(*before)
    parameters, gradients, moments = before
    for name in SHAPES:
        p, g, m, v = (np.float64(a[name]) for a in (parameters, gradients, moments.mu, moments.nu))
        g = np.float64(np.float32(0.3)) * g
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        step = m / (1 - 0.9**7) / (np.sqrt(v / (1 - 0.99**7)) + 1e-6)
        decay = 0.0 if name == "some.scale" else 0.1
        # Moments are sums of two products of at most three factors, all rounded. The step has a
        # root, which halves what its argument has, a quotient, and factors that are made of powers.
        of_mu = 6 * ROUNDING * (0.9 * abs(moments.mu[name]) + 0.1 * abs(g))
        assert np.all(abs(mu[name] - m) <= of_mu), name
        np.testing.assert_allclose(nu[name], v, rtol=8 * ROUNDING, atol=0, err_msg=name)
        of_step = abs(step) * (of_mu / abs(m) + 24 * ROUNDING) + 4 * ROUNDING * abs(decay * p)
        expected = p - 0.02 * (step + decay * p)
        bound = 0.02 * of_step + 3 * ROUNDING * (abs(p) + 0.02 * abs(step + decay * p))
        assert np.all(abs(x[name] - expected) <= bound), name


@pytest.mark.usefixtures("built")
def test_the_sum_of_squares_is_within_rounding():
    arrays = draw(4)
    exact = sum(np.square(np.float64(x)).sum() for x in arrays.values())
    found = jax.jit(sum_squares)(arrays)
    # Of a block each of 64 sums has 256 terms; the blocks are summed in float64.
    assert abs(found - exact) <= 270 * ROUNDING * exact


def test_nothing_changes_where_it_is_not_wanted():
    before = after_some_updates()
    changed = update(*before, is_wanted=jnp.bool_(False))
    jax.tree.map(np.testing.assert_array_equal, changed, (before[0], before[2]))


def test_what_is_needed_later_stays():
    before = jax.tree.map(jnp.asarray, after_some_updates())
    given = jax.tree.map(np.asarray, before)

    @jax.jit
    def both(parameters, gradients, moments):
        doubled = jax.tree.map(lambda x: x + x, parameters)
        settings = {"decays": dict.fromkeys(SHAPES, 0.0), "betas": (0.9, 0.9), "eps": 1e-6}
        changing = (jnp.float32(1), jnp.float32(1), jnp.int32(1))
        return doubled, adamw(doubled, gradients, moments, changing=changing, **settings)[0]

    doubled, changed = both(*before)
    for name, x in given[0].items():
        np.testing.assert_array_equal(doubled[name], x + x)
        assert x.size == 0 or not np.array_equal(changed[name], x + x)
    jax.tree.map(np.testing.assert_array_equal, before, given)


def test_many_numbers_are_the_same_on_several_threads():
    random = np.random.default_rng(0)
    arrays = [{"x": random.standard_normal(3_000_001, np.float32)} for _ in range(3)]
    parameters, gradients, mu = arrays
    moments = Moments(mu, {"x": np.square(mu["x"])})
    decays = {"x": 0.1}
    x, _ = update(parameters, gradients, moments, decays=decays)
    tail = {"x": slice(2_999_990, None)}
    cut = jax.tree.map(lambda x: x[tail["x"]], (parameters, gradients, moments))
    of_tail, _ = update(*cut, decays=decays)
    np.testing.assert_array_equal(x["x"][tail["x"]], of_tail["x"])
    assert len({float(jax.jit(sum_squares)(gradients)) for _ in range(5)}) == 1


@pytest.mark.usefixtures("built")
def test_it_rounds_at_most_twice_as_much_as_torch():
    drawn = {name: x for name, x in draw(0).items() if x.size}
    settings = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}

    def by_torch(dtype):
        parameters = {name: torch.from_numpy(x.astype(dtype)) for name, x in drawn.items()}
        optimizer = torch.optim.AdamW(parameters.values(), **settings)
        for step in range(10):
            for name, x in parameters.items():
                x.grad = torch.from_numpy(draw(step + 1)[name].astype(dtype))
            optimizer.step()
        return {name: x.numpy() for name, x in parameters.items()}

    zeros = jax.tree.map(np.zeros_like, drawn)
    found, moments = drawn, Moments(zeros, zeros)
    for step in range(10):
        gradients = {name: draw(step + 1)[name] for name in drawn}
        changing = (jnp.float32(1), jnp.float32(settings["lr"]), jnp.int32(step + 1))
        found, moments = update(
            found, gradients, moments, changing=changing, eps=1e-8, decays=dict.fromkeys(drawn, 0.1)
        )
    exact, torchs = by_torch(np.float64), by_torch(np.float32)
    errors, of_torch = (
        max(np.abs(arrays[name] - x).max() for name, x in exact.items())
        for arrays in (found, torchs)
    )
    assert 0 < errors <= 2 * of_torch


@pytest.mark.parametrize("clip_norm", [0.5, None])
def test_an_update_is_that_of_xla(clip_norm):
    config = dataclasses.replace(CONFIG, clip_norm=clip_norm)
    parameters = {name: x for name, x in draw(0).items() if x.size}
    found = expected = (
        parameters,
        make_optimizer(config).init(jax.tree.map(jnp.asarray, parameters)),
    )

    def make(state, gradients, is_wanted):
        norm = global_norm(gradients)
        changed = update_parameters(
            config, state[0], gradients, state[1], norm=norm, is_wanted=is_wanted
        )
        return norm, changed

    def trace():
        return str(jax.make_jaxpr(lambda *given: make(*given))(found, parameters, True))

    with products_of("jaxformer"):
        assert "jaxformer_adamw" in trace()
    assert "jaxformer" not in trace()
    by_xla, by_call = jax.jit(make), jax.jit(lambda *arguments: make(*arguments))
    for number, is_wanted in enumerate([True, True, False, True]):
        gradients = {name: x for name, x in draw(10 + number).items() if x.size}
        norm, expected = by_xla(expected, gradients, jnp.bool_(is_wanted))
        with products_of("jaxformer"):
            of_call, found = by_call(found, gradients, jnp.bool_(is_wanted))
        np.testing.assert_allclose(of_call, norm, rtol=1e-5)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    # XLA adds up 55,000 squares in float32: the norms are as close as was just checked, and so are
    # all clipped gradients, and the roundings of four updates are far less than that.
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    counts = [x for x in jax.tree.leaves(found[1]) if x.dtype == jnp.int32]
    assert counts == [3, 3]


def test_xla_updates_what_the_call_does_not(monkeypatch):
    arrays = {"a": jnp.ones(8), "b": jnp.ones(8)}
    assert not fits(arrays)
    with products_of("jaxformer"):
        assert fits(arrays)
        assert not fits({})
        assert not fits(arrays | {"b": jnp.ones(8, jnp.bfloat16)})
        with layout(object()):
            assert not fits(arrays)
        for changes in ({"ema": 0.9}, {"optimizer": "lion"}, {"optimizer": "muon"}):
            config = dataclasses.replace(CONFIG, **changes)
            state = make_optimizer(config).init(arrays)

            def make(config=config, state=state):
                return update_parameters(config, arrays, arrays, state, norm=jnp.float32(1))

            assert "jaxformer_adamw" not in str(jax.make_jaxpr(make)())
        monkeypatch.setattr(update_calls, "are_known", lambda: False)
        assert not fits(arrays)


def test_the_switch_of_custom_calls_turns_them_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not update_calls.are_known.__wrapped__()
