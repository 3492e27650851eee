"""A jaxpr evaluated in numpy gives what JAX computes, in the dtypes that it was written in."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from jaxformer.parity.recording.operators.equations import literal
from jaxformer.parity.recording.operators.evaluation import evaluate_in_jax, evaluate_in_numpy
from jaxformer.parity.tolerance import rounding

pytestmark = pytest.mark.usefixtures("float64")

X = np.random.default_rng(0).standard_normal((5, 4))
AT = np.array([3, 0, 3], np.int32)


def normalized(x):
    shifted = x - jnp.mean(x, -1, keepdims=True)
    return shifted * jax.lax.rsqrt(jnp.var(x, -1, keepdims=True) + 1e-5)


def looped(x):
    return jax.lax.scan(lambda carry, row: (carry + row, jnp.tanh(carry)), x[0], x)


def chosen(x):
    return jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), jnp.where(x > 0, x, -1.0)


def looked_up(x):
    return x[jnp.asarray(AT)], jnp.argsort(x, 0), jax.lax.top_k(x, 2), jnp.cumsum(x, 0)


def drawn(x):
    return x * jax.random.normal(jax.random.key(0), x.shape)


FUNCTIONS = {
    "norm": normalized,
    "loop": looped,
    "choice": chosen,
    "lookup": looked_up,
    "random": drawn,
    "product": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "softmax": lambda x: jax.nn.softmax(x.reshape(2, 10), -1),
    "gelu": lambda x: (jax.nn.gelu(x, approximate=False), jax.nn.gelu(x)),
    "nothing": lambda x: (x, 2.0, jnp.arange(3)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_what_jax_computes(name):
    wanted = jax.tree.leaves(jax.jit(FUNCTIONS[name])(X))
    found = evaluate_in_numpy(jax.make_jaxpr(FUNCTIONS[name])(X), [X])
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert isinstance(one, np.ndarray)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert rounding(np.asarray(one, np.float64), np.asarray(other, np.float64)) < 1e-14


# A loop is one operator, which is compiled.
@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - {"loop"}))
def test_by_jax_it_is_rounded_as_jax_rounds_operators(name):
    x = X.astype(np.float32)
    with jax.enable_x64(False):
        traced = jax.make_jaxpr(FUNCTIONS[name])(x)
        with jax.disable_jit():
            wanted = jax.tree.leaves(FUNCTIONS[name](jnp.asarray(x)))
        found = evaluate_in_jax(traced, [x])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)


def test_gradients_are_those_of_jax():
    def pulled(x, direction):
        return jax.vjp(normalized, x)[1](direction)

    (found,) = evaluate_in_numpy(jax.make_jaxpr(pulled)(X, X[::-1]), [X, X[::-1]])
    assert rounding(found, np.asarray(pulled(X, X[::-1])[0])) < 1e-14


def test_a_cast_rounds_as_it_is_written():
    def narrow(x):
        return jnp.exp(x.astype(jnp.float32)).astype(jnp.float64)

    (found,) = evaluate_in_numpy(jax.make_jaxpr(narrow)(X), [X])
    assert np.array_equal(found, found.astype(np.float32))
    assert 1e-9 < rounding(found, np.exp(X)) < 1e-6


def test_nothing_is_compiled(caplog):
    traced = jax.make_jaxpr(normalized)(X)
    with jax.log_compiles():
        evaluate_in_numpy(traced, [X])
    assert not caplog.records


def test_a_value_is_freed_when_it_was_read_last():
    def chain(x):
        for _ in range(20):
            x = jnp.sin(x) + 1.0
        return x

    x = np.ones(1 << 17)
    traced = jax.make_jaxpr(chain)(x)
    tracemalloc.start()
    try:
        evaluate_in_numpy(traced, [x])
        assert tracemalloc.get_traced_memory()[1] < 4 * x.nbytes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_a_number_in_a_narrow_dtype_is_the_decimal_that_was_written(dtype):
    jaxpr = jax.make_jaxpr(lambda x: x + 1e-5)(jnp.zeros(3, dtype))
    (written,) = (atom for atom in jaxpr.jaxpr.eqns[0].invars if isinstance(atom, Literal))
    assert literal(written) == 1e-5
    for number in (0.0, -np.inf, 3.0, 0.1, 12345.0):
        jaxpr = jax.make_jaxpr(lambda x, n=number: x + n)(jnp.zeros(3, jnp.bfloat16))
        (written,) = (atom for atom in jaxpr.jaxpr.eqns[0].invars if isinstance(atom, Literal))
        assert np.asarray(literal(written), jnp.bfloat16) == jnp.bfloat16(number)
