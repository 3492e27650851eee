"""Blocks in one loop: the same numbers, on one device and on a mesh, in a shorter program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.layer_scan import can_scan, scanned_layers
from jaxformer.parameters import split
from jaxformer.rematerialization import rematerialization
from jaxformer.train_step import TrainState, language_model_loss, train_step
from jaxformer.transformer_lm import TransformerLM
from tests.tiny import losses, train

CONFIG = TransformerLMConfig(
    d_model=24, num_heads=3, num_kv_heads=1, num_layers=5, context_length=40, vocab_size=31,
    residual_dropout=0.2, attention_dropout=0.1, positions="rotary", activation="swiglu",
)  # fmt: skip


def make_step(definition):
    key = jax.random.key(1)

    def step(state, batch):
        return train_step(state, batch, key, definition=definition, optimizer=OptimizerConfig())

    return step


def prepare(config=CONFIG):
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    parameters = {n: jnp.asarray(p, jnp.float64) for n, p in parameters.items()}
    ids = np.random.default_rng(0).integers(0, 31, (2, 3, 41))
    batch = jnp.asarray(ids[..., :-1]), jnp.asarray(ids[..., 1:])
    return definition, TrainState.create(parameters, OptimizerConfig()), batch


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_a_step_is_the_same_in_float64(remat):
    """With dropout, whose keys differ from layer to layer."""
    with jax.enable_x64(True), rematerialization(remat):
        definition, state, batch = prepare()
        after, metrics = jax.jit(make_step(definition))(state, batch)
        with scanned_layers():
            again, same = jax.jit(make_step(definition))(state, batch)
    np.testing.assert_allclose(same["train_loss"], metrics["train_loss"], rtol=1e-12)
    np.testing.assert_allclose(same["grad_norm"], metrics["grad_norm"], rtol=1e-12)
    for name, value in after.parameters.items():
        np.testing.assert_allclose(again.parameters[name], value, rtol=0, atol=1e-10, err_msg=name)


def test_the_program_does_not_grow_with_the_layers():
    def lines(layers):
        config = dataclasses.replace(CONFIG, num_layers=layers)
        with jax.enable_x64(True), scanned_layers():
            definition, state, batch = prepare(config)
            one = jax.tree.map(lambda x: x[0], batch)
            loss = jax.grad(lambda p: language_model_loss(definition, p, *one, jax.random.key(0)))
            text = jax.jit(loss).lower(state.parameters).as_text()
        return text.count("dot_general")

    assert lines(3) == lines(9) > 0


def test_what_differs_in_more_than_numbers_is_not_scanned():
    model = TransformerLM(CONFIG, rngs=nnx.Rngs(0))
    other = TransformerLM(dataclasses.replace(CONFIG, norm_eps=1e-3), rngs=nnx.Rngs(0))
    wider = TransformerLM(dataclasses.replace(CONFIG, d_ff=7), rngs=nnx.Rngs(0))
    assert not can_scan(model.blocks)
    with scanned_layers():
        assert can_scan(model.blocks)
        assert not can_scan(model.blocks[:1])
        assert not can_scan([*model.blocks, *other.blocks])
        assert not can_scan([*model.blocks, *wider.blocks])


def test_layers_with_masks_of_their_own_run_one_by_one():
    config = dataclasses.replace(CONFIG, sliding_window=5, full_attention_layers=(1, 3))
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    model.eval()
    ids = jnp.arange(40)[None] % 31
    with scanned_layers():
        np.testing.assert_array_equal(jax.jit(model)(ids), jax.jit(model)(ids))
        text = str(jax.make_jaxpr(lambda ids: model(ids))(ids))
    assert "scan" not in text


def test_a_run_on_a_mesh_is_the_same(text, tmp_path):
    flags = [
        "--steps", 3, "--num-layers", 3, "--devices", 4, "--strategy", "mesh", "--fsdp", 2,
        "--tensor", 2, "--residual-dropout", 0.1,
    ]  # fmt: skip
    assert train(text, tmp_path / "one", *flags) == 0
    assert train(text, tmp_path / "other", *flags, "--scan-layers") == 0
    one, other = losses(tmp_path / "one"), losses(tmp_path / "other")
    assert one.keys() == other.keys()
    np.testing.assert_allclose(list(other.values()), list(one.values()), rtol=1e-5)
