"""The loss with a part of the logits at a time: the same numbers in less memory."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.losses import token_losses
from jaxformer.parameters import abstract
from jaxformer.train_step import language_model_loss
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

CONFIG = TransformerLMConfig(
    d_model=12, num_heads=3, num_layers=1, context_length=11, vocab_size=31, residual_dropout=0.2
)
BATCH = 3
# What a head can be made of: a matrix or the embedding, a bias, a cap, BERT's layer before it.
HEADS = {
    "own matrix": {"tie_embeddings": False},
    "own matrix, bias": {"tie_embeddings": False, "head_bias": True},
    "embedding": {},
    "embedding, bias": {"head_bias": True},
    "cap": {"logit_soft_cap": 2.0},
    "masked_lm": {"head": "masked_lm"},
}


def loss_and_gradients(config, compute_dtype=None):
    """Of random parameters and ids, in float64 but for ``compute_dtype``."""
    definition, shapes = abstract(lambda rngs: TransformerLM(config, rngs=rngs))
    random = np.random.default_rng(0)
    parameters = {name: jnp.asarray(random.normal(size=p.shape) / 3) for name, p in shapes.items()}
    ids = random.integers(0, config.vocab_size, (BATCH, config.context_length + 1))

    def loss(parameters):
        key = jax.random.key(1)
        return language_model_loss(
            definition, parameters, ids[:, :-1], ids[:, 1:], key, compute_dtype
        )

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    return np.asarray(value), jax.tree.map(np.asarray, gradients)


@pytest.mark.parametrize("positions", full_after(1, [2, 10, 1, 4], slow_after=2))
@pytest.mark.parametrize("head", full_after(1, HEADS))
def test_losses_and_gradients_are_the_same_in_float64(head, positions, monkeypatch):
    """Eleven positions do not divide by most of these."""
    config = dataclasses.replace(CONFIG, **HEADS[head])
    with jax.enable_x64(True):
        whole, expected = loss_and_gradients(config)
        monkeypatch.setattr(
            chunked_loss, "LOGITS_AT_ONCE", 8 * BATCH * positions * config.vocab_size
        )
        value, gradients = loss_and_gradients(config)
    assert value.dtype == np.float64
    np.testing.assert_allclose(value, whole, rtol=1e-13)
    for name, gradient in expected.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.tier("full")
def test_bfloat16_is_no_further_from_float64(monkeypatch):
    """The head's gradients add up in float32, so chunks add no rounding of their own."""

    def distance(gradients):
        name = "token_embedding.embedding"
        return np.sqrt(np.mean(np.square(gradients[name] - exact[name])))

    with jax.enable_x64(True):
        _, exact = loss_and_gradients(CONFIG)
        _, whole = loss_and_gradients(CONFIG, jnp.bfloat16)
        monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 2 * BATCH * CONFIG.vocab_size)
        _, chunked = loss_and_gradients(CONFIG, jnp.bfloat16)
    assert 0 < distance(chunked) < 1.1 * distance(whole)


@pytest.mark.tier("full")
def test_without_a_gradient_and_scaled(monkeypatch):
    """What ``jax.grad`` does not ask for is the same; what it multiplies the loss with counts."""
    random = np.random.default_rng(0)
    hidden, weights = random.normal(size=(2, 7, 5)), random.normal(size=(5, 9))
    targets = random.integers(0, 9, (2, 7))

    def scaled(hidden, weights):
        return 3 * chunked_loss.average_losses(token_losses, lambda x: x @ weights, hidden, targets)

    with jax.enable_x64(True):
        arguments = jnp.asarray(hidden), jnp.asarray(weights)
        whole = scaled(*arguments), *jax.grad(scaled, (0, 1))(*arguments)
        monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", 8 * 2 * 9 * 3)
        chunked = scaled(*arguments), *jax.grad(scaled, (0, 1))(*arguments)
        for one, other in zip(chunked, whole, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-14)


def test_a_large_vocabulary_takes_less_memory(monkeypatch):
    """As the compiler lays it out: neither logits nor their gradients are there in full."""
    shape = jax.ShapeDtypeStruct
    length, width, vocabulary = 256, 16, 5000
    arguments = shape((1, length, width), jnp.float32), shape((width, vocabulary), jnp.float32)

    def temporary():
        def loss(hidden, weights):
            targets = jnp.zeros((1, length), jnp.int32)
            return chunked_loss.average_losses(token_losses, lambda x: x @ weights, hidden, targets)

        compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    logits = 4 * length * vocabulary
    assert temporary() > logits
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", logits // 16)
    assert temporary() < logits // 2
