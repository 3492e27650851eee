"""Experts for few rows, each with a kernel of its own: the same numbers, and no copy of a stack."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.execution import few_rows, separate_experts
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.experts import MixtureOfExperts
from jaxformer.few_row_layers import few_row_kernels, prepare_few_rows
from jaxformer.generation import generate
from jaxformer.hardware import row_products
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after, full_except

TOKENS = few_rows.FEWEST_TOKENS_TO_COPY


@pytest.fixture(autouse=True)
def without_calls(monkeypatch):
    """As where no C compiler is found."""
    monkeypatch.setattr(row_products, "are_known", lambda: False)


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch):
    monkeypatch.setattr(separate_experts, "LEAST_BYTES", 1)


def mixture(num_experts=3, **settings):
    settings = {"experts_per_token": 2, "rngs": nnx.Rngs(0), **settings}
    mix = MixtureOfExperts(16, 32, num_experts=num_experts, **settings)
    mix.eval()
    return mix


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("rows", "use_bias"),
    full_except(
        itertools.product([1, 2, 3, 5, 32], [False, True]),
        lambda rows, use_bias: (rows, use_bias) in ((1, False), (5, True)),
    ),
)
def test_the_same_numbers(rows, use_bias):
    mix = mixture(use_bias=use_bias)
    x = jax.random.normal(jax.random.key(1), (rows, 1, 16), jnp.float64)
    before = mix(x)
    kernels = few_row_kernels(mix, rows, TOKENS)
    prepare_few_rows(mix, kernels)
    assert len(mix.up_proj.separate) == 3
    np.testing.assert_allclose(mix(x), before, rtol=0, atol=1e-15)


@pytest.mark.usefixtures("float64")
def test_an_expert_that_every_row_chooses_and_one_that_none_does():
    mix = mixture(router={"use_bias": True})
    mix.router.proj.bias.set_value(jnp.array([50.0, 20.0, -50.0]))
    x = jax.random.normal(jax.random.key(1), (7, 1, 16), jnp.float64)
    before, routing = mix(x, return_routing=True)
    assert set(np.ravel(routing.experts)) == {0, 1}
    prepare_few_rows(mix, few_row_kernels(mix, 7, TOKENS))
    np.testing.assert_allclose(mix(x), before, rtol=0, atol=1e-15)


def test_kernels_share_the_memory_of_the_stack():
    stack = jnp.ones((3, 16, 32))
    one, two, three = separate_experts.separate(stack, 1)
    begin = stack.unsafe_buffer_pointer()
    places = [matrix.unsafe_buffer_pointer() - begin for matrix in (one, two, three)]
    assert places == [0, stack.nbytes // 3, 2 * stack.nbytes // 3]
    del one, two, three
    # Nothing of them keeps the stack from being written over.
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    assert step(stack).unsafe_buffer_pointer() == begin


@pytest.mark.parametrize(
    ("shape", "rows"),
    [((3, 16, 32), few_rows.MOST_ROWS + 1), ((3, 3, 3), 1),
     ((separate_experts.MOST_EXPERTS + 1, 16, 32), 1)],
)  # fmt: skip
def test_what_stays_a_stack(shape, rows):
    assert separate_experts.separate(jnp.ones(shape), rows) is None


def test_a_stack_stays_one_on_several_devices_on_a_gpu_and_inside_of_a_program(monkeypatch):
    def is_stack(kernel):
        return separate_experts.separate(kernel, 1) is None

    mesh = jax.sharding.Mesh(jax.devices()[:2], "e")
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("e"))
    kernel = jnp.ones((4, 16, 32))
    assert not is_stack(kernel)
    assert is_stack(jax.device_put(kernel, spread))
    found = []
    jax.make_jaxpr(lambda kernel: found.append(is_stack(kernel)))(kernel)
    assert found == [True]
    with compiled_for(CompilationTarget("cuda", (9, 0))):
        assert is_stack(kernel)
    monkeypatch.setattr(separate_experts, "LEAST_BYTES", kernel.nbytes // 4 + 1)
    assert is_stack(kernel)
    assert few_row_kernels(mixture(), 1, TOKENS) == {}


@pytest.mark.parametrize("rows", full_after(0, [5, 1]))
def test_a_text_is_the_same(monkeypatch, rows):
    config = TransformerLMConfig(
        d_model=16, num_heads=2, num_layers=2, context_length=40, vocab_size=31,
        activation="swiglu", num_experts=4, expert_d_ff=32,
    )  # fmt: skip
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    prompt = np.arange(rows * 3).reshape(rows, 3) % 31
    separated = []
    original = separate_experts.separate_feed_forward

    def count(*arguments):
        separated.append(arguments)
        return original(*arguments)

    monkeypatch.setattr("jaxformer.experts.separate_feed_forward", count)
    text = generate(model, prompt, TOKENS + 4, greedy=True)
    # Equal layers are traced once.
    assert len(separated) == 1
    monkeypatch.setattr(separate_experts, "MOST_EXPERTS", 0)
    np.testing.assert_array_equal(generate(model, prompt, TOKENS + 4, greedy=True), text)
    assert len(separated) == 1
