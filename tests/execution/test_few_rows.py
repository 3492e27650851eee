"""Products of few rows, with the matrix on the left: the same numbers, and no copy in the loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer import layers
from jaxformer.config import TransformerLMConfig
from jaxformer.decoding import generating_programs
from jaxformer.execution import few_rows
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.generation import generate, stream
from jaxformer.layers import Embedding, Linear, few_row_kernels, prepare_few_rows
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

INPUTS, OUTPUTS = 7, 11
TOKENS = few_rows.FEWEST_TOKENS_TO_COPY


class Pair(nnx.Module):
    """A linear layer and a table, as a decoder has them."""

    def __init__(self):
        self.linear = Linear(INPUTS, OUTPUTS, rngs=nnx.Rngs(0))
        self.table = Embedding(OUTPUTS, INPUTS, rngs=nnx.Rngs(1))


def left_shapes(function, x):
    """The shapes on the left of all products of a function."""
    equations = jax.make_jaxpr(function)(x).jaxpr.eqns
    return [e.invars[0].aval.shape for e in equations if e.primitive.name == "dot_general"]


@pytest.mark.parametrize(
    ("rows", "left", "copied"),
    [(1, False, False), (2, True, False), (3, True, False), (4, True, True), (32, True, True),
     (33, False, False)],
)  # fmt: skip
def test_matrices_stand_on_the_left_where_rows_are_few(rows, left, copied):
    pair, x = Pair(), jnp.ones((rows, 1, INPUTS))
    before = pair.linear(x), pair.table.attend(x)
    prepare_few_rows(pair, few_row_kernels(pair, rows, TOKENS))
    expected = (OUTPUTS, INPUTS) if left else (rows, INPUTS)
    assert left_shapes(pair.table.attend, x) == [expected]
    assert left_shapes(pair.linear, x) == [(OUTPUTS, INPUTS) if copied else (rows, INPUTS)]
    for again, once in zip((pair.linear(x), pair.table.attend(x)), before, strict=True):
        np.testing.assert_allclose(again, once, rtol=1e-5, atol=1e-6)


def test_a_call_with_many_rows_leaves_the_matrix_on_the_right():
    pair, x = Pair(), jnp.ones((4, 9, INPUTS))
    prepare_few_rows(pair, few_row_kernels(pair, 4, TOKENS))
    assert left_shapes(pair.linear, x) == left_shapes(pair.table.attend, x) == [(36, INPUTS)]


@pytest.mark.parametrize(("tokens", "calls"), [(TOKENS, 1), (TOKENS - 1, 0)])
def test_kernels_are_copied_once_for_a_text(monkeypatch, tokens, calls):
    """However many chunks it has; not for a short one, nor before the first token is there."""
    copied = []
    original = layers._transposed
    monkeypatch.setattr(layers, "_transposed", lambda k: copied.append(k) or original(k))
    config = TransformerLMConfig(
        d_model=12, num_heads=3, num_layers=1, context_length=23, vocab_size=31
    )
    text = stream(
        TransformerLM(config, rngs=nnx.Rngs(0)), np.ones((5, 4), int), tokens, greedy=True, chunk=2
    )
    next(text)
    assert not copied
    assert sum(part.shape[1] for part in text) == tokens - 1
    assert len(copied) == calls


def test_nothing_is_copied_on_a_gpu_or_for_a_model_that_is_too_large(monkeypatch):
    with compiled_for(CompilationTarget("cuda", (9, 0))):
        assert not few_rows.is_few(4)
    monkeypatch.setattr(few_rows, "MOST_COPIED_BYTES", 4 * INPUTS * OUTPUTS - 1)
    pair = Pair()
    prepare_few_rows(pair, few_row_kernels(pair, 4, TOKENS))
    assert pair.linear.kernel_OI is None


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("tied", full_after(1, [True, False]))
def test_texts_are_the_same(monkeypatch, tied):
    config = TransformerLMConfig(
        d_model=12, num_heads=3, num_layers=2, context_length=23, vocab_size=31, tie_embeddings=tied
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, 31, (5, 4))
    found = generate(model, prompt, 30, greedy=True)
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)
    generating_programs.cache_clear()
    np.testing.assert_array_equal(found, generate(model, prompt, 30, greedy=True))
    generating_programs.cache_clear()
