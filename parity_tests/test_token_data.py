"""The same folder gives the same batches on both sides, and the same training."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.char_data
import torch_ref.config
import torch_ref.packing
import torch_ref.parameters
import torch_ref.sampling
import torch_ref.token_data
import torch_ref.train_step
import torch_ref.transformer_lm
from jaxformer import char_data, packing, sampling, token_data
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.parameters import split
from jaxformer.porting import export_arrays
from jaxformer.train_step import TrainState, train_step
from jaxformer.transformer_lm import TransformerLM
from tests.support.folders_of_tokens import write_folder, write_nanogpt
from tests.support.tiers import full_after

T, B, V, STEPS = 13, 7, 311, 100
SIDES = [
    (token_data, char_data, sampling, packing),
    (torch_ref.token_data, torch_ref.char_data, torch_ref.sampling, torch_ref.packing),
]


def ids(count=4321):
    # Not uniform, so that there is something to learn.
    return (np.random.default_rng(0).random(count) ** 3 * V).astype(np.int64)


@pytest.fixture(scope="module", params=["shards", "uint32", "nanogpt"])
def folder(request, tmp_path_factory):
    splits = {"train": ids(), "val": ids(200)}
    path = tmp_path_factory.mktemp("tokens")
    if request.param == "nanogpt":
        return write_nanogpt(path, splits)
    dtype = "uint32" if request.param == "uint32" else "uint16"
    return write_documents(path, splits, shard=97, dtype=dtype)


def write_documents(path, splits, **more):
    """Documents of 1 to 60 tokens, of which about a half belongs to answers."""
    random = np.random.default_rng(2)
    documents, answers = {}, {}
    for name, found in splits.items():
        ends = np.cumsum(random.integers(1, 61, len(found)))
        documents[name] = [0, *ends[ends < len(found)]]
        answers[name] = random.random(len(found)) < 0.5
    if more.pop("has_answers", False):
        more["answers"] = answers
    return write_folder(path, splits, vocab_size=V, documents=documents, **more)


def batch(side, folder, kind, step, seed=5):
    tokens, _, orders, packings = side
    form = packings.PackedRows if "packed" in kind else tokens.TokenWindows
    split = tokens.TokenFolder(folder)
    rows = form(split.train, T)
    if "mixed" in kind:
        rows = orders.MixedRows([rows, form(split.val, T)], [0.7, 0.3])
    order = "random" if "random" in kind else "epoch"
    return orders.batch_of(rows, orders.draw_rows(rows, order, seed, step, B))


@pytest.mark.parametrize("sampling", ["random", "epoch", "random mixed", "epoch mixed"])
def test_batches_are_the_same_token_for_token(folder, sampling):
    for step in (0, 1, 46, 12_345):
        (a, b), (c, d) = (batch(side, folder, sampling, step) for side in SIDES)
        np.testing.assert_array_equal(a, c)
        np.testing.assert_array_equal(b, d)
        assert a.shape == (B, T)
        np.testing.assert_array_equal(a[:, 1:], b[:, :-1])


def test_they_are_those_of_the_ids_in_memory(folder):
    dataset = char_data.TokenIdsDataset(ids().astype(np.int32), T)
    expected = char_data.batch_at(dataset, 5, 3, B)
    for a, b in zip(batch(SIDES[0], folder, "random", 3), expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_folder_shows_its_sizes(folder):
    for side in SIDES:
        made = side[0].TokenFolder(folder)
        sizes = f"{len(made.train):,} + {len(made.val):,} tokens of {made.vocab_size:,}"
        assert repr(made) == f"<TokenFolder: {folder}, {sizes}>"


def test_both_know_a_folder_by_the_same_fingerprint(folder):
    first, second = (side[0].TokenFolder(folder) for side in SIDES)
    assert first.fingerprint() == second.fingerprint()
    assert (first.vocab_size, len(first.val)) == (second.vocab_size, len(second.val))


@pytest.mark.parametrize("kind", ["packed", "packed mixed"])
@pytest.mark.parametrize("has_answers", [False, True])
def test_packed_batches_are_the_same(tmp_path, has_answers, kind):
    path = write_documents(tmp_path, {"train": ids(), "val": ids(50)}, has_answers=has_answers)
    for step in (0, 1, 46, 12_345):
        found, expected = (batch(side, path, kind, step) for side in SIDES)
        assert len(found) == 3
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)
            assert a.shape == (B, T)
    windows = [batch(side, path, "epoch", 3) for side in SIDES]
    np.testing.assert_array_equal(*(arrays[1] for arrays in windows))
    assert (windows[0][1] < 0).any() == has_answers


@pytest.mark.parametrize(
    ("kind", "has_answers"),
    full_after(1, [("packed", True), ("packed", False), ("random", False), ("epoch", True)]),
)
@pytest.mark.tier("full")
def test_a_hundred_steps_on_a_folder_are_the_same(tmp_path, kind, has_answers, float64):
    splits = {"train": ids(), "val": ids(50)}
    path = write_documents(tmp_path, splits, shard=97, has_answers=has_answers)
    masked = has_answers or kind == "packed"
    config = TransformerLMConfig(
        vocab_size=V, context_length=T, d_model=24, num_layers=2, num_heads=3, d_ff=40
    )
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=20, decay_steps=STEPS)
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    parameters = {name: p.astype("float32").astype("float64") for name, p in parameters.items()}
    state = TrainState.create(parameters, optimizer)
    step = jax.jit(
        functools.partial(train_step, definition=definition, optimizer=optimizer, masked=masked)
    )

    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**config.settings())
    ).double()
    torch_ref.parameters.set_parameters(twin, export_arrays(parameters))
    settings = torch_ref.config.OptimizerConfig(**dataclasses.asdict(optimizer))
    reference = torch_ref.train_step.TrainState.create(twin, settings)

    losses = []
    for number in range(STEPS):
        arrays = tuple(a[None] for a in batch(SIDES[0], path, kind, number))
        state, metrics = step(state, arrays, None)
        rows = batch(SIDES[1], path, kind, number)
        reference, expected = torch_ref.train_step.train_step(
            reference,
            tuple(torch.from_numpy(a).long()[None] for a in rows),
            optimizer=settings,
            masked=masked,
        )
        losses.append((float(metrics["train_loss"]), float(expected["train_loss"])))
    candidate, twins = np.array(losses).T
    np.testing.assert_allclose(candidate, twins, rtol=0, atol=1e-9)
    assert candidate[-10:].mean() < candidate[:10].mean() - 0.3
