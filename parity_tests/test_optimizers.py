"""Clipping, decay groups and AdamW on both sides, and against the formulas themselves."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
import torch
from flax import nnx

import jaxformer.norms
import jaxformer.optimizers as candidate
import torch_ref.config
import torch_ref.norms
import torch_ref.optimizers as reference
import torch_ref.train_step
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.parameters import get_parameters, set_parameters, split
from jaxformer.porting import export_arrays
from jaxformer.porting.mapping.naming import torch_name
from jaxformer.train_step import TrainState, train_step
from jaxformer.training.state_arrays import moments_of
from jaxformer.transformer_lm import TransformerLM
from parity_tests.harness import perturbed
from parity_tests.twins import copy_to_torch
from tests.support.tiers import full_after

EPS = np.finfo(np.float64).eps
MODEL = TransformerLMConfig(
    vocab_size=23, context_length=11, d_model=20, num_layers=1, num_heads=4, num_kv_heads=2,
    head_dim=6, d_ff=34, tie_embeddings=False, head_bias=True,
)  # fmt: skip


def torch_config(config):
    return torch_ref.config.OptimizerConfig(**dataclasses.asdict(config))


@pytest.fixture(scope="module")
def pair():
    module = TransformerLM(MODEL, rngs=nnx.Rngs(0))
    set_parameters(module, perturbed(module))
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**dataclasses.asdict(MODEL))
    )
    return module, twin


def draw_gradients(parameters, seed, size=1.0):
    random = np.random.default_rng(seed)
    return {
        name: jnp.asarray(size * random.standard_normal(parameters[name].shape))
        for name in sorted(parameters)
    }


def give_gradients(twin, gradients):
    arrays = export_arrays(gradients)
    for name, parameter in twin.named_parameters():
        parameter.grad = torch.from_numpy(arrays[name].copy())


def torch_arrays(named):
    return {name: tensor.detach().numpy().copy() for name, tensor in named}


@pytest.mark.parametrize("size", [1.0, 1e-4, 0.0, 1e12], ids=["above", "below", "zero", "huge"])
@pytest.mark.parametrize("max_norm", [0.7, 1.0])
def test_clipping_is_torchs(pair, size, max_norm):
    module, twin = pair
    copy_to_torch(module, twin)
    gradients = draw_gradients(get_parameters(module), 5, size)
    clip = candidate.clip_by_global_norm(max_norm)
    clipped, _ = clip.update(gradients, clip.init(gradients))
    give_gradients(twin, gradients)
    norm = reference.clip_by_global_norm(twin, max_norm)
    expected = torch_arrays((n, p.grad) for n, p in twin.named_parameters())
    assert float(candidate.global_norm(gradients)) == pytest.approx(float(norm), rel=1e-15)
    largest = max(np.abs(g).max() for g in expected.values())
    for name, gradient in export_arrays(clipped).items():
        assert np.abs(gradient - expected[name]).max() <= 1e-15 * largest
    after = float(reference.global_norm(twin))
    if float(norm) > max_norm:
        assert after == pytest.approx(max_norm, rel=1e-5)
    else:
        assert after == pytest.approx(float(norm), rel=1e-15)


def test_a_norm_with_a_row_a_head_does_not_decay():
    kept = {"scale": False, "bias": False}
    assert candidate.decay_mask(get_parameters(jaxformer.norms.LayerNorm((3, 5)))) == kept
    assert reference.decay_mask(torch_ref.norms.LayerNorm((3, 5))) == {
        "weight": False, "bias": False
    }  # fmt: skip


def test_the_same_parameters_decay(pair):
    module, twin = pair
    copy_to_torch(module, twin)
    parameters = get_parameters(module)
    decays_by_name = {
        torch_name(name): decays for name, decays in candidate.decay_mask(parameters).items()
    }
    assert decays_by_name == reference.decay_mask(twin)
    assert {name for name, decays in decays_by_name.items() if not decays} == {
        name for name in decays_by_name if "norm" in name or name.endswith("bias")
    }
    names = {parameter: name for name, parameter in twin.named_parameters()}
    config = OptimizerConfig(weight_decay=0.3)
    groups = reference.make_optimizer(twin, torch_config(config)).param_groups
    in_group = {names[p]: group["weight_decay"] == 0.3 for group in groups for p in group["params"]}
    assert in_group == decays_by_name
    assert {group["weight_decay"] for group in groups} == {0.3, 0.0}


@pytest.mark.tier("full")
def test_decay_shrinks_matrices_alone_and_by_rate_times_decay(pair):
    module, twin = pair
    copy_to_torch(module, twin)
    config = OptimizerConfig(warmup_steps=0, learning_rate=0.02, weight_decay=0.3)
    parameters = get_parameters(module)
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    optimizer = candidate.make_optimizer(config)
    updates, _ = optimizer.update(nothing, optimizer.init(parameters), parameters)
    give_gradients(twin, nothing)
    before = torch_arrays(twin.named_parameters())
    reference.make_optimizer(twin, torch_config(config)).step()
    for name, after in export_arrays(optax.apply_updates(parameters, updates)).items():
        factor = 1 - 0.02 * 0.3 if before[name].ndim >= 2 else 1.0
        np.testing.assert_allclose(after, factor * before[name], rtol=4 * EPS, atol=0)
        torchs = twin.get_parameter(name).detach().numpy()
        np.testing.assert_allclose(torchs, factor * before[name], rtol=4 * EPS, atol=0)


@pytest.mark.parametrize("clip_norm", [1.3, None])
def test_thirty_steps_of_adamw_agree_with_torch_and_with_the_formula(pair, clip_norm):
    module, twin = pair
    copy_to_torch(module, twin)
    config = OptimizerConfig(
        learning_rate=3e-3, warmup_steps=5, decay_steps=22, weight_decay=0.2, clip_norm=clip_norm
    )
    parameters = get_parameters(module)
    optimizer = candidate.make_optimizer(config)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)
    torch_optimizer = reference.make_optimizer(twin, torch_config(config))
    formula = torch_arrays(twin.named_parameters())
    m = {name: np.zeros_like(p) for name, p in formula.items()}
    v = {name: np.zeros_like(p) for name, p in formula.items()}
    b1, b2 = config.beta1, config.beta2

    for step in range(30):
        gradients = draw_gradients(parameters, (9, step), 10.0 ** (step % 3 - 2))
        updates, state = update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)

        give_gradients(twin, gradients)
        if clip_norm is not None:
            reference.clip_by_global_norm(twin, clip_norm)
        rate = reference.learning_rate(torch_config(config), step)
        for group in torch_optimizer.param_groups:
            group["lr"] = rate
        torch_optimizer.step()

        arrays = export_arrays(gradients)
        norm = math.sqrt(sum(np.sum(g**2) for g in arrays.values()))
        scale = 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
        for name, gradient in arrays.items():
            g = scale * gradient
            m[name] = b1 * m[name] + (1 - b1) * g
            v[name] = b2 * v[name] + (1 - b2) * g**2
            direction = (m[name] / (1 - b1 ** (step + 1))) / (
                np.sqrt(v[name] / (1 - b2 ** (step + 1))) + config.eps
            )
            decay = config.weight_decay if gradient.ndim >= 2 else 0.0
            formula[name] = formula[name] - rate * (direction + decay * formula[name])

    torchs = torch_arrays(twin.named_parameters())
    adam = next(
        s
        for s in jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, optax.ScaleByAdamState))
        if isinstance(s, optax.ScaleByAdamState)
    )
    mu, nu = export_arrays(adam.mu), export_arrays(adam.nu)
    assert int(adam.count) == 30
    for name, value in export_arrays(parameters).items():
        np.testing.assert_allclose(value, torchs[name], rtol=0, atol=1e-13, err_msg=name)
        np.testing.assert_allclose(value, formula[name], rtol=0, atol=1e-13, err_msg=name)
        torch_state = torch_optimizer.state[twin.get_parameter(name)]
        assert int(torch_state["step"]) == 30
        np.testing.assert_allclose(mu[name], torch_state["exp_avg"], rtol=0, atol=1e-13)
        np.testing.assert_allclose(nu[name], torch_state["exp_avg_sq"], rtol=0, atol=1e-13)


def test_accumulated_micro_batches_are_one_batch(pair):
    module, twin = pair
    config = OptimizerConfig(warmup_steps=2, decay_steps=9, clip_norm=0.4)
    windows = np.random.default_rng(6).integers(0, 23, (2, 4, 6, 10))
    definition, parameters = split(module)
    step = jax.jit(functools.partial(train_step, definition=definition, optimizer=config))
    results = []
    for micro_batches in (1, 3):
        state = TrainState.create(parameters, config)
        copy_to_torch(module, twin)
        torch_state = torch_ref.train_step.TrainState.create(twin, torch_config(config))
        for inputs, targets in zip(*windows, strict=True):
            batch = tuple(a.reshape(micro_batches, -1, 10) for a in (inputs, targets))
            state, metrics = step(state, batch, None)
            torch_state, torch_metrics = torch_ref.train_step.train_step(
                torch_state, tuple(map(torch.from_numpy, batch)), optimizer=torch_config(config)
            )
        assert float(metrics["grad_norm"]) > config.clip_norm
        results.append(
            {f"{name} (jax)": float(value) for name, value in metrics.items()}
            | {f"{name} (torch)": float(value) for name, value in torch_metrics.items()}
            | {f"{name} (jax)": value for name, value in export_arrays(state.parameters).items()}
            | {f"{n} (torch)": value for n, value in torch_arrays(twin.named_parameters()).items()}
        )
    whole, accumulated = results
    for name, value in whole.items():
        if "k_proj.bias" not in name:  # Its gradient is only rounding, which Adam turns into steps.
            np.testing.assert_allclose(accumulated[name], value, rtol=0, atol=1e-12, err_msg=name)


# Two of its dimensions are 128 or more, so that Adafactor factors some matrices and others not.
WIDE = MODEL.replace(d_model=130, d_ff=134)
OTHERS = {
    "muon": OptimizerConfig(optimizer="muon", learning_rate=3e-3),
    "lion": OptimizerConfig(optimizer="lion", learning_rate=3e-4),
    "adafactor": OptimizerConfig(optimizer="adafactor", learning_rate=0.1),
    "sgd": OptimizerConfig(optimizer="sgd", learning_rate=0.1),
    "sgd without momentum": OptimizerConfig(optimizer="sgd", learning_rate=0.1, momentum=0.0),
}


def build_wide():
    module = TransformerLM(WIDE, rngs=nnx.Rngs(0))
    set_parameters(module, perturbed(module))
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**WIDE.settings())
    )
    copy_to_torch(module, twin)
    return module, twin


@pytest.mark.parametrize("name", full_after(1, OTHERS))
def test_sixty_steps_of_the_other_optimizers_agree_with_torch(name):
    module, twin = build_wide()
    config = dataclasses.replace(
        OTHERS[name], warmup_steps=5, decay_steps=50, weight_decay=0.2, clip_norm=3.0
    )
    parameters = get_parameters(module)
    before = export_arrays(parameters)
    optimizer = candidate.make_optimizer(config)
    state = optimizer.init(parameters)
    update = jax.jit(optimizer.update)
    torch_optimizer = reference.make_optimizer(twin, torch_config(config))
    for step in range(60):
        gradients = draw_gradients(parameters, (9, step), 10.0 ** (step % 3 - 2))
        updates, state = update(gradients, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        give_gradients(twin, gradients)
        reference.clip_by_global_norm(twin, config.clip_norm)
        for group in torch_optimizer.param_groups:
            group["lr"] = reference.learning_rate(torch_config(config), step)
        torch_optimizer.step()

    expected = torch_arrays(twin.named_parameters())
    for path, value in export_arrays(parameters).items():
        np.testing.assert_allclose(value, expected[path], rtol=0, atol=1e-12, err_msg=path)
        assert np.abs(value - before[path]).max() > 1e-4
    kept = moments_of(state)
    assert kept.keys() == config.kind.moments.keys()
    for moment, arrays in kept.items():
        # Adafactor's means of rows and columns, and the zeros in place of what it does not keep,
        # have other shapes than parameters. torch keeps no momentum of 0.
        like = {n: a for n, a in arrays.items() if a.shape == parameters[n].shape}
        assert like or moment in ("v_row", "v_col")
        for path, value in export_arrays(like).items() if config.momentum != 0 else ():
            found = torch_optimizer.state[twin.get_parameter(path)][config.kind.moments[moment]]
            np.testing.assert_allclose(value, found, rtol=0, atol=1e-12, err_msg=path)


@pytest.mark.tier("full")
def test_muon_is_optaxs(pair):
    """Of the blocks' linear layers, at AdamW's learning rate; AdamW has the rest."""
    module, _ = pair
    config = OptimizerConfig(
        optimizer="muon", warmup_steps=0, decay_steps=None, clip_norm=None, weight_decay=0.3
    )
    parameters = get_parameters(module)
    hidden = candidate.hidden_matrices(parameters)
    assert {name for name, is_hidden in hidden.items() if is_hidden} == {
        f"blocks.0.{part}_proj.kernel"
        for part in (*(f"attention.{n}" for n in "qkvo"), "feed_forward.up", "feed_forward.down")
    }
    optaxs = optax.contrib.muon(
        1e-3,
        weight_decay=0.3,
        consistent_rms=0.2,
        muon_weight_dimension_numbers={
            name: optax.contrib.MuonDimensionNumbers() if is_hidden else None
            for name, is_hidden in hidden.items()
        },
    )
    optimizers = (candidate.make_optimizer(config), optaxs)
    states = [optimizer.init(parameters) for optimizer in optimizers]
    for step in range(3):
        gradients = draw_gradients(parameters, (4, step))
        updates = []
        for place, optimizer in enumerate(optimizers):
            update, states[place] = optimizer.update(gradients, states[place], parameters)
            updates.append(update)
        for name in parameters:
            if hidden[name]:  # optax's AdamW of the rest is Nesterov's, and decays vectors too.
                np.testing.assert_allclose(updates[0][name], updates[1][name], rtol=0, atol=1e-15)


def test_newton_schulz_makes_matrices_nearly_orthogonal():
    for shape in ((17, 40), (40, 17)):
        x = np.random.default_rng(3).standard_normal(shape)
        u, _, vt = np.linalg.svd(x, full_matrices=False)
        for made in (
            candidate.orthogonalize(jnp.asarray(x), 1e-8),
            reference.orthogonalize(torch.from_numpy(x), 1e-8),
        ):
            # The singular vectors stay, the singular values come near to 1.
            turned = u.T @ np.asarray(made) @ vt.T
            values = np.diag(turned)
            np.testing.assert_allclose(turned, np.diag(values), rtol=0, atol=1e-12)
            assert values.min() > 0.65
            assert values.max() < 1.25


def test_an_optimizer_takes_the_settings_that_it_has():
    with pytest.raises(ValueError, match="momentum must be left out but with muon and sgd"):
        OptimizerConfig(optimizer="lion", momentum=0.9)
    with pytest.raises(ValueError, match="optimizer must be"):
        OptimizerConfig(optimizer="adam")
    assert OptimizerConfig(optimizer="sgd").momentum_rate == 0.9
    assert OptimizerConfig(optimizer="muon").momentum_rate == 0.95
