"""Learning rates on both sides, and against the formulas themselves."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxformer.optimizers as candidate
import torch_ref.config
import torch_ref.optimizers as reference
from jaxformer.config import OptimizerConfig

EPS = np.finfo(np.float64).eps
SCHEDULES = {
    "default": OptimizerConfig(decay_steps=300),
    "no warm-up": OptimizerConfig(warmup_steps=0, decay_steps=40),
    "no decay": OptimizerConfig(warmup_steps=7, decay_steps=None),
    "neither": OptimizerConfig(warmup_steps=0, decay_steps=None),
    "decay ends in the warm-up": OptimizerConfig(warmup_steps=50, decay_steps=20),
    "decay ends with the warm-up": OptimizerConfig(warmup_steps=30, decay_steps=30),
    "decay of one step": OptimizerConfig(warmup_steps=30, decay_steps=31),
    "rising": OptimizerConfig(learning_rate=1e-4, min_learning_rate=3e-3, decay_steps=200),
    "linear": OptimizerConfig(schedule="linear", warmup_steps=9, decay_steps=200),
    "constant": OptimizerConfig(schedule="constant", warmup_steps=9, decay_steps=200),
    "wsd": OptimizerConfig(schedule="wsd", decay_share=0.4, warmup_steps=9, decay_steps=200),
    "wsd without an end": OptimizerConfig(schedule="wsd", decay_steps=None),
    "to zero": OptimizerConfig(min_learning_rate=0.0, warmup_steps=3, decay_steps=90),
}


def expected_rate(config, step):
    """The schedule as nanoGPT writes it, with a cosine of at least one step."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    if config.decay_steps is None or config.schedule == "constant":
        return config.learning_rate
    end = max(config.decay_steps, config.warmup_steps + 1)
    if step > end:
        return config.min_learning_rate
    share = (step - config.warmup_steps) / (end - config.warmup_steps)
    if config.schedule != "cosine":
        # Along a line from its beginning, which is the end of the warm-up for linear.
        falls = 1.0 if config.schedule == "linear" else config.decay_share
        passed = max(0.0, (share - (1 - falls)) / falls)
        return (1 - passed) * config.learning_rate + passed * config.min_learning_rate
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return config.min_learning_rate + cosine * (config.learning_rate - config.min_learning_rate)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_schedule_is_the_same_at_every_step(name):
    config = SCHEDULES[name]
    twin = torch_ref.config.OptimizerConfig(**dataclasses.asdict(config))
    steps = range(330)
    rates = np.asarray(
        jax.jit(jax.vmap(lambda s: candidate.learning_rate(config, s)))(jnp.arange(330))
    )
    torch_rates = np.array([reference.learning_rate(twin, step) for step in steps])
    formula = np.array([expected_rate(config, step) for step in steps])
    largest = max(config.learning_rate, config.min_learning_rate)
    assert rates.dtype == np.float64
    # A share is rounded to EPS, and wsd stretches a part of it to the whole.
    bound = 4 * EPS * largest / (config.decay_share if config.schedule == "wsd" else 1)
    assert np.abs(rates - torch_rates).max() <= bound
    assert np.abs(torch_rates - formula).max() <= bound
    assert float(candidate.learning_rate(config, 17)) == pytest.approx(torch_rates[17], rel=4 * EPS)


def test_the_schedule_at_the_corners():
    for rate in (candidate.learning_rate, reference.learning_rate):
        default, none = SCHEDULES["default"], SCHEDULES["neither"]
        assert float(rate(default, 0)) == pytest.approx(1e-3 / 101, rel=1e-15)
        assert float(rate(default, 99)) == pytest.approx(1e-3 * 100 / 101, rel=1e-15)
        assert float(rate(default, 100)) == pytest.approx(1e-3, rel=1e-15)
        assert float(rate(default, 200)) == pytest.approx(5.5e-4, rel=1e-15)
        assert float(rate(default, 300)) == float(rate(default, 9999)) == 1e-4
        assert float(rate(none, 0)) == float(rate(none, 9999)) == 1e-3
        early = SCHEDULES["decay ends in the warm-up"]
        assert float(rate(early, 49)) == pytest.approx(1e-3 * 50 / 51, rel=1e-15)
        assert float(rate(early, 50)) == pytest.approx(1e-3, rel=1e-15)
        assert float(rate(early, 51)) == pytest.approx(1e-4, rel=1e-15)
