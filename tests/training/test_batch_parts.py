"""What a CPU computes in parts, a batch or an evaluation, is what the whole makes."""

import jax
import numpy as np
import pytest

from jaxformer.char_data import evaluation_windows
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.execution import batch_parts
from jaxformer.execution.attention_backends import CompilationTarget, compiled_for
from jaxformer.execution.batch_parts import TOKENS_OF_PART, count_parts
from jaxformer.execution.seeds import seed_key
from jaxformer.execution.sharding import layout
from jaxformer.train_step import TrainState, train_step
from jaxformer.training.parallel import pmap
from jaxformer.training.parallel import strategy as strategies
from tests.support.meshes import (
    IDS,
    LENGTH,
    LLAMA,
    ONE,
    dropping,
    make,
    parameter_shapes,
    parameters_of,
)


@pytest.fixture(autouse=True)
def float64():
    """So that only the order of sums differs."""
    with jax.enable_x64(True):
        yield


def step(config, monkeypatch, tokens, *, accumulation=1, masked=False, documents=False):
    """Loss, metrics and parameters after a step whose parts have so many tokens."""
    monkeypatch.setattr(batch_parts, "TOKENS_OF_PART", tokens)
    random = np.random.default_rng(0)
    shape = accumulation, 12, LENGTH
    inputs, targets = random.choice(IDS, (2, *shape)).astype(np.int32)
    if masked:
        targets = np.where(random.random(shape) < 0.3, -1, targets)
    batch = inputs, targets
    if documents:
        batch += (np.cumsum(random.random(shape) < 0.2, axis=-1, dtype=np.int32),)
    optimizer = OptimizerConfig(learning_rate=0.1, noise_scale=True)
    definition, _ = parameter_shapes(config)
    state = TrainState.create(parameters_of(config), optimizer)

    @jax.jit
    def compiled(state, batch):
        return train_step(
            state, batch, seed_key(3), definition=definition, optimizer=optimizer, masked=masked
        )

    text = str(compiled.trace(state, batch).jaxpr)
    after, metrics = compiled(state, batch)
    return metrics, after.parameters, text


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulation": 2}, {"masked": True}, {"documents": True}],
    ids=str,
)
def test_a_step_in_parts_is_that_of_the_whole_batch(monkeypatch, options):
    """With the same masks of dropout, and the same norms of gradients."""
    config = dropping(LLAMA)
    whole = step(config, monkeypatch, 10**6, **options)
    parts = step(config, monkeypatch, 3 * LENGTH, **options)
    assert f"[4,3,{LENGTH}]" in parts[2].replace(" ", "")
    assert f"[4,3,{LENGTH}]" not in whole[2].replace(" ", "")
    for one, other in zip(jax.tree.leaves(whole[:2]), jax.tree.leaves(parts[:2]), strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-10)


def test_how_experts_are_used_is_a_matter_of_the_whole_batch(monkeypatch):
    settings = {"num_experts": 4, "experts_per_token": 2, "balance_loss": 0.1}
    config = TransformerLMConfig(
        vocab_size=34, d_model=24, num_heads=4, context_length=LENGTH, num_layers=2,
        activation="swiglu", **settings,
    )  # fmt: skip
    _, _, text = step(config, monkeypatch, 3 * LENGTH)
    assert f"[4,3,{LENGTH}]" not in text.replace(" ", "")


@pytest.mark.parametrize(
    ("rows", "length", "expected"),
    [(64, 256, 8), (8, 256, 1), (6, 64, 1), (8, 1024, 4), (2, 8192, 2), (13, 256, 1), (12, 512, 3)],
)
def test_parts_have_about_as_many_tokens(rows, length, expected):
    assert count_parts(rows, length) == expected
    assert rows * length / expected >= TOKENS_OF_PART / 3 or expected == 1


def test_only_a_cpu_outside_a_mesh_computes_in_parts():
    with compiled_for(CompilationTarget("cuda", (9, 0))):
        assert count_parts(64, 256) == 1
    with layout(object()):
        assert count_parts(64, 256) == 1


def test_a_part_of_an_evaluation_has_as_many_tokens_as_suit_it(monkeypatch):
    evaluating = make(LLAMA, (2, None, None))
    assert evaluating.evaluation_batch_size == 2 * (strategies.CPU_EVALUATION_TOKENS // LENGTH)
    widest = max(max(x.shape) for x in evaluating.spec.shapes.values())
    monkeypatch.setattr(strategies, "LOGITS_AT_ONCE", 4 * widest * 3 * LENGTH)
    assert evaluating.evaluation_batch_size == 2 * 3
    monkeypatch.setattr(strategies, "LOGITS_AT_ONCE", 1)
    assert evaluating.evaluation_batch_size == 2
    assert make(LLAMA, ONE).evaluation_batch_size == 2
    assert make(LLAMA, (2, 2, 1)).evaluation_batch_size == 1, "a mesh cuts no round"


@pytest.mark.parametrize(("most", "rounds"), [(1, 2), (3, 2), (100, 4)])
def test_a_call_of_pmap_evaluates_in_rounds_that_make_the_same_mean(monkeypatch, most, rounds):
    starts, mask = evaluation_windows(len(IDS), LENGTH)
    strategy = make(LLAMA, (2, None, None))
    size = -(-len(starts) // 2 // 4 // 2) * 2
    operations = 2 * sum(x.size for x in strategy.spec.shapes.values()) * size * LENGTH
    monkeypatch.setattr(pmap, "OPERATIONS_OF_EVALUATION", most * operations)
    shapes = strategy.evaluation_shapes(strategy.spec.shapes, len(IDS), len(starts), size)
    assert shapes[2].shape[:2] == (min(rounds, -(-len(starts) // 2 // size)), 2)
    parameters, tokens = strategy.place(parameters_of(LLAMA)), strategy.place_tokens(IDS)
    found = strategy.evaluate(parameters, tokens, starts, mask, size)
    plain = make(LLAMA, ONE)
    parameters, tokens = plain.place(parameters_of(LLAMA)), plain.place_tokens(IDS)
    expected = plain.evaluate(parameters, tokens, starts, mask, 1)
    assert found == pytest.approx(expected, abs=1e-12)
