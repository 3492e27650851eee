"""What is laid out otherwise for an NVIDIA GPU gives the same numbers. Needs no GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.config import TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.execution.gpu_shapes import (
    COLUMNS,
    MOST_ONE_HOT,
    add_bias,
    fill_rows,
    filled_columns,
    log_sum_exp,
    row_product,
    total,
)
from jaxformer.execution.sharding import layout
from jaxformer.layers import look_up
from jaxformer.losses import token_losses
from jaxformer.parameters import abstract
from jaxformer.train_step import language_model_loss
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

H100 = CompilationTarget("cuda", (9, 0))
CONFIG = TransformerLMConfig(
    d_model=12, num_heads=3, num_layers=2, context_length=20, vocab_size=131
)
HEADS = {
    "own matrix": {"tie_embeddings": False, "head_bias": True},
    "embedding": {},
    "embedding, bias": {"head_bias": True},
    "cap": {"logit_soft_cap": 2.0},
}
# With more texts in a batch than XLA sums without another layout.
TEXTS = 33

pytestmark = pytest.mark.usefixtures("float64")


@pytest.mark.parametrize("at_once", full_after(1, [20_000, 2**30]))
@pytest.mark.parametrize(
    "head", full_after(1, ["embedding, bias", "cap", "embedding", "own matrix"])
)
def test_a_program_for_a_gpu_computes_the_same(head, at_once, monkeypatch):
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", at_once)
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE_ON_GPU", at_once)
    config = dataclasses.replace(CONFIG, **HEADS[head])
    definition, shapes = abstract(lambda rngs: TransformerLM(config, rngs=rngs))
    random = np.random.default_rng(0)
    parameters = {name: jnp.asarray(random.normal(size=p.shape) / 3) for name, p in shapes.items()}
    ids = random.integers(0, config.vocab_size, (TEXTS, config.context_length + 1))
    losses = functools.partial(token_losses, z_loss=0.01, label_smoothing=0.1)

    def loss(parameters):
        return language_model_loss(
            definition, parameters, ids[:, :-1], ids[:, 1:], None, losses=losses
        )

    expected, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    with compiled_for(H100):
        traced = jax.jit(lambda parameters: jax.value_and_grad(loss)(parameters))
        text = traced.lower(parameters).as_text()
        found, found_gradients = traced(parameters)

    assert "LayoutConstraint" in text
    assert (f"x{2 * COLUMNS}xf64" in text) == (head != "own matrix")
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        # The gradient of a key's bias is zero but for rounding.
        most = 1e-12 * np.abs(gradient).max() + 1e-15 * largest
        np.testing.assert_allclose(found_gradients[name], gradient, rtol=0, atol=most)


def test_rows_are_filled_up_for_a_gpu_alone():
    table = jnp.ones((COLUMNS + 1, 3))
    with filled_columns():
        assert fill_rows(table) is table
    with compiled_for(H100):
        assert fill_rows(table) is table
        with filled_columns():
            assert fill_rows(table).shape == (2 * COLUMNS, 3)
            assert fill_rows(table[:, 0]).shape == (2 * COLUMNS,)
            assert fill_rows(table[:COLUMNS]).shape == (COLUMNS, 3)


@pytest.mark.parametrize("rows", [5, MOST_ONE_HOT + 1])
@pytest.mark.parametrize("target", [CompilationTarget("cpu"), H100])
def test_the_gradient_of_a_row_that_is_read_often_is_rounded_once(target, rows):
    """In bfloat16, 256 added to one by one stays 256."""
    ids = jnp.zeros((3, 400), jnp.int32)

    def total(table):
        return look_up(table, ids).astype(jnp.float32).sum()

    with compiled_for(target):
        gradient = jax.grad(total)(jnp.ones((rows, 2), jnp.bfloat16))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient[0], 1200)
    np.testing.assert_array_equal(gradient[1:], 0)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_product_of_one_row_is_the_same(rows):
    x, kernel = (jnp.asarray(np.random.default_rng(0).normal(size=s)) for s in ((rows, 5), (5, 7)))
    with compiled_for(H100):
        np.testing.assert_allclose(row_product(x, kernel), np.asarray(x) @ kernel, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("target", [CompilationTarget("cpu"), H100])
def test_the_gradient_of_a_bias_is_rounded_once(target, dtype):
    """In bfloat16, 256 added to one by one stays 256."""
    random = np.random.default_rng(0)
    y, bias = (jnp.asarray(random.normal(size=shape), dtype) for shape in ((300, 5), (5,)))

    def run(y, bias):
        result = add_bias(y, bias)
        return result.astype(jnp.float64).sum(), result

    with compiled_for(target):
        gradients, found = jax.grad(run, (0, 1), has_aux=True)(y, bias)
    exact = np.asarray(y, np.float64) + np.asarray(bias, np.float64)
    np.testing.assert_array_equal(found, jnp.asarray(exact, dtype))
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    np.testing.assert_array_equal(gradients[0], 1)
    np.testing.assert_array_equal(gradients[1], 300)


@pytest.mark.parametrize("columns", [3 * COLUMNS, 3 * COLUMNS + 1])
def test_a_sum_of_exponentials_is_the_same(columns):
    random = np.random.default_rng(0)
    logits = jnp.asarray(30 * random.normal(size=(2, 4, columns))).at[..., -COLUMNS:].set(-jnp.inf)

    def run(logits):
        return log_sum_exp(logits).sum()

    expected = jax.value_and_grad(run)(logits)
    with compiled_for(H100):
        found = jax.value_and_grad(run)(logits)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


def test_a_sum_of_arrays_is_the_same():
    random = np.random.default_rng(0)
    arrays = [jnp.asarray(random.normal(size=shape)) for shape in ((), (3,), (4, 5), (2, 3, 4))]
    with compiled_for(H100):
        found = total(arrays)
    np.testing.assert_allclose(found, sum(np.asarray(x).sum() for x in arrays), rtol=1e-12)


def test_arrays_on_many_gpus_are_not_cut_and_joined():
    def run(logits):
        return total([logits, log_sum_exp(logits)])

    def text():
        # A function of its own, as a program that was traced before is kept.
        return str(jax.make_jaxpr(lambda logits: run(logits))(jnp.ones((3, 2 * COLUMNS))))

    with compiled_for(H100):
        assert "concatenate" in text()
        with layout(object()):
            assert "concatenate" not in text()
            assert "reshape" not in text()
