"""Training and generation side by side: optimizers, losses, and what the last line says."""

import dataclasses

import numpy as np
import pytest
import torch
import transformers

from jaxformer import OptimizerConfig, compare_generation, compare_training, from_torch
from jaxformer.errors import UsageError
from jaxformer.parity.comparison import training_runs
from jaxformer.parity.comparison.language_models import padding_ids
from jaxformer.parity.comparison.training import _random_batches
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


@pytest.mark.parametrize("losses", [{}, pytest.param({"z_loss": 0.1}, marks=FULL)])
def test_targets_that_pytorch_ignores_count_on_neither_side(model, losses):
    ids = np.arange(6).reshape(2, 3)
    some = np.where(ids < 4, ids, -100)
    config = OptimizerConfig(**SETTINGS, **losses)
    of_some = compare_training(model, batches=lambda step: (ids, some), steps=1, optimizer=config)
    assert of_some.verdict in ("exact", "rounding")
    kept = torch.as_tensor(some.ravel()) >= 0
    with torch.no_grad():
        logits = model(torch.as_tensor(ids)).double().flatten(0, 1)[kept]
    entropy = torch.nn.functional.cross_entropy(logits, torch.as_tensor(some.ravel())[kept])
    extra = losses.get("z_loss", 0) * logits.logsumexp(-1).square().mean()
    assert of_some.steps[0].reference == pytest.approx(float(entropy + extra), rel=1e-5)


def test_random_batches_are_without_the_padding_that_pytorch_does_not_train():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=7, hidden_size=6, intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=20,
    )  # fmt: skip
    module = transformers.BertForMaskedLM(config)
    inputs, targets = _random_batches(from_torch(module).config, padding_ids(module))(0)
    assert set(inputs.ravel()) | set(targets.ravel()) == set(range(1, 7))


IDS = np.ones((2, 3), int)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (IDS, r"batch 0 must be a pair, inputs and targets: got shape \(2, 3\)"),
        (None, "batch 0 must be a pair, inputs and targets: got NoneType"),
        ((IDS + 10, IDS), "the inputs of batch 0 must be ids from 0 to 10, .* got 11"),
        ((IDS, -IDS), "the targets of batch 0 must be ids from 0 to 10, .* got -1"),
        ((IDS, IDS * 1.0), "the targets of batch 0 must be token ids, .* integers: got float64"),
        ((IDS[0], IDS[0]), r"the inputs of batch 0 must be token ids \(B, T\): got shape \(3,\)"),
        (([[1], [2, 3]], IDS), "the inputs of batch 0 .*: got a list of unequal parts"),
        ((IDS, IDS[:1]), r"must be of one shape: got \(2, 3\) and \(1, 3\)"),
        ((IDS, IDS * -100), "every target of batch 0 is -100"),
        ((np.ones((1, 21), int),) * 2, "batch 0 has 21 tokens a text, and the model reads 20"),
    ],
)
def test_a_batch_of_something_else_is_rejected(model, batch, message):
    with pytest.raises(UsageError, match=message):
        compare_training(model, batches=lambda step: batch)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([1, 2], r"the prompt must be token ids \(1, T\): got shape \(2,\)"),
        (IDS, "the prompt must be one text, .*: got 2 texts"),
        ([[]], r"the prompt must be token ids \(1, T\): got shape \(1, 0\)"),
        ([[1.5]], "the prompt must be token ids, .* integers: got float64"),
        ([[11]], "the prompt must be ids from 0 to 10, .* got 11"),
        ([[-1]], "the prompt must be ids from 0 to 10, .* got -1"),
    ],
)
def test_a_prompt_of_something_else_is_rejected(model, prompt, message):
    with pytest.raises(UsageError, match=message):
        compare_generation(model, prompt=prompt)


def test_models_that_cannot_be_compared_are_rejected(model):
    other = dataclasses.replace(model.config, d_model=4)
    wider = from_torch(TransformerLM(other).eval())
    for call, message in (
        (lambda: compare_generation(model, [[1, 2]]), "jaxformer's models: got list .*prompt="),
        (lambda: compare_training(model, lambda step: IDS), "got function .*batches="),
        (lambda: compare_training(model, batches=[(IDS, IDS)]), "must be a function"),
        (lambda: compare_training(IDS), "the reference must be a torch.nn.Module: got ndarray"),
        (lambda: compare_training(model, wider), r"not of the architecture .* has shape"),
        (lambda: compare_generation(torch.nn.MultiheadAttention(4, 1)), "needs a language model"),
    ):
        with pytest.raises(UsageError, match=message):
            call()
