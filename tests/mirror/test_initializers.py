"""Weights are the same however they are drawn; for shapes alone, nothing is drawn."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.initializers import normal, uniform
from jaxformer.parameters import abstract, abstract_module, split
from jaxformer.transformer_lm import TransformerLM

SHAPES = [(), (0, 3), (5,), (7, 11), (64, 64), (65, 63), (3, 1025, 2), (1025, 1024)]
CONFIG = TransformerLMConfig(
    vocab_size=13, context_length=7, num_layers=2, d_model=8, num_heads=2, positions="learned"
)


DRAWS = {
    "normal": (normal(0.02), lambda key, shape: 0.02 * jax.random.normal(key, shape)),
    "uniform": (
        uniform(0.3),
        lambda key, shape: jax.random.uniform(key, shape, minval=-0.3, maxval=0.3),
    ),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_the_numbers_of_a_shape_are_those_that_jax_draws_for_it(name, shape):
    init, draw = DRAWS[name]
    found, expected = init(jax.random.key(5), shape), draw(jax.random.key(5), shape)
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    assert np.array_equal(found, expected)


def test_a_module_of_shapes_is_that_of_the_weights_and_nothing_is_drawn(monkeypatch):
    definition, parameters = split(TransformerLM(CONFIG, rngs=nnx.Rngs(0)))
    monkeypatch.setattr(jax.random, "uniform", pytest.fail)
    monkeypatch.setattr(jax.random, "normal", pytest.fail)
    same, shapes = abstract(lambda rngs: TransformerLM(CONFIG, rngs=rngs))
    assert same == definition
    assert {n: (s.shape, s.dtype) for n, s in shapes.items()} == {
        n: (p.shape, p.dtype) for n, p in parameters.items()
    }
    module = abstract_module(lambda rngs: TransformerLM(CONFIG, rngs=rngs))
    assert isinstance(module.blocks[0].attention.q_proj.kernel.get_value(), jax.ShapeDtypeStruct)
