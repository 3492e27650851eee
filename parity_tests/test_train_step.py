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
import torch_ref.losses
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer.char_data import TokenIdsDataset, batch_at, window_starts
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.execution import chunked_loss
from jaxformer.losses import token_losses
from jaxformer.parameters import set_parameters, split
from jaxformer.porting import export_arrays
from jaxformer.train_step import TrainState, train_step
from jaxformer.training.parallel import PmapStrategy, StepSpec
from jaxformer.training.state_arrays import averaged_parameters
from jaxformer.transformer_lm import TransformerLM
from parity_tests.twins import copy_to_torch
from tests.support.tiers import FULL, full_after

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


# As users compile it; what devices share out is the same whichever way a program is compiled.
@pytest.mark.optimized
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


@pytest.mark.parametrize("logits_at_once", full_after(0, [2000, chunked_loss.LOGITS_AT_ONCE]))
def test_losses_averages_and_noise_agree_with_torch(logits_at_once, monkeypatch):
    """Fifty steps with z-loss and label smoothing, an average of weights, and norms of parts."""
    monkeypatch.setattr(chunked_loss, "LOGITS_AT_ONCE", logits_at_once)
    optimizer = dataclasses.replace(
        OPTIMIZER, z_loss=1e-2, label_smoothing=0.1, ema=0.9, noise_scale=True
    )
    model, definition, parameters = build()
    twin = build_twin(model)
    state = TrainState.create(parameters, optimizer)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=optimizer))
    torch_optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(optimizer))
    torch_state = torch_ref.train_step.TrainState.create(twin, torch_optimizer)
    dataset = TokenIdsDataset(IDS, CONFIG.context_length)
    for number in range(50):
        batch = tuple(a.reshape(3, 2, -1) for a in batch_at(dataset, 3, number, 6))
        state, candidate = step(state, batch, None)
        torch_state, reference = torch_ref.train_step.train_step(
            torch_state,
            tuple(torch.from_numpy(a).long() for a in batch),
            optimizer=torch_optimizer,
        )
        assert candidate.keys() == reference.keys()
        for name, value in reference.items():
            np.testing.assert_allclose(candidate[name], value, rtol=0, atol=1e-10, err_msg=name)
        assert float(candidate["part_grad_norm"]) > float(candidate["grad_norm"])
    expected = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    for name, value in export_arrays(state.parameters).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-9, err_msg=name)
    for name, value in export_arrays(averaged_parameters(state)).items():
        np.testing.assert_allclose(value, torch_state.ema[name], rtol=0, atol=1e-9, err_msg=name)
        # The gradient of a key's bias is zero in exact arithmetic.
        assert np.abs(value - expected[name]).max() > (0 if "k_proj.bias" in name else 1e-6)


EXPERTS = dataclasses.replace(
    CONFIG,
    num_layers=3,
    activation="swiglu",
    num_experts=5,
    expert_d_ff=14,
    shared_expert_d_ff=10,
    dense_layers=(1,),
    balance_loss=0.3,
)


@pytest.mark.tier("full")
def test_steps_with_experts_and_their_balance_loss_agree_with_torch():
    model, definition, parameters = build(EXPERTS)
    twin = build_twin(model)
    state = TrainState.create(parameters, OPTIMIZER)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=OPTIMIZER))
    torch_optimizer = torch_ref.config.OptimizerConfig(**dataclasses.asdict(OPTIMIZER))
    torch_state = torch_ref.train_step.TrainState.create(twin, torch_optimizer)
    dataset = TokenIdsDataset(IDS, CONFIG.context_length)
    for number in range(20):
        batch = tuple(a.reshape(2, 3, -1) for a in batch_at(dataset, 3, number, 6))
        state, candidate = step(state, batch, None)
        torch_state, reference = torch_ref.train_step.train_step(
            torch_state, tuple(torch.from_numpy(a).long() for a in batch), optimizer=torch_optimizer
        )
        for name, value in reference.items():
            np.testing.assert_allclose(candidate[name], value, rtol=0, atol=1e-10, err_msg=name)
    expected = {name: p.detach().numpy() for name, p in twin.named_parameters()}
    for name, value in export_arrays(state.parameters).items():
        np.testing.assert_allclose(value, expected[name], rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("settings", [{"z_loss": 0.03}, {"label_smoothing": 0.2}], ids=str)
def test_each_term_of_the_loss_is_torchs_and_its_formulas(settings):
    random = np.random.default_rng(4)
    logits, targets = 3 * random.standard_normal((2, 5, 7)), random.integers(0, 7, (2, 5))

    def mean(logits):
        return jnp.mean(token_losses(logits, jnp.asarray(targets), **settings))

    value, gradient = jax.value_and_grad(mean)(jnp.asarray(logits))
    given = torch.from_numpy(logits).requires_grad_()
    expected = torch_ref.losses.token_losses(given, torch.from_numpy(targets), **settings).mean()
    expected.backward()
    normalizer = np.log(np.exp(logits).sum(-1))
    log_p = logits - normalizer[..., None]
    share = settings.get("label_smoothing", 0.0)
    formula = -(1 - share) * np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
    formula += -share * log_p.mean(-1) + settings.get("z_loss", 0.0) * normalizer**2
    np.testing.assert_allclose(value, formula.mean(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(value, expected.detach(), rtol=0, atol=1e-13)
    np.testing.assert_allclose(gradient, given.grad, rtol=0, atol=1e-14)


def some_devices(count):
    here = jax.local_devices()
    if len(here) < count:
        pytest.skip(f"needs {count} devices: here are {len(here)}")
    return here[:count]


def run_parallel(
    devices, batch_size=16, accumulation=1, steps=20, per_call=20, dropout=0.0, config=CONFIG
):
    config = dataclasses.replace(config, residual_dropout=dropout)
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
    parallel = PmapStrategy(spec, some_devices(devices))
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
def test_eight_devices_and_one_balance_experts_alike():
    one, parameters_of_one = run_parallel(1, config=EXPERTS)
    eight, parameters_of_eight = run_parallel(8, config=EXPERTS)
    np.testing.assert_allclose(eight, one, rtol=0, atol=1e-10)
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
        parallel = PmapStrategy(spec, some_devices(devices))
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
