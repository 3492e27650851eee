"""The same steps on both sides and on any number of devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.config
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.char_data import TokenIdsDataset, batch_at, window_starts
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.parameters import set_parameters, split
from jaxformer.porting import export_arrays
from jaxformer.train_step import TrainState, train_step
from jaxformer.training.parallel import PmapStrategy, StepSpec
from jaxformer.transformer_lm import TransformerLM
from parity_tests.twins import copy_to_torch
from tests.support.tiers import FULL, full_after

pytestmark = pytest.mark.optimized

CONFIG = TransformerLMConfig(
    vocab_size=29, context_length=13, d_model=24, num_layers=2, num_heads=3, d_ff=40
)
OPTIMIZER = OptimizerConfig(warmup_steps=7, decay_steps=40, learning_rate=3e-3, clip_norm=0.5)
IDS = (np.arange(400) * 7 + np.random.default_rng(5).integers(0, 3, 400)).astype(np.int32) % 29


def build(config=CONFIG):
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    definition, parameters = split(model)
    parameters = {name: p.astype(jnp.float64) for name, p in parameters.items()}
    set_parameters(model, parameters)
    return model, definition, parameters


def build_twin(model):
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**model.config.settings())
    )
    copy_to_torch(model, twin)
    return twin


@pytest.mark.parametrize("logits_at_once", full_after(1, [chunked_loss.LOGITS_AT_ONCE, 2000]))
@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=FULL), 3])
def test_fifty_steps_of_adamw_agree_with_torch(accumulation, logits_at_once, monkeypatch):
    """Also with the logits of some positions at a time, as a large vocabulary has them."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", logits_at_once)
    model, definition, parameters = build()
    twin = build_twin(model)
    state = TrainState.create(parameters, OPTIMIZER)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=OPTIMIZER))
    torch_optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(OPTIMIZER))
    torch_state = torch_ref.train_step.TrainState.create(twin, torch_optimizer)
    dataset = TokenIdsDataset(IDS, CONFIG.context_length)
    clipped = 0
    for number in range(50):
        inputs, targets = (
            a.reshape(accumulation, 6 // accumulation, -1) for a in batch_at(dataset, 3, number, 6)
        )
        state, candidate = step(state, (inputs, targets), None)
        torch_state, reference = torch_ref.train_step.train_step(
            torch_state,
            (torch.from_numpy(inputs).long(), torch.from_numpy(targets).long()),
            optimizer=torch_optimizer,
        )
        clipped += float(candidate["grad_norm"]) > OPTIMIZER.clip_norm
        for name in ("train_loss", "grad_norm", "learning_rate"):
            np.testing.assert_allclose(
                float(candidate[name]), float(reference[name]), rtol=0, atol=1e-10, err_msg=name
            )
    assert clipped > 0
    assert float(candidate["train_loss"]) < 3.0
    expected = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    for name, value in export_arrays(state.parameters).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-9, err_msg=name)


def run_parallel(devices, batch_size=16, accumulation=1, steps=20, per_call=20, dropout=0.0):
    config = dataclasses.replace(CONFIG, residual_dropout=dropout)
    _, definition, parameters = build(config)
    spec = StepSpec(
        definition=definition,
        optimizer=OPTIMIZER,
        shapes=parameters,
        seed=1,
        batch_size=batch_size,
        accumulation=accumulation,
        context_length=CONFIG.context_length,
        uses_dropout=dropout > 0,
    )
    parallel = PmapStrategy(spec, jax.local_devices()[:devices])
    state = parallel.place(TrainState.create(parameters, OPTIMIZER))
    tokens = parallel.place_tokens(IDS)
    losses = []
    for first in range(0, steps, per_call):
        starts = np.stack(
            [window_starts(1, first + i, batch_size, len(IDS) - 13) for i in range(per_call)]
        )
        state, history = parallel.train(state, tokens, starts, per_call)
        losses.extend(history["train_loss"])
    return np.asarray(losses), parallel.fetch(state.parameters)


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=FULL), 2])
def test_eight_devices_and_one_give_the_same_losses(accumulation):
    one, parameters_of_one = run_parallel(1)
    eight, parameters_of_eight = run_parallel(8, accumulation=accumulation)
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-10)
    assert one[-1] < one[0]
    for name, value in parameters_of_one.items():
        np.testing.assert_allclose(value, parameters_of_eight[name], rtol=0, atol=1e-9)


@pytest.mark.tier("full")
def test_a_run_cut_into_calls_computes_the_same_bits():
    whole, parameters = run_parallel(2, dropout=0.3)
    cut, parameters_of_cut = run_parallel(2, dropout=0.3, per_call=4)
    assert (whole == cut).all()
    for name, value in parameters.items():
        assert (value == parameters_of_cut[name]).all()


@pytest.mark.parametrize("accumulation", [1, pytest.param(2, marks=FULL)])
@pytest.mark.tier("full")
def test_eight_devices_drop_what_one_does(accumulation):
    one, parameters_of_one = run_parallel(1, dropout=0.3, accumulation=accumulation)
    eight, parameters_of_eight = run_parallel(8, dropout=0.3, accumulation=accumulation)
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-10)
    for name, value in parameters_of_one.items():
        np.testing.assert_allclose(value, parameters_of_eight[name], rtol=0, atol=1e-9)


@pytest.mark.tier("full")
def test_evaluation_over_devices_is_the_plain_mean():
    from jaxformer.char_data import evaluation_windows
    from jaxformer.losses import token_losses

    model, definition, parameters = build()
    starts, mask = evaluation_windows(len(IDS), CONFIG.context_length)
    spec = StepSpec(
        definition=definition,
        optimizer=OPTIMIZER,
        shapes=parameters,
        seed=1,
        batch_size=6,
        context_length=CONFIG.context_length,
    )
    results = []
    for devices in (1, 3):
        parallel = PmapStrategy(spec, jax.local_devices()[:devices])
        results.append(
            parallel.evaluate(
                parallel.place(parameters), parallel.place_tokens(IDS), starts, mask, 4
            )
        )
    model.eval()
    windows = IDS[starts[:, None] + np.arange(CONFIG.context_length + 1)]
    losses = np.asarray(token_losses(model(windows[:, :-1]), windows[:, 1:]))
    assert mask.sum() == len(IDS) - 1
    np.testing.assert_allclose(results, losses[mask].mean(), rtol=0, atol=1e-12)
