"""Equal blocks are traced once, and what is computed is what blocks traced one by one compute."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer import layers
from jaxformer.blocks import Block, PreNormBlock
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.decoding import make_cache
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.execution.shared_traces import shared_traces
from jaxformer.parameters import merge, split
from jaxformer.train_step import language_model_loss
from jaxformer.transformer_lm import TransformerLM

CONFIG = TransformerLMConfig(
    vocab_size=11, context_length=8, d_model=8, num_heads=2, d_ff=16, num_layers=4,
    residual_dropout=0.2, attention_dropout=0.3,
)  # fmt: skip
WINDOWS = {"sliding_window": 3, "full_attention_layers": (1, 3)}
KEY = jax.random.key(1)
IDS = np.random.default_rng(0).integers(0, 11, (2, 8))


@pytest.fixture
def traced(monkeypatch):
    """The blocks that were traced, in order."""
    found = []
    call = Block.__call__

    def record(self, *arguments, **more):
        found.append(type(self))
        return call(self, *arguments, **more)

    monkeypatch.setattr(Block, "__call__", record)
    return found


def step_of(config):
    """Returns a step's loss and gradients as a function of parameters, and the parameters."""
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))

    def loss(parameters):
        return language_model_loss(definition, parameters, IDS, IDS, KEY)

    return jax.value_and_grad(loss), parameters


def compiled(step, parameters, is_shared):
    with shared_traces(is_shared):
        return jax.jit(step).lower(parameters).compile()


def operations(program):
    """Returns how many operations of each kind a compiled program has."""
    lines = [line.partition(" = ")[2] for line in program.as_text().splitlines()]
    kinds = [line.split("(")[0].split(" ")[-1] for line in lines if line]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.optimized
@pytest.mark.tier("full")
def test_the_program_is_the_one_of_blocks_traced_one_by_one():
    step, parameters = step_of(CONFIG)
    one, other = (compiled(step, parameters, is_shared) for is_shared in (True, False))
    assert operations(one) == operations(other)
    jax.tree.map(np.testing.assert_array_equal, one(parameters), other(parameters))


def test_four_equal_blocks_are_traced_once(traced):
    step, parameters = step_of(CONFIG)
    jax.jit(step).lower(parameters)
    assert traced == [PreNormBlock]


def test_blocks_that_see_another_window_are_another_kind(traced):
    config = TransformerLMConfig(**{**CONFIG.settings(), **WINDOWS})
    step, parameters = step_of(config)
    jax.jit(step).lower(parameters)
    assert traced == 2 * [PreNormBlock]


@pytest.mark.tier("full")
def test_without_jit_every_block_runs_by_itself(traced):
    model = TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    model.eval()
    model(jnp.asarray(IDS))
    assert len(traced) == 4
    # Gradients too: a program would be compiled in every step.
    step, parameters = step_of(CONFIG)
    step(parameters)
    assert len(traced) == 8


def test_a_block_that_is_recorded_has_a_trace_of_its_own():
    definition, parameters = split(TransformerLM(CONFIG, rngs=nnx.Rngs(0)))

    def masks(parameters):
        model = merge(definition, parameters)
        model.train()
        layers.seed_dropout(model, KEY)
        places = layers.dropout_modules(model)
        for place in places.values():
            place.recording = True
        model(IDS)
        return {path: place.last_keep for path, place in places.items()}

    found = jax.jit(masks)(parameters)
    first, second = (found[f"blocks.{i}.feed_forward_residual_dropout"] for i in (0, 1))
    assert first.shape == second.shape == (2, 8, 8)
    assert (first != second).any()


def test_keys_and_values_of_a_cache_are_written(traced):
    definition, parameters = split(TransformerLM(CONFIG, rngs=nnx.Rngs(0)))

    def logits(parameters):
        model = merge(definition, parameters)
        model.eval()
        cache = make_cache(CONFIG, 2, 8, jnp.float32)
        first = model(jnp.asarray(IDS[:, :5]), cache=cache)
        rest = model(jnp.asarray(IDS[:, 5:]), cache=cache)
        return jnp.concatenate([first, rest], axis=1), model(jnp.asarray(IDS))

    found, expected = jax.jit(logits)(parameters)
    # One kind of block in each of three passes.
    assert len(traced) == 3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.tier("full")
def test_what_all_blocks_take_from_around_has_its_gradient():
    config = EncoderDecoderConfig(
        source_vocab_size=11, target_vocab_size=11, context_length=8, num_encoder_layers=2,
        num_decoder_layers=2, d_model=8, num_heads=2, d_ff=16, positions="relative_buckets",
    )  # fmt: skip
    definition, parameters = split(EncoderDecoder(config, rngs=nnx.Rngs(0)))

    def loss(parameters):
        model = merge(definition, parameters)
        model.eval()
        return jnp.sin(model(IDS, IDS[:, ::-1])).sum()

    def gradients(is_shared):
        with shared_traces(is_shared), jax.enable_x64(True):
            wide = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)
            return jax.jit(jax.grad(loss))(wide)

    one, other = gradients(True), gradients(False)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), one, other)
    assert all(gradient.any() for name, gradient in one.items() if "position" in name)
