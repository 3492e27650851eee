"""Blocks in one loop: the same numbers, on one device and on a mesh, in a shorter program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.execution.layer_scan import _stack, can_scan, scanned_layers
from jaxformer.execution.rematerialization import rematerialization
from jaxformer.parameters import join_path
from jaxformer.train_step import language_model_loss
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after
from tests.support.tiny import losses, train

CONFIG = TransformerLMConfig(
    d_model=12, num_heads=3, num_kv_heads=1, num_layers=3, context_length=8, vocab_size=31,
    residual_dropout=0.2, attention_dropout=0.1, positions="rotary", activation="swiglu",
)  # fmt: skip


def abstract(**changes):
    return nnx.eval_shape(
        lambda: TransformerLM(dataclasses.replace(CONFIG, **changes), rngs=nnx.Rngs(0))
    )


def make_gradient(definition, ids):
    def loss(parameters):
        key = jax.random.key(1)
        return language_model_loss(definition, parameters, ids[:, :-1], ids[:, 1:], key)

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.parametrize("remat", full_after(1, ["none", "full"]))
@pytest.mark.tier("full")
def test_losses_and_gradients_are_the_same_in_float64(remat):
    """With dropout, whose keys differ from layer to layer."""
    definition, state = nnx.split(abstract(), nnx.Param)
    random = np.random.default_rng(0)
    ids = random.integers(0, 31, (2, 9))
    with jax.enable_x64(True), rematerialization(remat):
        parameters = {
            join_path(path): jnp.asarray(random.normal(size=variable.shape) / 3)
            for path, variable in nnx.to_flat_state(state)
        }
        loss, gradients = make_gradient(definition, ids)(parameters)
        with scanned_layers():
            again, same = make_gradient(definition, ids)(parameters)
    np.testing.assert_allclose(again, loss, rtol=1e-12)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(same[name], gradient, rtol=1e-9, atol=1e-12, err_msg=name)


@pytest.mark.tier("full")
def test_the_program_does_not_grow_with_the_layers():
    def products(layers):
        definition, state = nnx.split(abstract(num_layers=layers), nnx.Param)
        shapes = {
            join_path(path): jax.ShapeDtypeStruct(variable.shape, variable.dtype)
            for path, variable in nnx.to_flat_state(state)
        }
        with scanned_layers():
            text = make_gradient(definition, np.zeros((2, 9), int)).lower(shapes).as_text()
        return text.count("dot_general")

    assert products(2) == products(6) > 0


def test_what_differs_in_more_than_numbers_is_not_scanned():
    blocks = abstract().blocks
    assert not can_scan(blocks)
    with scanned_layers():
        assert can_scan(blocks)
        assert not can_scan(blocks[:1])
        assert not can_scan([*blocks, *abstract(norm_eps=1e-3).blocks])
        assert not can_scan([*blocks, *abstract(d_ff=7).blocks])


def test_layers_with_masks_of_their_own_run_one_by_one():
    def text(model):
        model.eval()
        with scanned_layers():
            return str(jax.make_jaxpr(lambda x: run(model, x))(np.zeros((1, 8), np.int32)))

    def run(model, ids):
        definition, state = nnx.split(model)
        return nnx.merge(definition, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state))(
            ids
        )

    assert "scan" in text(abstract())
    assert "scan" not in text(abstract(sliding_window=5, full_attention_layers=(1,)))


@pytest.mark.tier("slow")
def test_a_run_on_a_mesh_is_the_same(text, tmp_path):
    flags = [
        "--steps", 2, "--num-layers", 2, "--devices", 4, "--strategy", "mesh", "--fsdp", 2,
        "--tensor", 2, "--residual-dropout", 0.1,
    ]  # fmt: skip
    assert train(text, tmp_path / "one", *flags) == 0
    assert train(text, tmp_path / "other", *flags, "--scan-layers") == 0
    one, other = losses(tmp_path / "one"), losses(tmp_path / "other")
    assert one.keys() == other.keys()
    np.testing.assert_allclose(list(other.values()), list(one.values()), rtol=1e-5)


@pytest.mark.parametrize("first", [1.0, -1.0, np.nan])
def test_gradients_of_stacked_arrays_are_cut_out_at_indices_that_xla_does_not_see(first):
    arrays = [jnp.full((3, 5), float(layer)) for layer in range(4)]
    weights = jnp.arange(60.0).reshape(4, 3, 5).at[0, 0, 0].set(first)

    @jax.jit
    def gradients(arrays):
        return jax.grad(lambda a: jnp.sum(_stack(*a) * weights))(arrays)

    for found, expected in zip(gradients(arrays), weights, strict=True):
        assert np.array_equal(found, expected, equal_nan=True)


def test_the_update_of_every_layer_is_the_same_computation():
    """Else each is compiled by itself; read from the program, as equal ones are compiled once."""

    def update(arrays, x):
        def loss(arrays):
            return jnp.sum(
                jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, _stack(*arrays))[0]
            )

        return [a - 0.1 * g for a, g in zip(arrays, jax.grad(loss)(arrays), strict=True)]

    arrays = [jnp.full((5, 5), 0.1 * layer) for layer in range(4)]
    text = jax.jit(update).lower(arrays, jnp.ones((3, 5))).compile().as_text()
    assert text.count(" call(") == 1
    assert "dynamic-slice" in text
