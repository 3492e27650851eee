"""Weights drawn by few programs, each for arrays of one kind, are bit-equal to those of one."""

import jax
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import EncoderDecoderConfig, OptimizerConfig, TransformerLMConfig
from jaxformer.execution import delayed_draws
from jaxformer.execution.delayed_draws import DelayedDraw, draw_arrays
from jaxformer.initializers import normal, uniform
from jaxformer.parameters import abstract, split
from jaxformer.training.initial_state import draw_parameters, plan_parameters
from jaxformer.training.parallel import StepSpec
from jaxformer.training.parallel.mesh import MeshStrategy
from jaxformer.training.parallel.pmap import PmapStrategy
from jaxformer.training.parallel.step_spec import make_model
from tests.support.tiers import full_after, full_except

SIZES = {
    "vocab_size": 29, "context_length": 13, "num_layers": 2, "d_model": 24, "num_heads": 4,
    "head_dim": 10, "d_ff": 44,
}  # fmt: skip
LLAMA = {
    "num_kv_heads": 2, "activation": "swiglu", "norm": "rms_norm", "positions": "rotary",
    "tie_embeddings": False, "qkv_bias": False,
}  # fmt: skip
EXPERTS = {"num_experts": 3, "experts_per_token": 2, "shared_expert_d_ff": 18}
MODELS = {
    **{
        scheme: TransformerLMConfig(**SIZES, initialization=scheme, tie_embeddings=False)
        for scheme in ("gpt2", "torch", "xavier_uniform", "kaiming_uniform", "normal")
    },
    "llama": TransformerLMConfig(**SIZES, **LLAMA),
    "experts": TransformerLMConfig(**SIZES, **LLAMA, **EXPERTS, initialization="torch"),
    "adapters": TransformerLMConfig(**SIZES, lora_rank=3),
    "masked": TransformerLMConfig(
        **SIZES, causal=False, num_token_types=2, head="masked_lm", pooler=True
    ),
    "t5": EncoderDecoderConfig(
        source_vocab_size=29, target_vocab_size=29, context_length=13, num_encoder_layers=2,
        num_decoder_layers=1, d_model=24, num_heads=4, d_ff=44, positions="relative_buckets",
        initialization="torch",
    ),
}  # fmt: skip
SEED = 5


def drawn_in_one_program(config):
    """The weights that a run begins with, as one compiled program draws all of them."""
    return jax.jit(lambda: split(make_model(config, nnx.Rngs(SEED)))[1])()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape), name
        assert np.array_equal(found[name], array), name


@pytest.mark.parametrize("name", full_after(1, MODELS, slow_after=5))
def test_a_models_weights_are_those_that_one_program_draws(name):
    assert_equal(draw_parameters(MODELS[name], SEED), drawn_in_one_program(MODELS[name]))


@pytest.mark.parametrize("init", full_after(1, [normal(0.02), normal(1.0), uniform(0.3)]), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (65, 63), (3, 1025, 2), (1025, 1024)], ids=str)
def test_an_array_of_any_shape_is_that_of_a_compiled_program(init, shape):
    key = jax.random.key(SEED)
    (found,) = draw_arrays({"w": DelayedDraw(init, key, shape)}).values()
    expected = jax.jit(lambda key: init(key, shape))(key)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("strategy", full_except(["pmap", "mesh"], lambda name: name == "mesh"))
@pytest.mark.tier("full")
def test_devices_hold_the_weights_that_one_program_draws(strategy):
    config = MODELS["llama"]
    definition, shapes = abstract(lambda rngs: make_model(config, rngs))
    spec = StepSpec(
        definition=definition, shapes=shapes, optimizer=OptimizerConfig(decay_steps=9), seed=1,
        batch_size=8, context_length=13,
    )  # fmt: skip
    devices = jax.devices()[:4]
    makes = {
        "pmap": lambda: PmapStrategy(spec, devices),
        "mesh": lambda: MeshStrategy(spec, devices, fsdp=2, tensor=2),
    }
    made = makes[strategy]()
    state = made.initial_state(plan_parameters(config, SEED))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made.fetch(state)) == jax.tree.map(
        lambda x: (x.shape, x.dtype), spec.state_shapes()
    )
    assert_equal(made.fetch(state.parameters), drawn_in_one_program(config))
    moments = jax.tree.leaves(made.fetch(state.optimizer_state))
    assert not any(x.any() for x in moments)


def test_a_deeper_model_needs_no_more_programs():
    def kinds(layers):
        config = TransformerLMConfig(**{**SIZES, "num_layers": layers}, initialization="torch")
        planned = plan_parameters(config, SEED).values()
        drawn = [draw for draw in planned if isinstance(draw, DelayedDraw)]
        return len(drawn), len({(draw.sample, draw.shape) for draw in drawn})

    (few, kinds_of_few), (many, kinds_of_many) = kinds(2), kinds(6)
    assert many > 2 * few
    assert kinds_of_many == kinds_of_few < few


@pytest.mark.parametrize("most", [0, 200, 2**22])
def test_arrays_that_share_a_program_are_those_of_their_own(most, monkeypatch):
    monkeypatch.setattr(delayed_draws, "MOST_TOGETHER", most)
    shapes = [(7, 5), (3,), (11, 2), (0,), (), (6, 5)]
    keys = jax.random.split(jax.random.key(SEED), len(shapes))
    laws = [normal(0.02), normal(0.02), uniform(0.3)] * 2
    kinds = {str(i): kind for i, kind in enumerate(zip(laws, keys, shapes, strict=True))}
    found = draw_arrays({name: DelayedDraw(*kind) for name, kind in kinds.items()})
    expected = {
        name: jax.jit(lambda key, init=init, shape=shape: init(key, shape))(key)
        for name, (init, key, shape) in kinds.items()
    }
    assert list(found) == list(expected)
    assert_equal(found, expected)


def test_what_is_not_drawn_yet_is_never_read():
    draw = DelayedDraw(normal(1.0), jax.random.key(0), (3, 5))
    assert draw[...] is draw
    with pytest.raises(TypeError, match="cannot be read yet"):
        draw[0]
    with pytest.raises(TypeError):
        jax.numpy.sum(draw)
