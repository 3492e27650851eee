"""Training and generation side by side: optimizers, losses, and what the last line says."""

import dataclasses

import pytest
import torch
import transformers

from jaxformer import OptimizerConfig, compare_generation, compare_training
from jaxformer.errors import UsageError
from jaxformer.parity.comparison import training_runs
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import verdict_line
from tests.support.tiers import FULL
from torch_ref.config import TransformerLMConfig
from torch_ref.transformer_lm import TransformerLM

SETTINGS = {"warmup_steps": 0, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=11, n_positions=20, n_embd=6, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = TransformerLMConfig(
        vocab_size=11, d_model=6, num_heads=2, num_layers=1, context_length=20
    )
    return TransformerLM(config).eval()


@pytest.mark.parametrize("optimizer", [pytest.param("adafactor", marks=FULL), "muon"])
def test_an_optimizer_of_whole_matrices_updates_those_of_a_fused_one(gpt2, optimizer):
    """GPT-2 has queries, keys and values in one matrix, and no ``blocks`` in its names."""
    config = OptimizerConfig(optimizer=optimizer, **SETTINGS)
    assert compare_training(gpt2, steps=2, optimizer=config).verdict in ("exact", "rounding")


def test_the_loss_is_that_of_the_settings(model):
    plain, special = (
        compare_training(model, steps=1, optimizer=OptimizerConfig(**SETTINGS, **losses))
        for losses in ({}, {"z_loss": 0.1, "label_smoothing": 0.3})
    )
    assert special.verdict in ("exact", "rounding")
    assert abs(special.steps[0].reference - plain.steps[0].reference) > 0.01
    assert abs(special.steps[0].candidate - plain.steps[0].candidate) > 0.01


def test_a_parameter_that_differs_is_not_called_the_loss(model, monkeypatch):
    made = training_runs.make_optimizer
    monkeypatch.setattr(
        training_runs, "make_optimizer", lambda config: made(dataclasses.replace(config, eps=1e-5))
    )
    report = compare_training(model, steps=1)
    step = report.first_divergence
    assert step.of_parameter
    line = verdict_line(report)
    assert f"the losses are equal, and after the update {step.worst} differs by" in line
    assert "the loss differs" not in line
    assert Report.from_dict(report.to_dict()).first_divergence == step


@pytest.mark.parametrize("count", [0, -1])
def test_a_comparison_of_nothing_is_rejected(model, count):
    with pytest.raises(UsageError, match="steps must be at least 1"):
        compare_training(model, steps=count)
    with pytest.raises(UsageError, match="tokens must be at least 1"):
        compare_generation(model, tokens=count)


def test_a_prompt_that_fills_the_context_is_rejected(model):
    with pytest.raises(UsageError, match="leaves none to generate"):
        compare_generation(model, prompt=[[1] * 20])
