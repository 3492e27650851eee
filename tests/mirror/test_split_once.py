"""A model that is split again is gone through by Flax only if it has changed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer import split_once as once
from jaxformer.config import TransformerLMConfig
from jaxformer.layers import seed_dropout
from jaxformer.narrow_linear import narrow_weights
from jaxformer.parameters import split
from jaxformer.split_once import split_once
from jaxformer.transformer_lm import TransformerLM


@pytest.fixture
def model():
    config = TransformerLMConfig(
        d_model=8, num_heads=2, num_layers=2, context_length=8, vocab_size=11
    )
    return TransformerLM(config, rngs=nnx.Rngs(0))


@pytest.fixture
def times(monkeypatch):
    """How often Flax goes through a model."""
    made = []
    monkeypatch.setattr(once, "split", lambda module: made.append(module) or split(module))
    return made


def check(model):
    (definition, parameters), (expected, arrays) = split_once(model), split(model)
    assert definition == expected
    assert list(parameters) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(parameters[name], array)


def test_a_model_that_stays_is_split_once(model, times):
    for _ in range(3):
        check(model)
    assert len(times) == 1


def test_new_values_are_seen_without_it(model, times):
    check(model)
    kernel = model.blocks[1].attention.q_proj.kernel
    kernel.set_value(kernel[...] + 1)
    check(model)
    model.final_norm.scale[...] = jnp.full(8, 3.0)
    check(model)
    assert len(times) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.eval(),
        lambda model: setattr(model.blocks[0].attention, "scale", 0.3),
        lambda model: setattr(model.blocks[0], "attention", model.blocks[1].attention),
        lambda model: setattr(model.final_norm, "bias", None),
        lambda model: setattr(
            model.final_norm, "scale", nnx.Param(jnp.ones(8, jnp.bfloat16))
        ),
        lambda model: setattr(model, "another", nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    ],
    ids=["mode", "setting", "shared", "removed", "replaced", "added"],
)  # fmt: skip
def test_every_change_is_seen(model, times, change):
    model.train()
    check(model)
    change(model)
    check(model)
    check(model)
    assert len(times) == 2


def test_a_model_with_other_state_is_split_each_time(model, times):
    seed_dropout(model, jax.random.key(0))
    check(model)
    check(model)
    assert len(times) == 2


def test_a_copy_is_another_model(model, times):
    check(model)
    check(narrow_weights(model, "int8"))
    check(model)
    assert len(times) == 2


def test_a_model_is_not_kept(model):
    copy = nnx.clone(model)
    split_once(copy)
    gone, kept = weakref.ref(copy), len(once._known)
    del copy
    gc.collect()
    assert gone() is None
    assert len(once._known) == kept - 1
