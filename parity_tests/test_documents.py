"""Targets that do not count, and documents that share a row: the same on both sides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.nn import functional

import torch_ref.config
import torch_ref.masks
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.masks import document_mask, document_positions
from jaxformer.parameters import split
from jaxformer.porting import export_arrays
from jaxformer.train_step import TrainState, evaluation_step, language_model_loss, train_step
from jaxformer.training.parallel import MeshStrategy, PmapStrategy, StepSpec
from jaxformer.transformer_lm import TransformerLM
from parity_tests.twins import copy_to_torch
from tests.support.tiers import full_after

V, T, A, B = 29, 13, 3, 4
CONFIG = TransformerLMConfig(
    vocab_size=V, context_length=T, d_model=24, num_layers=2, num_heads=3, d_ff=40
)
# Every way to know a position that documents in one row allow.
MODELS = {
    "learned": {},
    "rotary": {"positions": "rotary", "num_kv_heads": 1, "sliding_window": 3},
    "alibi": {"positions": "alibi"},
    "relative": {"positions": "relative", "max_relative_position": 4},
    "sinusoidal": {"positions": "sinusoidal"},
    "none": {"positions": "none"},
}
OPTIMIZER = OptimizerConfig(
    warmup_steps=2, decay_steps=20, learning_rate=3e-3, clip_norm=0.5, z_loss=1e-3,
    label_smoothing=0.1,
)  # fmt: skip


def build(config):
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    definition, parameters = split(model)
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**config.settings())
    ).double()
    copy_to_torch(model, twin)
    return definition, {n: p.astype("float64") for n, p in parameters.items()}, twin


def documents(seed, rows=(A, B)):
    """Ids, targets of which about a half counts, and documents of random lengths."""
    random = np.random.default_rng(seed)
    inputs, targets = random.integers(0, V, (2, *rows, T))
    targets[random.random(targets.shape) < 0.5] = -100
    return inputs, targets, np.cumsum(random.random((*rows, T)) < 0.3, axis=-1)


@pytest.mark.parametrize("name", full_after(1, MODELS))
def test_a_document_is_computed_as_if_it_were_alone(name, float64):
    definition, parameters, _ = build(dataclasses.replace(CONFIG, **MODELS[name]))
    lengths = (5, 2, 6)
    inputs, targets, _ = documents(1, (1,))
    segments = np.repeat([1, 2, 3], lengths)[None]
    sum_losses = jax.jit(functools.partial(evaluation_step, definition=definition))
    ends = np.cumsum(lengths)
    alone = sum(
        sum_losses(parameters, inputs[:, a:b], targets[:, a:b], targets[:, a:b] >= 0)
        for a, b in zip(ends - lengths, ends, strict=True)
    )
    packed = sum_losses(parameters, inputs, targets, targets >= 0, segments)
    np.testing.assert_allclose(packed, alone, rtol=0, atol=1e-12 * float(alone))
    # Without segments the second document sees the first.
    mixed = sum_losses(parameters, inputs, targets, targets >= 0)
    assert abs(float(mixed - alone)) > 1e-6 * float(alone)


def test_masks_and_positions_of_documents_are_the_same():
    segments = documents(2)[2][0]
    for function in (document_mask, document_positions):
        twin = getattr(torch_ref.masks, function.__name__)
        expected = twin(torch.from_numpy(segments)).numpy()
        np.testing.assert_array_equal(function(jnp.asarray(segments)), expected)


def test_the_loss_and_its_gradients_are_those_of_ignore_index(float64):
    definition, parameters, twin = build(CONFIG)
    inputs, targets, _ = (x[0] for x in documents(3))
    divisor = jnp.asarray(float((targets >= 0).sum()))

    def loss(parameters):
        return language_model_loss(definition, parameters, inputs, targets, None, divisor=divisor)

    value, gradients = jax.jit(jax.value_and_grad(loss))(parameters)
    logits = twin(torch.from_numpy(inputs))
    expected = functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-13)
    for name, gradient in export_arrays(gradients).items():
        reference = dict(twin.named_parameters())[name].grad.numpy()
        np.testing.assert_allclose(gradient, reference, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("has_segments", full_after(1, [True, False]))
@pytest.mark.parametrize("logits_at_once", full_after(0, [2000, chunked_loss.LOGITS_AT_ONCE]))
def test_steps_agree_with_torch(has_segments, logits_at_once, monkeypatch, float64):
    """Also where micro-batches count differently many targets, or none."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", logits_at_once)
    definition, parameters, twin = build(CONFIG)
    state = TrainState.create(parameters, OPTIMIZER)
    step = jax.jit(
        functools.partial(train_step, definition=definition, optimizer=OPTIMIZER, masked=True)
    )
    optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(OPTIMIZER))
    reference = torch_ref.train_step.TrainState.create(twin, optimizer)
    for number in range(8):
        batch = documents(number)[: 3 if has_segments else 2]
        batch[1][1] = -100 if number == 3 else batch[1][1]
        batch[1][:] = -100 if number == 5 else batch[1]
        state, found = step(state, batch, None)
        reference, expected = torch_ref.train_step.train_step(
            reference,
            tuple(torch.from_numpy(x).clone() for x in batch),
            optimizer=optimizer,
            masked=True,
        )
        assert (float(found["train_loss"]) == 0) is (number == 5)
        for name in ("train_loss", "grad_norm"):
            np.testing.assert_allclose(
                float(found[name]), float(expected[name]), rtol=0, atol=1e-11, err_msg=name
            )


@pytest.mark.tier("full")
@pytest.mark.parametrize("strategy", ["pmap", "mesh"])
def test_devices_share_what_counts(strategy, float64):
    """However the rows that count lie, as one device has it."""
    definition, parameters, _ = build(CONFIG)
    inputs, targets, segments = documents(7, (1, 8))
    targets[0, :3] = -100
    one, _ = train_step(
        TrainState.create(parameters, OPTIMIZER),
        (inputs, targets, segments),
        None,
        definition=definition,
        optimizer=OPTIMIZER,
        masked=True,
    )
    spec = StepSpec(
        definition=definition,
        shapes=parameters,
        optimizer=OPTIMIZER,
        seed=0,
        batch_size=8,
        context_length=T,
        uses_dropout=False,
        row="documents",
    )
    devices = jax.local_devices()[:4]
    made = PmapStrategy(spec, devices) if strategy == "pmap" else MeshStrategy(spec, devices)
    rows = np.stack([inputs[0], targets[0], segments[0]], axis=1).reshape(8, -1).astype(np.int32)
    placed = made.place_windows(lambda chosen: rows[chosen][None], 1)
    state, history = made.train(
        made.place(TrainState.create(parameters, OPTIMIZER)), None, placed, 1
    )
    assert history["train_loss"][0] > 0
    for name, value in one.parameters.items():
        found = made.fetch(state.parameters)[name]
        np.testing.assert_allclose(found, value, rtol=0, atol=1e-12, err_msg=name)
