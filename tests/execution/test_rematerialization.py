"""What is computed again instead of kept: the same numbers, in less memory."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.blocks import self_attention_mask
from jaxformer.config import TransformerLMConfig
from jaxformer.execution.called_products import products_of
from jaxformer.execution.rematerialization import rematerialization, rematerialize
from jaxformer.layers import seed_dropout
from jaxformer.parameters import abstract, merge, split
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

CONFIG = TransformerLMConfig(
    d_model=24, num_heads=3, num_layers=3, context_length=40, vocab_size=31, residual_dropout=0.2,
    attention_dropout=0.1, positions="rotary", activation="swiglu",
)  # fmt: skip


def make_loss(definition, choice):
    """A loss through all blocks, each computed again as ``choice`` says."""

    def loss(parameters, x_BTD):
        model = merge(definition, parameters)
        model.train()
        seed_dropout(model, jax.random.key(0))
        length = x_BTD.shape[1]
        mask = self_attention_mask(length, length, causal=True, window=None)
        with rematerialization(choice):
            for block in model.blocks:
                x_BTD = rematerialize(functools.partial(block, positions=None))(x_BTD, mask)
        return jnp.mean(jnp.square(model.final_norm(x_BTD)[..., 0]))

    return loss


def gradient(definition, choice):
    return jax.jit(jax.value_and_grad(make_loss(definition, choice)))


@pytest.mark.parametrize("choice", full_after(1, ["dots", "full"]))
@pytest.mark.tier("full")
def test_the_numbers_are_the_same(choice):
    """In float64, dropout included: what is computed again differs by rounding, if at all."""
    with jax.enable_x64(True):
        definition, parameters = split(TransformerLM(CONFIG, rngs=nnx.Rngs(0)))
        parameters = {n: jnp.asarray(p, jnp.float64) for n, p in parameters.items()}
        x = jax.random.normal(jax.random.key(1), (2, 40, 24), jnp.float64)
        loss, gradients = gradient(definition, "none")(parameters, x)
        again, same = gradient(definition, choice)(parameters, x)
        np.testing.assert_allclose(again, loss, rtol=1e-12)
        largest = max(float(jnp.max(jnp.abs(g))) for g in gradients.values())
        for name, array in gradients.items():
            np.testing.assert_allclose(same[name], array, rtol=0, atol=1e-12 * largest)


@pytest.mark.parametrize("products", [None, "jaxformer"])
def test_less_is_kept(products):
    """What is carried from the forward pass to the backward one, in bytes."""
    config = dataclasses.replace(CONFIG, context_length=256)
    definition, parameters = abstract(lambda rngs: TransformerLM(config, rngs=rngs))
    batch, length = 4, 256
    x = jax.ShapeDtypeStruct((batch, length, config.d_model), jnp.float32)

    def kept(choice):
        loss = make_loss(definition, choice)
        with products_of(products):
            backward = jax.eval_shape(lambda p, x: jax.vjp(loss, p, x)[1], parameters, x)
        return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(backward))

    none, dots, full = (kept(choice) for choice in ("none", "dots", "full"))
    weights = 4 * config.num_layers * config.attention.num_heads * batch * length**2
    streams = 4 * config.num_layers * batch * length * config.d_model
    # The parameters, and the mask.
    own = 4 * sum(p.size for p in parameters.values()) + length**2
    assert none > weights
    # Of each layer q, k, v, o, down, twice up, and the input.
    d_ff = config.feed_forward_width
    assert dots < 6 * streams + 2 * streams * d_ff / config.d_model + 2 * own
    assert full < 2 * streams + 2 * own < dots


def test_an_unknown_choice_is_refused():
    with pytest.raises(ValueError, match="remat must be one of none, dots, full: got 'some'"):
        rematerialization("some").__enter__()
