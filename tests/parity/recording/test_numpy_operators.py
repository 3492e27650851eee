"""What is computed in numpy in place of JAX is the same, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parity.recording.operators.equations import function_of

X = np.random.default_rng(0).normal(size=(4, 6))
NUMBERS = np.arange(5, dtype=np.int32) * 2**29


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (lambda x: jnp.unstack(x, axis=1), [X]),
        (lambda x: jnp.split(x, [1, 3], -1), [X]),
        (lambda x: jax.lax.pad(x, 2.5, ((1, 2, 0), (0, 3, 2))), [X]),
        (lambda x: jax.lax.pad(x, 2.5, ((1, -2, 0), (0, 3, 1))), [X]),
        (jax.lax.complex, [X, X[::-1]]),
        (lambda z: (z.real, z.imag, z * z, z + z, -z, z - 2 * z), [X + 1j * X[::-1]]),
        (lambda x, i: jax.lax.dynamic_slice(x, (i, i), (2, 3)), [X, np.int32(5)]),
        (lambda x, i: jax.lax.dynamic_update_slice(x, x[:2, :3], (i, i)), [X, np.int32(2)]),
        (jnp.dot, [X[0], X[1]]),
        (lambda n: (n * n, n + n, n - 1, -n), [NUMBERS]),
    ],
)
def test_it_is_what_jax_computes(function, arguments):
    with jax.enable_x64(True):
        jaxpr = jax.make_jaxpr(function)(*arguments).jaxpr
        known = dict(zip(jaxpr.invars, arguments, strict=True))
        for equation in jaxpr.eqns:
            read = [np.asarray(a.val) if hasattr(a, "val") else known[a] for a in equation.invars]
            made = function_of(equation)(*read)
            right = equation.primitive.bind(*map(jnp.asarray, read), **equation.params)
            right = right if equation.primitive.multiple_results else [right]
            for atom, one, other in zip(equation.outvars, made, right, strict=True):
                assert one.dtype == other.dtype
                np.testing.assert_array_equal(one, other)
                known[atom] = one
