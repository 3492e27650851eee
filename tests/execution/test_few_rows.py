"""Products of few rows, with the matrix on the left: the same numbers, and no copy in the loop."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer import few_row_layers
from jaxformer.adapters import LoRALinear
from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import PreNormBlock
from jaxformer.config import TransformerLMConfig
from jaxformer.decoding import generating_programs
from jaxformer.execution import few_rows
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.feed_forward import GatedFeedForward
from jaxformer.few_row_layers import few_row_kernels, few_row_kernels_of, prepare_few_rows
from jaxformer.generation import generate, stream
from jaxformer.hardware import row_products
from jaxformer.layers import Embedding, Linear
from jaxformer.norms import RMSNorm
from jaxformer.parameters import split
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

INPUTS, OUTPUTS = 7, 11
TOKENS = few_rows.FEWEST_TOKENS_TO_COPY


@pytest.fixture(autouse=True)
def without_calls(monkeypatch):
    """As where no C compiler is found."""
    monkeypatch.setattr(row_products, "are_known", lambda: False)


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
    [
        (1, False, False), (2, True, False), (3, True, False), (4, True, True),
        (32, True, True), (33, False, False),
    ],
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


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("is_longer", [True, False])
def test_one_to_three_rows_take_copies_for_a_longer_text(monkeypatch, rows, is_longer):
    monkeypatch.setattr(few_rows, "LEAST_COPIED_BYTES", 4 * INPUTS * OUTPUTS)
    tokens = few_rows.TOKENS_TO_COPY_FOR[rows] - (not is_longer)
    pair, x = Pair(), jnp.ones((rows, 1, INPUTS))
    before = pair.linear(x)
    prepare_few_rows(pair, few_row_kernels(pair, rows, tokens))
    assert left_shapes(pair.linear, x) == [(OUTPUTS, INPUTS) if is_longer else (rows, INPUTS)]
    np.testing.assert_allclose(pair.linear(x), before, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(few_rows, "LEAST_COPIED_BYTES", 4 * INPUTS * OUTPUTS + 1)
    assert not few_row_kernels(pair, rows, tokens)


def test_a_call_with_many_rows_leaves_the_matrix_on_the_right():
    pair, x = Pair(), jnp.ones((4, 9, INPUTS))
    prepare_few_rows(pair, few_row_kernels(pair, 4, TOKENS))
    assert left_shapes(pair.linear, x) == left_shapes(pair.table.attend, x) == [(36, INPUTS)]


@pytest.mark.parametrize(("tokens", "calls"), [(TOKENS, 1), (TOKENS - 1, 0)])
def test_kernels_are_copied_once_for_a_text(monkeypatch, tokens, calls):
    """However many chunks it has; not for a short one, nor before the first token is there."""
    copied = []
    original = few_row_layers._transposed
    monkeypatch.setattr(few_row_layers, "_transposed", lambda k: copied.append(k) or original(k))
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


class Gated(nnx.Module):
    """A block of grouped queries and a gated branch, and what one projection may be."""

    def __init__(self, up_proj=Linear):
        rngs = nnx.Rngs(0)
        norms = [RMSNorm(8) for _ in range(2)]
        attention = MultiHeadAttention(8, 4, num_kv_heads=2, use_bias=True, rngs=rngs)
        feed_forward = GatedFeedForward(8, 20, use_bias=True, rngs=rngs)
        feed_forward.up_proj = up_proj(8, 20, rngs=rngs)
        self.block = PreNormBlock(attention, feed_forward, *norms)


def test_projections_of_the_same_rows_are_one_product():
    model, x = Gated(), jnp.ones((5, 1, 8)) * jnp.arange(5.0)[:, None, None]
    before = model.block(x)
    prepare_few_rows(model, few_row_kernels(model, 5, TOKENS))
    shapes = left_shapes(model.block, x)
    assert [shape for shape in shapes if len(shape) == 2] == [(16, 8), (8, 8), (40, 8), (8, 20)]
    np.testing.assert_allclose(model.block(x), before, rtol=1e-5, atol=1e-6)
    assert len(left_shapes(model.block, jnp.ones((5, 9, 8)))) == 9


def test_an_adapted_projection_stays_by_itself():
    model = Gated(functools.partial(LoRALinear, rank=2, alpha=4.0))
    assert [name for name in few_row_kernels(model, 5, TOKENS) if "feed_forward" in name] == [
        f"block.feed_forward.{name}"
        for name in ("down_proj", "gate_proj", "up_proj", "up_proj.lora_a", "up_proj.lora_b")
    ]


def test_a_model_is_gone_through_once_for_all_texts(monkeypatch):
    model = Gated()
    first = few_row_kernels_of(*split(model), 5, TOKENS)
    monkeypatch.setattr(few_row_layers.nnx, "iter_modules", None)
    changed = few_row_kernels_of(*split(jax.tree.map(lambda a: 2 * a, model)), 5, TOKENS)
    assert first.keys() == changed.keys()
    assert first
    for path, kernel in first.items():
        np.testing.assert_array_equal(2 * kernel, changed[path])


def test_a_shared_kernel_is_made_ready_for_one_layer():
    model, x = Gated(), jnp.ones((5, 1, 8)) * jnp.arange(5.0)[:, None, None]
    feed_forward = model.block.feed_forward
    feed_forward.up_proj.kernel = feed_forward.gate_proj.kernel
    before = model.block(x)
    kernels = few_row_kernels(model, 5, TOKENS)
    assert ("block.feed_forward.gate_proj" in kernels) != ("block.feed_forward.up_proj" in kernels)
    prepare_few_rows(model, kernels)
    np.testing.assert_allclose(model.block(x), before, rtol=1e-5, atol=1e-6)


def test_kernels_of_several_dtypes_are_not_joined():
    model = Gated()
    up = model.block.feed_forward.up_proj.kernel
    up.set_value(up[...].astype(jnp.bfloat16))
    kernels = few_row_kernels(model, 5, TOKENS)
    assert {
        kernels[f"block.feed_forward.{name}"].dtype.name for name in ("gate_proj", "up_proj")
    } == {"float32", "bfloat16"}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "settings",
    full_after(
        1,
        [
            {"tie_embeddings": True, "num_kv_heads": 1, "activation": "swiglu"},
            {"tie_embeddings": False},
        ],
    ),
)
def test_texts_are_the_same(monkeypatch, settings):
    config = TransformerLMConfig(
        d_model=12, num_heads=3, num_layers=2, context_length=23, vocab_size=31, **settings
    )
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    prompt = np.random.default_rng(0).integers(0, 31, (5, 4))
    found = generate(model, prompt, 30, greedy=True)
    monkeypatch.setattr(few_rows, "MOST_ROWS", 0)
    generating_programs.cache_clear()
    np.testing.assert_array_equal(found, generate(model, prompt, 30, greedy=True))
    generating_programs.cache_clear()
