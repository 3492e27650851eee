"""Custom calls that write a result in place of an argument: what is needed later stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.execution.called_activations import gelu
from jaxformer.execution.called_attention import attention
from jaxformer.execution.called_norms import norm
from jaxformer.hardware import activation_calls, attention_call, norm_calls
from tests.hardware.test_custom_calls import needs_calls

pytestmark = needs_calls
SHAPE = (2, 70, 4, 32)
OTHER = np.random.default_rng(1).standard_normal(SHAPE, np.float32)


def layer_norm(x):
    return norm(x, None, None, eps=1e-5, centres=True)


# Each is given what its call writes over.
CALLS = {
    "gelu": gelu,
    "gelu and its slope": lambda x: jax.vjp(gelu, x)[0],
    "gradient of gelu": lambda dy: jax.vjp(gelu, OTHER)[1](dy)[0],
    "gradient of a norm": lambda dy: jax.vjp(layer_norm, OTHER)[1](dy)[0],
    "attention": lambda q: attention(q, OTHER, OTHER, scale=0.2, causal=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_argument_that_is_needed_later_stays(name):
    assert activation_calls.are_known()
    assert norm_calls.are_known()
    assert attention_call.is_known()
    call, half = CALLS[name], np.random.default_rng(0).standard_normal(SHAPE, np.float32)
    expected = jax.jit(lambda half: call(half + half))(half)
    # Of what a program computes itself, XLA may give the memory away.
    x, found = jax.jit(lambda half: (half + half, call(half + half)))(half)
    np.testing.assert_array_equal(x, half + half)
    np.testing.assert_array_equal(found, expected)
    # Alone it is given what its caller has.
    given = jnp.asarray(half + half)
    np.testing.assert_array_equal(jax.jit(call)(given), expected)
    np.testing.assert_array_equal(given, half + half)
