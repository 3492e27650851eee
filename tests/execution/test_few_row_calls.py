"""Products of few rows by custom calls: right, the same for any number of rows, and used."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.adapters import LoRALinear
from jaxformer.attention_core import scaled_dot_product_attention
from jaxformer.config import TransformerLMConfig
from jaxformer.decoding import generating_programs
from jaxformer.execution import few_rows
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.few_row_layers import few_row_kernels
from jaxformer.generation import generate
from jaxformer.hardware import row_products
from jaxformer.layers import Linear, project
from jaxformer.narrow_linear import narrow_weights
from jaxformer.transformer_lm import TransformerLM
from tests.hardware.test_custom_calls import needs_calls
from tests.support.narrow_calls import BUILDS, register_narrow
from tests.support.tiers import full_after, full_except

pytestmark = needs_calls
TARGETS = ("PRODUCT", "BY_TRANSPOSED", "GROUPED", "PAIRS", "PAIRS_BY_TRANSPOSED")
NARROW = ("bfloat16", "int8")
KINDS = {
    "tied": {"tie_embeddings": True},
    "gated": {"tie_embeddings": False, "num_kv_heads": 1, "activation": "swiglu"},
    "experts": {"activation": "swiglu", "num_experts": 4, "experts_per_token": 2},
}
# Fewer outputs than a register has, several blocks of columns, a long sum, nothing even.
SHAPES = [(1, 256, 1024), (2, 7, 11), (5, 300, 65), (6, 513, 129), (32, 1100, 200), (3, 4, 1)]


@pytest.fixture(params=BUILDS)
def built(request, monkeypatch):
    """The custom calls, and those for registers of half the width, which this processor has too."""
    if request.param == "this processor":
        return
    register_narrow("few_row_products", row_products.TARGETS)
    for name in TARGETS:
        monkeypatch.setattr(row_products, name, f"narrow_{getattr(row_products, name)}")
    for dtype, target in few_rows.TRANSPOSED_DTYPES.items():
        monkeypatch.setitem(few_rows.TRANSPOSED_DTYPES, dtype, f"narrow_{target}")


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def check_product(found, x, kernel):
    """A sum of n products in float32 is within n roundings of the exact one (Higham, 2002, 3.1)."""
    x, kernel = x.astype(np.float64), kernel.astype(np.float64)
    bound = len(kernel) * np.finfo(np.float32).eps / 2 * (np.abs(x) @ np.abs(kernel))
    assert found.shape == bound.shape
    assert np.all(np.abs(np.asarray(found, np.float64) - x @ kernel) <= bound)


# Functions that are made anew, as a program keeps the names of the calls that it was traced with.
def product(x, kernel):
    return jax.jit(lambda *arrays: few_rows.call_product(*arrays))(x, kernel)


def by_transposed(x, kernel):
    call = jax.jit(lambda *arrays: few_rows.call_product_by_transposed(*arrays))
    return call(x, np.ascontiguousarray(kernel.T))


def grouped(x, kernel, first):
    return jax.jit(lambda *arrays: few_rows.call_grouped_product(*arrays))(x, kernel, first)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("multiply", [product, by_transposed])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product_is_right_to_rounding_and_no_row_depends_on_others(shape, multiply):
    rows, inputs, outputs = shape
    x, kernel = draw(rows, inputs), draw(inputs, outputs, seed=1)
    found = np.asarray(multiply(x, kernel))
    check_product(found, x, kernel)
    for row in {0, rows // 2, rows - 1}:
        np.testing.assert_array_equal(multiply(x[row : row + 1], kernel)[0], found[row])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("rows", [1, 7])
def test_products_of_one_call_are_those_of_each(rows):
    """Of other widths, one of them no multiple of anything, as many as a call takes."""
    x = draw(rows, 300)
    kernels = [draw(300, 64 * i + i % 2, seed=i) for i in range(1, few_rows.MOST_TOGETHER + 1)]
    found = jax.jit(lambda *arrays: few_rows.call_each_product(*arrays))(x, *kernels)
    for y, kernel in zip(found, kernels, strict=True):
        check_product(y, x, kernel)
        np.testing.assert_array_equal(y, product(x, kernel))


def test_layers_of_one_input_are_one_call(monkeypatch):
    layers = [Linear(128, width, rngs=nnx.Rngs(width)) for width in (128, 256)]
    x = jnp.asarray(draw(2, 3, 128))
    expected = project(x, *layers)
    for layer in layers:
        layer.uses_custom_call = True
    called = count_calls(monkeypatch)
    for found, y in zip(project(x, *layers), expected, strict=True):
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)
    assert called == [row_products.PRODUCT]


def test_a_layer_with_an_adapter_beside_others_keeps_it():
    layers = [
        Linear(128, 128, rngs=nnx.Rngs(0)),
        LoRALinear(128, 128, rank=2, alpha=8.0, rngs=nnx.Rngs(1)),
    ]
    layers[1].lora_b.kernel[...] = jnp.ones((2, 128))
    x = jnp.asarray(draw(3, 128))
    expected = project(x, *layers)
    for layer in layers:
        layer.uses_custom_call = True
    for found, y in zip(project(x, *layers), expected, strict=True):
        np.testing.assert_allclose(found, y, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_numbers_are_used_as_they_are(shape, dtype):
    rows, inputs, outputs = shape
    x = draw(rows, inputs)
    narrow = (draw(outputs, inputs, seed=1) * 40).astype(dtype)
    multiply = jax.jit(lambda *arrays: few_rows.call_product_by_transposed(*arrays))
    found = np.asarray(multiply(x, narrow))
    check_product(found, x, narrow.astype(np.float32).T)
    np.testing.assert_array_equal(multiply(x[-1:], narrow)[0], found[-1])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize("counts", [(3, 0, 20, 1), (0, 0, 0, 0), (32, 0, 0, 0), (0, 1)], ids=str)
@pytest.mark.parametrize("others", [0, 9])
@pytest.mark.parametrize("outputs", [37, 1344])
def test_products_of_groups_are_right_to_rounding(counts, others, outputs):
    """Groups without rows are not read, and rows of no group get zeros."""
    inputs, used = 97, sum(counts)
    x, kernel = draw(used + others, inputs), draw(len(counts), inputs, outputs, seed=1)
    first = np.cumsum([0, *counts], dtype=np.int32)
    kernel[np.array(counts) == 0] = np.nan
    found = np.asarray(grouped(x, kernel, first))
    for group, begin in enumerate(first[:-1]):
        rows = slice(begin, first[group + 1])
        if counts[group]:
            check_product(found[rows], x[rows], kernel[group])
            np.testing.assert_array_equal(found[rows], product(x[rows], kernel[group]))
    assert not np.any(found[used:])


@pytest.mark.usefixtures("built")
@pytest.mark.parametrize(
    "shape", [(1, *SHAPES[0]), *((7, *shape) for shape in SHAPES[1:])], ids=str
)
@pytest.mark.parametrize("is_transposed", [False, True])
def test_products_of_pairs_are_those_of_each_pair(shape, is_transposed):
    pairs, rows, inputs, outputs = shape
    x, kernels = draw(pairs, rows, inputs), draw(pairs, inputs, outputs, seed=1)
    if is_transposed:
        called, multiply = few_rows.call_products_by_transposed, by_transposed
    else:
        called, multiply = few_rows.call_products, product
    given = np.ascontiguousarray(kernels.transpose(0, 2, 1)) if is_transposed else kernels
    found = np.asarray(jax.jit(lambda *arrays: called(*arrays))(x, given))
    for each, of_x, kernel in zip(found, x, kernels, strict=True):
        check_product(each, of_x, kernel)
        np.testing.assert_array_equal(each, multiply(of_x, kernel))


@pytest.mark.parametrize("multiply", [product, by_transposed])
def test_a_number_that_is_not_finite_comes_through(multiply):
    x, kernel = draw(5, 40), draw(40, 70, seed=1)
    x[3, 7], kernel[7, 9], kernel[9, 69] = np.nan, np.inf, -np.inf
    found, expected = np.asarray(multiply(x, kernel)), x @ kernel
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    np.testing.assert_array_equal(np.isinf(found), np.isinf(expected))


@pytest.mark.parametrize("rows", [1, 9])
def test_many_at_once_end_and_give_the_same_bits(rows):
    """From several threads, on several devices, each with blocks for all threads of the pool.

    After products of one row the threads of the pool wait for the next ones.
    """
    x, kernel = draw(rows, 600), draw(600, 500, seed=1)
    compiled = jax.jit(few_rows.call_product)
    first = np.asarray(compiled(x, kernel))

    def run(number):
        return np.asarray(compiled(*jax.device_put((x, kernel), jax.devices()[number % 4])))

    with ThreadPoolExecutor(8) as threads:
        for found in threads.map(run, range(200)):
            np.testing.assert_array_equal(found, first)


def test_only_few_rows_and_large_matrices_of_one_cpu_in_float32_are_called():
    kernel = jnp.zeros((128, 128))
    assert few_rows.can_use_call(1, kernel)
    assert few_rows.can_use_call(few_rows.MOST_ROWS, np.asarray(kernel))
    assert not few_rows.can_use_call(few_rows.MOST_ROWS + 1, kernel)
    assert not few_rows.can_use_call(1, kernel.astype(jnp.bfloat16))
    assert not few_rows.can_use_call(1, kernel[:16, :16])
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    assert not few_rows.can_use_call(1, jax.device_put(kernel, spread))
    with compiled_for(CompilationTarget("cuda", (9, 0))):
        assert not few_rows.can_use_call(1, kernel)
    assert few_rows.fits_call(jnp.zeros((3, 5)))
    assert not few_rows.fits_call(jnp.zeros((3, 5), jnp.bfloat16))
    assert not few_rows.fits_call(jnp.zeros((few_rows.MOST_ROWS + 1, 5)))


def model_of(**settings):
    config = TransformerLMConfig(
        d_model=96, num_heads=4, num_layers=2, context_length=64, vocab_size=131, **settings
    )
    return TransformerLM(config, rngs=nnx.Rngs(0))


def count_calls(monkeypatch):
    called, call = [], few_rows.call_for_floats

    def count(target, *arguments):
        called.append(target)
        return call(target, *arguments)

    monkeypatch.setattr(few_rows, "call_for_floats", count)
    return called


@pytest.mark.parametrize(
    ("rows", "kind"),
    full_except(
        itertools.product([1, 5], KINDS),
        lambda rows, kind: (rows, kind) in ((1, "tied"), (5, "experts")),
    ),
)
def test_texts_are_those_of_xlas_products(monkeypatch, rows, kind):
    settings = KINDS[kind]
    model = model_of(**settings)
    prompt = np.random.default_rng(0).integers(0, 131, (rows, 3))
    called = count_calls(monkeypatch)
    found = generate(model, prompt, 20, greedy=True)
    expected = {row_products.PRODUCT, row_products.PAIRS, row_products.PAIRS_BY_TRANSPOSED}
    expected |= {row_products.BY_TRANSPOSED} if settings.get("tie_embeddings", True) else set()
    expected |= {row_products.GROUPED} if "num_experts" in settings else set()
    assert set(called) == expected
    called.clear()
    monkeypatch.setattr(row_products, "are_known", lambda: False)
    generating_programs.cache_clear()
    np.testing.assert_array_equal(found, generate(model, prompt, 20, greedy=True))
    assert not called


@pytest.mark.parametrize("dtype", full_after(1, reversed(NARROW)))
def test_models_with_narrow_weights_write_with_them_as_they_lie(monkeypatch, dtype):
    narrow = narrow_weights(model_of(tie_embeddings=True), dtype)
    prompt = np.random.default_rng(0).integers(0, 131, (3, 5))
    called = count_calls(monkeypatch)
    found = generate(narrow, prompt, 20, greedy=True)
    expected = {few_rows.TRANSPOSED_DTYPES[name] for name in (dtype, "float32")}
    assert set(called) == expected | {row_products.PAIRS, row_products.PAIRS_BY_TRANSPOSED}
    monkeypatch.setattr(row_products, "are_known", lambda: False)
    generating_programs.cache_clear()
    np.testing.assert_array_equal(found, generate(narrow, prompt, 20, greedy=True))


def test_nothing_lies_beside_the_parameters():
    kernels = few_row_kernels(model_of(), 4, 100)
    assert kernels
    assert set(kernels.values()) == {()}


def test_heads_of_more_queries_another_dtype_or_outside_of_writing_are_xlas(monkeypatch):
    called = count_calls(monkeypatch)
    q, k = jnp.ones((2, 3, 4, 8)), jnp.ones((2, 5, 2, 8))

    def attend(q, k):
        return scaled_dot_product_attention(q, k, k)[0]

    expected = attend(q, k)
    assert not called
    with few_rows.head_calls(True):
        np.testing.assert_allclose(attend(q, k), expected, rtol=1e-6)
        assert called == [row_products.PAIRS_BY_TRANSPOSED, row_products.PAIRS]
        called.clear()
        attend(q.astype(jnp.bfloat16), k.astype(jnp.bfloat16))
        attend(jnp.ones((2, few_rows.MOST_ROWS // 2 + 1, 4, 8)), k)
    assert not called


def test_a_layer_of_more_rows_or_another_dtype_is_xlas(monkeypatch):
    layer = Linear(128, 128, rngs=nnx.Rngs(0))
    layer.uses_custom_call = True
    called = count_calls(monkeypatch)
    layer(jnp.ones((few_rows.MOST_ROWS + 1, 128)))
    layer(jnp.ones((1, 128), jnp.bfloat16))
    assert not called
    layer(jnp.ones((2, 3, 128)))
    assert called == [row_products.PRODUCT]
