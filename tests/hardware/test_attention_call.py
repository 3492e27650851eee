"""Attention as a custom call: right, always the same, and taken only where it may be."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.attention_core import scaled_dot_product_attention
from jaxformer.execution import called_attention
from jaxformer.execution.attention_backends import attention_kernel
from jaxformer.execution.called_attention import attention, without_gradients
from jaxformer.execution.called_products import products_of
from jaxformer.execution.fused_attention import try_fused_attention
from jaxformer.execution.sharding import layout
from jaxformer.hardware import attention_call, custom_calls
from jaxformer.hardware.attention_call import (
    ATTENTION,
    ATTENTION_AND_MOMENTS,
    ATTENTION_BACK,
    BACK_NAME,
    FORWARD,
    NAME,
)
from jaxformer.hardware.custom_call_builds import UnavailableError, fast_options
from jaxformer.layers import Dropout
from jaxformer.masks import causal_mask
from tests.support.narrow_calls import BUILDS, register_narrow

try:
    for name in (NAME, BACK_NAME):
        custom_calls.load(name, fast_options(name))
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
    (1, 200, 420, 2, 1, 16),
]
EPS = np.finfo(np.float32).eps / 2


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    if request.param == "narrower registers":
        register_narrow(NAME, FORWARD)
        register_narrow(BACK_NAME, [ATTENTION_BACK])
        attention_call.is_known()  # once, by their own names
        for name in ("ATTENTION", "ATTENTION_AND_MOMENTS", "ATTENTION_BACK"):
            monkeypatch.setattr(attention_call, name, f"narrow_{getattr(attention_call, name)}")


class Exact:
    """Attention and its gradients in float64, and how far float32 may be from them.

    To first order: scores that err by at most d change a weight w by 2 d w. A score of a head of
    width H is within H + 1 roundings of the sum of absolute products, an exponential within two of
    itself, and sums of S terms within S.
    """

    def __init__(self, q, k, v, *, scale, causal, window):
        heads, self.key_heads = q.shape[2], k.shape[2]
        self.q, self.scale = q.astype(np.float64), scale
        self.k, self.v = (
            np.repeat(x, heads // self.key_heads, axis=2).astype(np.float64) for x in (k, v)
        )
        query, key = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])
        self.seen = (key <= query) | (not causal)
        if window is not None:
            self.seen &= (key < query + window) & (key > query - window)
        scores = np.where(self.seen, scale * self.per_pair(self.q, self.k), -np.inf)
        largest = np.where(self.seen.any(-1), scores.max(-1), 0)
        powers = np.exp(scores - largest[..., None])
        self.weights = powers / np.maximum(powers.sum(-1, keepdims=True), np.finfo(float).tiny)
        absolute = np.where(self.seen, self.per_pair(abs(self.q), abs(self.k)), 0)
        self.relative = 2 * self.roundings(1) * scale * absolute.max(-1, keepdims=True)
        self.relative = self.relative + (2 * k.shape[1] + 8) * EPS
        self.out = self.per_query(self.weights, self.v)
        self.out_bound = self.per_query(self.relative * self.weights, abs(self.v))

    def roundings(self, more):
        return (self.q.shape[-1] + more) * EPS

    def per_pair(self, x, y):
        return np.einsum("btnh,bsnh->bnts", x, y)

    def per_query(self, x, y):
        return np.einsum("bnts,bsnh->btnh", x, y)

    def per_key(self, x, y):
        """Sums over the queries, and the heads that share a key."""
        of_heads = np.einsum("bnts,btnh->bsnh", x, y)
        return of_heads.reshape(*of_heads.shape[:2], self.key_heads, -1, of_heads.shape[-1]).sum(3)

    def gradients(self, dout):
        """Those of queries, keys and values, each with its bound."""
        dout = dout.astype(np.float64)
        of_weights = self.per_pair(dout, self.v)
        shared = np.einsum("btnh,btnh->bnt", dout, self.out)[..., None]
        of_scores = self.scale * self.weights * (of_weights - shared)
        size = self.roundings(4) * self.per_pair(abs(dout), abs(self.v))
        of_out = abs(self.out_bound) + self.roundings(4) * abs(self.out)
        size = size + np.einsum("btnh,btnh->bnt", abs(dout), of_out)[..., None]
        error = self.relative * abs(of_scores) + self.scale * self.weights * size
        # Sums over keys, or over the queries of all heads that share a key.
        terms = (max(self.seen.shape) * self.q.shape[2] // self.key_heads + 2) * EPS
        error = error + terms * abs(of_scores)
        of_v = (self.relative + terms) * self.weights
        return (
            (self.per_query(of_scores, self.k), self.per_query(error, abs(self.k))),
            (self.per_key(of_scores, self.q), self.per_key(error, abs(self.q))),
            (self.per_key(self.weights, dout), self.per_key(of_v, abs(dout))),
        )


@needs_compiler
@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("window", [None, 1, 5, 70])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_and_its_gradients_are_right_to_rounding(shape, causal, window):
    """Beside float64, within derived bounds; and the two passes forward give the same bits."""
    batch, queries, keys, heads, key_heads, width = shape
    random, rule = np.random.default_rng(0), {"scale": 0.3, "causal": causal, "window": window}
    q, dout = random.standard_normal((2, batch, queries, heads, width), np.float32)
    k, v = random.standard_normal((2, batch, keys, key_heads, width), np.float32)

    # Arguments of compiled functions, or XLA computes them beforehand.
    found = np.asarray(jax.jit(lambda q, k, v: attention(q, k, v, **rule))(q, k, v))

    @jax.jit
    def forward_and_back(q, k, v, dout):
        out, back = jax.vjp(lambda *x: attention(*x, **rule), q, k, v)
        return out, back(dout)

    out, gradients = forward_and_back(q, k, v, dout)
    exact = Exact(q, k, v, **rule)
    assert np.all(np.abs(found - exact.out) <= exact.out_bound)
    assert not np.any(found[:, ~exact.seen.any(-1)])
    np.testing.assert_array_equal(out, found)
    for gradient, (right, bound) in zip(gradients, exact.gradients(dout), strict=True):
        assert np.all(np.abs(np.asarray(gradient, np.float64) - right) <= bound)
    for gradient in gradients[1:]:
        assert not np.any(np.asarray(gradient)[:, ~exact.seen.any(0)])


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
def test_gradients_are_no_numbers_where_those_of_the_core_are_none():
    arrays = np.random.default_rng(0).standard_normal((4, 1, 70, 2, 16), np.float32)
    q, k, v, dout = arrays
    dout[0, 3, 0, 1], k[0, 40, 1, 2] = np.nan, np.inf

    def gradients(attend):
        return jax.jit(lambda *x: jax.vjp(attend, *x)[1](dout))(q, k, v)

    def core(q, k, v):
        return scaled_dot_product_attention(q, k, v, mask=causal_mask(70), scale=1)[0]

    found = gradients(lambda *x: attention(*x, scale=1, causal=True))
    for gradient, of_core in zip(map(np.isnan, found), map(np.isnan, gradients(core)), strict=True):
        assert gradient.any()
        assert not np.any(gradient & ~of_core)
    assert np.isnan(found[2])[0, :4, 0, 1].all()


@needs_compiler
def test_many_at_once_end_and_give_the_same_bits():
    """From several threads, on several devices, each with blocks for all threads of the pool."""
    arrays = np.random.default_rng(0).standard_normal((4, 2, 200, 4, 32), np.float32)

    @jax.jit
    def compiled(q, k, v, dout):
        out, back = jax.vjp(lambda *x: attention(*x, scale=1, causal=True), q, k, v)
        return jnp.stack([out, *back(dout)])

    def run(number):
        return np.asarray(compiled(*jax.device_put(list(arrays), jax.devices()[number % 4])))

    first = run(0)
    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, range(200)):
            np.testing.assert_array_equal(found, first)


def attend(q, k=None, v=None, **settings):
    """What a model's attention makes of queries that are keys and values too, causally."""
    settings = {"bias": None, "scale": 1.0, "soft_cap": None, "weights": False} | settings
    settings = {"dropout": Dropout(0.0)} | settings
    k, v = q if k is None else k, q if v is None else v
    return try_fused_attention(q, k, v, mask=causal_mask(q.shape[1]), **settings)


@needs_compiler
def test_the_call_is_taken_only_where_it_fits():
    x = jnp.ones((1, 128, 2, 16))
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


@needs_compiler
def test_with_gradients_it_is_taken_where_products_are_called(monkeypatch):
    """It makes no masks of dropout, and a core makes the gradients of a whole head of keys."""
    monkeypatch.setattr(called_attention, "count_cores", lambda: 4)
    x = jnp.ones((2, 128, 2, 16))

    def is_called(x):
        found = str(jax.make_jaxpr(jax.grad(lambda x: attend(x).sum()))(x))
        return ATTENTION_AND_MOMENTS in found and ATTENTION_BACK in found

    with products_of("jaxformer"):
        assert is_called(x)
        assert attend(x[:1]) is None
        assert attend(x, dropout=Dropout(0.1)) is None
        with layout(object()):
            assert attend(x) is None
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
