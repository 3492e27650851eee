"""Attention as a custom call: right, always the same, and taken only where it may be."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention_core import scaled_dot_product_attention
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.called_attention import attention, without_gradients
from jaxformer.execution.fused_attention import try_fused_attention
from jaxformer.execution.sharding import layout
from jaxformer.hardware import attention_call, custom_calls
from jaxformer.hardware.attention_call import ATTENTION, NAME
from jaxformer.hardware.custom_calls import FAST_OPTIONS, UnavailableError
from jaxformer.layers import Dropout
from jaxformer.masks import causal_mask
from tests.support.narrow_calls import BUILDS, register_narrow

try:
    custom_calls.load(NAME, FAST_OPTIONS)
    MISSING = ""
except UnavailableError as error:
    MISSING = str(error)
    if "cannot build" in MISSING:  # a compiler that fails is an error of the source
        raise

needs_compiler = pytest.mark.skipif(bool(MISSING), reason=f"custom calls: {MISSING}")

# Texts, queries, keys, heads of queries and of keys, width: blocks cut short, a query too many.
SHAPES = [
    (2, 130, 130, 4, 2, 16),
    (1, 33, 100, 3, 1, 48),
    (3, 100, 33, 2, 2, 64),
    (1, 1, 9, 2, 1, 80),
]


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom call, and that for registers of half the width, which this processor has too."""
    if request.param == "narrower registers":
        register_narrow(NAME, [ATTENTION])
        attention_call.is_known()  # once, by its own name
        monkeypatch.setattr(attention_call, "ATTENTION", f"narrow_{ATTENTION}")


@needs_compiler
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_right_to_rounding(shape, causal, window):
    """Beside float64, to first order: scores that err by at most d change a weight w by 2 d w.

    A score of a head of width H is within H + 1 roundings of the sum of absolute products, an
    exponential within two of itself, and sums of S terms within S.
    """
    batch, queries, keys, heads, key_heads, width = shape
    random, scale = np.random.default_rng(0), 0.3
    q = random.standard_normal((batch, queries, heads, width), np.float32)
    k, v = random.standard_normal((2, batch, keys, key_heads, width), np.float32)

    @jax.jit
    def compiled(q, k, v):
        return attention(q, k, v, scale=scale, causal=causal, window=window)

    found = np.asarray(compiled(q, k, v), np.float64)
    query, key = np.arange(queries)[:, None], np.arange(keys)
    seen = (key <= query) | (not causal)
    if window is not None:
        seen &= (key < query + window) & (key > query - window)
    k, v = (np.repeat(x, heads // key_heads, axis=2).astype(np.float64) for x in (k, v))

    def products(q, k):
        return scale * np.einsum("btnh,bsnh->bnts", q, k)

    exact = np.where(seen, products(q.astype(np.float64), k), -np.inf)
    powers = np.exp(exact - np.where(seen.any(-1), exact.max(-1), 0)[..., None])
    weights = powers / np.maximum(powers.sum(-1, keepdims=True), np.finfo(float).tiny)
    eps = np.finfo(np.float32).eps / 2
    of_scores = (width + 1) * eps * np.where(seen, products(np.abs(q), np.abs(k)), 0)
    relative = 2 * of_scores.max(-1, keepdims=True) + (2 * keys + 8) * eps
    bound = np.einsum("bnts,bsnh->btnh", relative * weights, np.abs(v))
    assert np.all(np.abs(found - np.einsum("bnts,bsnh->btnh", weights, v)) <= bound)
    assert not np.any(found[:, ~seen.any(-1)])


@needs_compiler
def test_attention_has_no_number_where_it_sees_none():
    """The core has none for other queries of a block either, as zero times no number is none."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 70, 2, 16), np.float32)
    q[0, 3, 0, 1], k[0, 40, 1, 2], v[0, 60, 0, 5] = np.nan, np.inf, np.nan
    found = np.isnan(jax.jit(lambda *x: attention(*x, scale=1, causal=True))(q, k, v))
    core, _ = scaled_dot_product_attention(q, k, v, mask=causal_mask(70), scale=1)
    assert found[0, 3, 0].all()
    assert found[0, 60:, 0, 5].all()
    np.testing.assert_array_equal(found[0, 40:, 1], np.isnan(core)[0, 40:, 1])
    assert found[0, 40:, 1].any()
    assert not np.any(found & ~np.isnan(core))


@needs_compiler
def test_many_at_once_end_and_give_the_same_bits():
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    arrays = np.random.default_rng(0).standard_normal((3, 2, 200, 4, 32), np.float32)
    compiled = jax.jit(lambda *x: attention(*x, scale=1, causal=True))

    def run(number):
        return np.asarray(compiled(*jax.device_put(list(arrays), jax.devices()[number % 4])))

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, range(200)):
            np.testing.assert_array_equal(found, first)


@needs_compiler
def test_the_call_is_taken_only_where_it_fits_and_no_gradient_is_needed():
    x = jnp.ones((1, 128, 2, 16))
    mask = causal_mask(128)

    def attend(q, k=None, v=None, **settings):
        settings = {"bias": None, "scale": 1.0, "soft_cap": None, "weights": False} | settings
        k, v = q if k is None else k, q if v is None else v
        return try_fused_attention(q, k, v, mask=mask, dropout=Dropout(0.0), **settings)

    assert attend(x) is None
    with without_gradients():
        assert ATTENTION in str(jax.make_jaxpr(attend)(x))
        np.testing.assert_allclose(attend(x), x, rtol=1e-6)
        assert attend(x, soft_cap=2.0) is None
        assert attend(x, weights=True) is None
        assert attend(x, bias=jnp.zeros((1, 2, 128, 128))) is None
        assert attend(x.astype(jnp.bfloat16)) is None
        assert attend(x, v=x[..., :8]) is None
        assert attend(x[..., :8]) is None
        with attention_kernel("plain"):
            assert attend(x) is None
        with layout(object()):
            assert attend(x) is None


def test_without_a_compiler_the_core_computes_it(monkeypatch):
    monkeypatch.setattr(attention_call, "is_known", lambda: False)
    x = jnp.ones((1, 8, 2, 16))
    with without_gradients():
        assert (
            try_fused_attention(
                x, x, x, mask=None, bias=None, scale=1.0, soft_cap=None, dropout=Dropout(0.0),
                weights=False,
            )
            is None
        )  # fmt: skip
    with pytest.raises(RuntimeError, match="there is no C compiler"):
        attention(x, x, x, scale=1.0, causal=True)


def test_the_switch_of_custom_calls_turns_it_off(monkeypatch):
    monkeypatch.setenv("JAXFORMER_CUSTOM_CALLS", "off")
    assert not attention_call.is_known.__wrapped__()
