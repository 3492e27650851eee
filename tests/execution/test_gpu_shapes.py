"""What is laid out otherwise for an NVIDIA GPU gives the same numbers. Needs no GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.execution.gpu_shapes import COLUMNS, fill_rows
from jaxformer.parameters import split
from jaxformer.train_step import language_model_loss
from jaxformer.transformer_lm import TransformerLM

H100 = CompilationTarget("cuda", (9, 0))

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("at_once", [2**30, 20_000])
def test_a_program_for_a_gpu_computes_the_same(monkeypatch, at_once):
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE_ON_GPU", at_once)
    config = TransformerLMConfig(
        vocab_size=131, num_layers=2, num_heads=2, d_model=12, context_length=20
    )
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    ids = np.random.default_rng(0).integers(0, 131, (33, 21))

    def loss(parameters):
        return language_model_loss(definition, parameters, ids[:, :-1], ids[:, 1:], None)

    expected, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    with compiled_for(H100):
        traced = jax.jit(lambda parameters: jax.value_and_grad(loss)(parameters))
        text = traced.lower(parameters).as_text()
        found, found_gradients = traced(parameters)

    assert "LayoutConstraint" in text and f"x{2 * COLUMNS}xf64" in text
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    for name, gradient in gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(found_gradients[name], gradient, rtol=0, atol=1e-12 * scale)


def test_rows_are_filled_up_for_a_gpu_alone():
    table = jnp.ones((COLUMNS + 1, 3))
    assert fill_rows(table) is table
    with compiled_for(H100):
        assert fill_rows(table).shape == (2 * COLUMNS, 3)
        assert fill_rows(table[:COLUMNS]).shape == (COLUMNS, 3)
