"""The same text becomes the same batches on both sides and on the device."""

import jax
import numpy as np
import pytest
from flax import nnx

import torch_ref.char_data
from jaxformer import char_data
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.data.corpora import load_corpus
from jaxformer.parameters import split
from jaxformer.train_step import TrainState
from jaxformer.training.parallel import PmapStrategy, StepSpec
from jaxformer.training.parallel.device_loop import cut_windows
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

T = 13
TEXT = load_corpus("python-docs").text[:20_011]


def both(name):
    return getattr(char_data, name), getattr(torch_ref.char_data, name)


def ids_of(module):
    tokenizer = module.CharTokenizer.train_from_text(TEXT)
    return module.train_validation_split(tokenizer.encode(TEXT), T)


def test_vocabulary_and_ids_are_the_same():
    candidate, reference = (t.train_from_text(TEXT) for t in both("CharTokenizer"))
    assert candidate.vocabulary == reference.vocabulary
    np.testing.assert_array_equal(candidate.encode(TEXT), reference.encode(TEXT))
    assert reference.decode(candidate.encode(TEXT)) == TEXT


def test_splits_are_the_same():
    for candidate, reference in zip(ids_of(char_data), ids_of(torch_ref.char_data), strict=True):
        np.testing.assert_array_equal(candidate, reference)


@pytest.mark.parametrize("module", [char_data, torch_ref.char_data], ids=["jaxformer", "twin"])
def test_another_word_for_what_to_do_with_them_is_rejected(module):
    with pytest.raises(ValueError, match="unknown must be error, skip or replace: got 'nope'"):
        module.CharTokenizer("ab").encode("ab", unknown="nope")


@pytest.mark.parametrize(("seed", "step"), [(0, 0), (1337, 1), (1337, 12_345), (2**63 - 1, 2)])
def test_batches_are_the_same_token_for_token(seed, step):
    batches = []
    for module in (char_data, torch_ref.char_data):
        dataset = module.TokenIdsDataset(ids_of(module)[0], T)
        batches.append(module.batch_at(dataset, seed, step, 24))
    for candidate, reference in zip(*batches, strict=True):
        assert candidate.shape == (24, T)
        np.testing.assert_array_equal(candidate, reference)
    assert len(np.unique(batches[0][0], axis=0)) > 20


@pytest.mark.parametrize("num_ids", [14, 15, 26, 27, 400])
def test_evaluation_windows_are_the_same(num_ids):
    candidate, reference = both("evaluation_windows")
    for a, b in zip(candidate(num_ids, T), reference(num_ids, T), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_device_cuts_the_windows_that_the_dataset_gives():
    ids = ids_of(char_data)[0]
    dataset = torch_ref.char_data.TokenIdsDataset(ids, T)
    starts = char_data.window_starts(3, 5, 24, len(dataset))
    inputs, targets = torch_ref.char_data.batch_at(dataset, 3, 5, 24)
    cut = jax.jit(cut_windows, static_argnums=2)(ids, starts.reshape(2, 3, 4), T)
    np.testing.assert_array_equal(cut[0].reshape(24, T), inputs)
    np.testing.assert_array_equal(cut[1].reshape(24, T), targets)


@pytest.mark.parametrize(("devices", "accumulation"), full_after(1, [(4, 3), (1, 1)]))
def test_a_parallel_step_sees_every_window_of_its_batch(devices, accumulation):
    """With all weights zero but the head's bias, the loss is a function of the targets alone."""
    ids = ids_of(char_data)[0]
    vocab_size = int(ids.max()) + 1
    config = TransformerLMConfig(
        vocab_size=vocab_size,
        context_length=T,
        d_model=6,
        num_layers=1,
        num_heads=2,
        tie_embeddings=False,
        head_bias=True,
    )
    definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
    bias = np.random.default_rng(0).standard_normal(vocab_size)
    parameters = {name: np.zeros(p.shape) for name, p in parameters.items()}
    parameters["lm_head.bias"] = bias

    optimizer = OptimizerConfig()
    spec = StepSpec(
        definition=definition,
        optimizer=optimizer,
        shapes=parameters,
        seed=0,
        batch_size=24,
        accumulation=accumulation,
        context_length=T,
        uses_dropout=False,
    )
    parallel = PmapStrategy(spec, jax.local_devices()[:devices])
    state = parallel.place(TrainState.create(parameters, optimizer))
    starts = char_data.window_starts(3, 0, 24, len(ids) - T)
    _, history = parallel.train(state, parallel.place_tokens(ids), starts[None], 1)
    dataset = torch_ref.char_data.TokenIdsDataset(ids, T)
    _, targets = torch_ref.char_data.batch_at(dataset, 3, 0, 24)
    expected = np.log(np.exp(bias).sum()) - bias[targets].mean()
    np.testing.assert_allclose(history["train_loss"], [expected], rtol=0, atol=1e-12)
