"""Each operator has its line of the user's code, also where a library calls that code."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parity.recording.operators.candidates import as_candidate
from jaxformer.parity.recording.operators.jax_run import JaxRun
from jaxformer.parity.recording.operators.tape import Tape

WIDTH = 4


class Layer(nn.Module):
    """Has its tanh in a line of its own."""

    @nn.compact
    def __call__(self, x, _):
        h = nn.Dense(WIDTH)(x)
        h = jnp.tanh(h)
        return x + h, None


class Scanned(nn.Module):
    """The layers are steps of one loop."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0}, {"params": True}
        return nn.scan(Layer, variable_axes=axes, split_rngs=rngs, length=2)()(x, None)[0]


class Remade(nn.Module):
    """The same, and what a layer computes is computed again for the gradients."""

    @nn.compact
    def __call__(self, x):
        axes, rngs = {"params": 0}, {"params": True}
        layer = nn.remat(Layer)
        return nn.scan(layer, variable_axes=axes, split_rngs=rngs, length=2)()(x, None)[0]


class Jitted(nn.Module):
    """Each layer is compiled by itself."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x, _ = nn.jit(Layer)()(x, None)
        return x


@eqx.filter_jit
def filtered(params, x):
    h = jnp.tanh(x @ params)
    return x + h


def cached(params, x):
    # The jaxpr of ``jax.nn.silu`` comes from a cache the second time.
    first = jax.nn.silu(x @ params)
    return jax.nn.silu(first)


X = np.ones((3, WIDTH), np.float32)


def of_linen(module):
    return module, module.init(jax.random.key(0), X)


@pytest.mark.parametrize(
    ("candidate", "operator", "lines"),
    [
        (of_linen(Scanned()), "tanh", ["h = jnp.tanh(h)"] * 2),
        (of_linen(Remade()), "tanh", ["h = jnp.tanh(h)"] * 2),
        (of_linen(Jitted()), "tanh", ["h = jnp.tanh(h)"] * 2),
        ((filtered, np.eye(WIDTH)), "tanh", ["h = jnp.tanh(x @ params)"]),
        (
            (cached, np.eye(WIDTH)),
            "logistic",
            ["first = jax.nn.silu(x @ params)", "return jax.nn.silu(first)"],
        ),
    ],
)
def test_operators_inside_of_a_library_have_their_lines(candidate, operator, lines):
    tape = Tape()
    JaxRun(as_candidate(candidate), [X], {}, tape, {})
    with open(__file__) as file:
        code = file.read().splitlines()
    sources = [step.source for step in tape.operators if step.name == operator]
    assert [code[int(source.rpartition(":")[2]) - 1].strip() for source in sources] == lines
