"""Halves of a batch write what the whole batch would."""

import threading

import jax
import numpy as np
import pytest
from flax import nnx

from jaxformer import generation
from jaxformer.config import TransformerLMConfig
from jaxformer.execution import batch_halves
from jaxformer.execution.batch_halves import cut_batch, write_beside
from jaxformer.transformer_lm import TransformerLM
from tests.support.tiers import full_after

HALVES = [slice(0, 3), slice(3, 6)]


@pytest.fixture(scope="module")
def model():
    config = TransformerLMConfig(
        vocab_size=23, context_length=24, d_model=16, num_heads=2, num_layers=2, d_ff=40
    )
    return TransformerLM(config, rngs=nnx.Rngs(0))


def test_halves_where_they_are_faster():
    assert cut_batch(32, 0, []) == [slice(0, 16), slice(16, 32)]
    # Too few rows, an odd number, too many random numbers.
    for rows, draws in [(6, 0), (33, 0), (32, 2**17)]:
        assert cut_batch(rows, draws, []) == [slice(0, rows)]
    weights = [np.empty(20_000_000, np.float32)]
    assert [len(cut_batch(rows, 0, weights)) for rows in (14, 16)] == [1, 2]


def test_a_model_on_many_devices_is_one_batch():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    everywhere = jax.device_put(np.zeros(3), sharding)
    assert cut_batch(32, 0, [everywhere]) == [slice(0, 32)]
    assert len(cut_batch(32, 0, [jax.device_put(np.zeros(3))])) == 2


def test_one_core_has_the_whole_batch(monkeypatch):
    monkeypatch.setattr(batch_halves, "count_cores", lambda: 1)
    assert cut_batch(32, 0, []) == [slice(0, 32)]


@pytest.mark.parametrize(
    "settings",
    full_after(
        1,
        [
            {"key": jax.random.key(3), "top_k": 5, "temperature": 0.7},
            {"key": jax.random.key(4), "stop_tokens": (2, 5, 11)},
            {"key": jax.random.key(3)},
            {"greedy": True},
            {"greedy": True, "use_cache": False},
        ],
    ),
)
def test_both_halves_write_what_the_batch_does(model, monkeypatch, settings):
    random = np.random.default_rng(0)
    prompt = random.integers(0, 23, (6, 9)).astype(np.int32)
    mask = np.arange(9)[None, :] >= np.array([0, 3, 1, 8, 5, 0])[:, None]
    whole = generation.generate(model, prompt, 40, mask=mask, **settings)
    monkeypatch.setattr(generation, "cut_batch", lambda *_: HALVES)
    halves = generation.generate(model, prompt, 40, mask=mask, **settings)
    np.testing.assert_array_equal(halves, whole)
    pieces = [*generation.stream(model, prompt, 40, mask=mask, chunk=7, **settings)]
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), whole)
    assert pieces[0].shape == (6, 1)
    assert max(piece.shape[1] for piece in pieces) <= 7


def test_samples_of_one_prompt(model, monkeypatch):
    prompt = np.random.default_rng(1).integers(0, 23, (6, 4)).astype(np.int32)
    keys = [jax.random.key(0), jax.random.key(1)]
    whole = [generation.generate(model, prompt, 15, key=key) for key in keys]
    monkeypatch.setattr(generation, "cut_batch", lambda *_: HALVES)
    texts = generation.stream_samples(model, prompt, 15, keys)
    for text, wanted in zip(texts, whole, strict=True):
        np.testing.assert_array_equal(np.concatenate([*text], axis=1), wanted)


def test_a_thread_with_own_settings_has_the_whole_batch():
    with jax.default_matmul_precision("bfloat16"):
        assert cut_batch(32, 0, []) == [slice(0, 32)]
    with jax.enable_x64(not jax.config.jax_enable_x64):
        assert cut_batch(32, 0, []) == [slice(0, 32)]


def test_parts_are_written_at_the_same_time():
    both = threading.Barrier(2, timeout=20)

    def part(name, pieces):
        for width in pieces:
            if width == 1:
                both.wait()
            yield np.full((1, width), ord(name))

    made = [*write_beside([part("a", [1, 3]), part("b", [1, 2, 3])])]
    # The first part ended two tokens early.
    assert [piece.shape for piece in made] == [(2, 1), (2, 2), (2, 1), (2, 2)]
    assert {tuple(piece[:, 0]) for piece in made} == {(ord("a"), ord("b"))}
    assert [*write_beside([part("a", []), part("b", [])])] == []


def test_an_error_of_one_part_is_raised():
    def broken():
        yield np.zeros((1, 1))
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        [*write_beside([broken(), iter([np.zeros((1, 1))] * 3)])]
