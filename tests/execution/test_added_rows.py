"""Rows that are added to each text: the same numbers, and a quick sum as their gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.added_rows import add_to_each
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.execution.sharding import layout

EPS = np.finfo(np.float32).eps / 2


@pytest.mark.parametrize("rows", [1, 5])
def test_the_sum_is_the_same_and_its_gradients_are_right_to_rounding(rows):
    random = np.random.default_rng(0)
    x, dy = random.standard_normal((2, 5, 7, 4), np.float32)
    added = random.standard_normal((rows, 7, 4), np.float32)
    y, back = jax.vjp(jax.jit(add_to_each), x, added)
    np.testing.assert_array_equal(y, x + added)
    of_x, of_added = back(dy)
    np.testing.assert_array_equal(of_x, dy)
    exact = dy.astype(np.float64).sum(0, keepdims=True) if rows == 1 else dy
    bound = len(dy) * EPS * np.abs(dy).sum(0)
    assert np.all(np.abs(of_added - exact) <= bound)


def test_it_is_a_product_on_a_cpu_alone():
    x, rows = jnp.ones((2, 3, 4)), jnp.ones((1, 3, 4))

    def has_product(x):
        # A function of its own each time, as JAX keeps what it has traced.
        traced = jax.make_jaxpr(lambda x, rows: add_to_each(x, rows))
        return "dot_general" in str(traced(x, rows.astype(x.dtype)))

    assert has_product(x)
    assert not has_product(x[:1])
    assert not has_product(x.astype(jnp.bfloat16))
    with layout(object()):
        assert not has_product(x)
    with compiled_for(CompilationTarget("tpu")):
        assert not has_product(x)
