"""Where a text ends, and what is kept of it: stop tokens, buckets, caches and their dtype."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer import decoding, generation
from jaxformer.config import TransformerLMConfig
from jaxformer.execution import lengths
from jaxformer.parameters import split
from parity_tests.generating import BASE, CONTEXT, TOKENS, V, build, pair, prompts, torch_generate
from tests.support.tiers import full_after
from torch_ref import decoding as torch_decoding
from torch_ref import generation as torch_generation
from torch_ref.config import TransformerLMConfig as TorchTransformerLMConfig


def short_buckets(monkeypatch):
    """Prompts and caches from 4 tokens on: a text of the context grows through 6, 8, 12, 16."""
    monkeypatch.setattr(lengths, "SHORTEST_PREFILL", 4)
    monkeypatch.setattr(lengths, "SHORTEST_CACHE", 4)
    monkeypatch.setattr(lengths, "SMALLEST_CACHE_BYTES", 0)


@pytest.mark.parametrize("name", full_after(1, ["rotary", "relative"]))
@pytest.mark.parametrize("chunk", full_after(1, [1, 5, TOKENS]))
def test_a_cache_that_grows_gives_the_same_text(monkeypatch, name, chunk):
    model, _ = pair(name)
    mask = np.arange(7)[None, :] >= 7 - np.array([[4], [7], [1]])
    settings = {"greedy": True, "mask": mask}
    expected = generation.generate(model, prompts(), TOKENS, **settings)
    short_buckets(monkeypatch)
    parts = list(generation.stream(model, prompts(), TOKENS, chunk=chunk, **settings))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
    recomputed = generation.generate(model, prompts(), TOKENS, use_cache=False, **settings)
    np.testing.assert_array_equal(recomputed, expected)


def test_the_first_token_comes_alone_and_later_ones_in_chunks():
    model, twin = pair("learned")
    for settings in ({"chunk": 5}, {"chunk": 5, "use_cache": False}):
        candidate = generation.stream(model, prompts(), 12, greedy=True, **settings)
        reference = torch_generation.stream(
            twin, torch.from_numpy(prompts()), 12, greedy=True, **settings
        )
        widths = [part.shape[1] for part in candidate], [part.shape[1] for part in reference]
        expected = [1, 5, 5, 1] if "use_cache" not in settings else None
        for found in widths:
            assert found[0] == 1
            assert sum(found) == 12
            assert expected is None or found == expected


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("number", full_after(1, [2, 1]))
def test_rows_end_with_a_stop_token_and_the_text_with_its_last_row(use_cache, number):
    model, twin = pair("learned")
    whole = generation.generate(model, prompts(), TOKENS, greedy=True)
    # Ids that every row makes at some time; of those the ones with the latest and spread ends.
    common = [i for i in range(V) if (whole == i).any(axis=1).all()]
    ends = {i: np.argmax(whole == i, axis=1) for i in common}
    stops = sorted(common, key=lambda i: ends[i].max() - ends[i].min())[-number:]
    first = np.min([ends[i] for i in stops], axis=0)
    length = first.max() + 1
    assert first.min() < first.max() < TOKENS - 1, "rows that end together would show less"
    expected = whole[:, :length].copy()
    for row, end in zip(expected, first, strict=True):
        row[end:] = row[end]
    settings = {"greedy": True, "stop_tokens": stops, "use_cache": use_cache}
    for chunk in (1, 7, TOKENS):
        parts = list(generation.stream(model, prompts(), TOKENS, chunk=chunk, **settings))
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)
        reference = torch_generation.stream(
            twin, torch.from_numpy(prompts()), TOKENS, chunk=chunk, **settings
        )
        np.testing.assert_array_equal(torch.cat(list(reference), dim=1).numpy(), expected)


def test_a_row_ends_across_windows():
    """A row that has ended still repeats its stop token when the windows are packed anew."""
    model, twin = pair("learned")
    whole = generation.generate(model, prompts(), 4 * CONTEXT, greedy=True)
    never = next(i for i in range(V) if (whole == i).any(axis=1).sum() == 1)
    (row,) = np.flatnonzero((whole == never).any(axis=1))
    end = np.argmax(whole[row] == never)
    assert end < 3 * CONTEXT
    expected = whole.copy()
    expected[row, end:] = never
    settings = {"greedy": True, "stop_tokens": [never]}
    tokens = generation.generate(model, prompts(), 4 * CONTEXT, **settings)
    np.testing.assert_array_equal(tokens, expected)
    reference = torch_generate(twin, prompts(), 4 * CONTEXT, **settings)
    np.testing.assert_array_equal(reference, expected)


@pytest.mark.parametrize("token", [-1, V])
def test_a_stop_token_that_the_model_does_not_know_is_refused(token):
    model, twin = pair("none")
    message = re.escape(f"stop_tokens must be in [0, {V}): got {token}")
    with pytest.raises(ValueError, match=message):
        generation.stream(model, prompts(), 4, greedy=True, stop_tokens=[3, token])
    with pytest.raises(ValueError, match=message):
        torch_generation.stream(
            twin, torch.from_numpy(prompts()), 4, greedy=True, stop_tokens=[3, token]
        )


def test_neither_length_nor_count_compiles_beyond_the_rounded_lengths(caplog, monkeypatch):
    monkeypatch.setattr(lengths, "SHORTEST_CACHE", 32)
    monkeypatch.setattr(lengths, "SMALLEST_CACHE_BYTES", 0)
    model, _ = build(positions="learned", num_layers=1, context_length=64)

    def compiled(length, count, **settings):
        caplog.clear()
        with jax.log_compiles():
            generation.generate(model, prompts(length=length), count, **settings)
        return [r.getMessage() for r in caplog.records if "Compiling" in r.getMessage()]

    key = jax.random.key(0)
    assert compiled(9, 5, key=key)
    for length, count in ((9, 5), (14, 18), (2, 1), (16, 17)):
        assert compiled(length, count, key=key) == []
    assert len(compiled(9, 40, key=key)) == 2, "the next larger cache, and the step into it"
    for length, count in ((9, 40), (14, 35), (3, 30)):
        assert compiled(length, count, key=key) == []
    assert compiled(9, 5, key=key, temperature=0.5), "the check must see a compilation"


def test_lengths_are_rounded_to_powers_of_two_and_halfway_between(monkeypatch):
    rounded = {lengths.round_up(n, 16, 100) for n in range(1, 100)}
    assert sorted(rounded) == [16, 24, 32, 48, 64, 96, 100]
    assert all(n <= lengths.round_up(n, 1, 2**20) < max(1.5 * n, 2) for n in range(1, 3000))
    config = TransformerLMConfig(vocab_size=V, **{**BASE, "num_kv_heads": 2})
    # Keys and values of 2 layers of 2 heads of 9 numbers: 288 bytes a row and slot in float32.
    for batch, dtype, slots in ((1, "float32", 32), (4, "float32", 8), (4, "bfloat16", 16)):
        monkeypatch.setattr(lengths, "SHORTEST_CACHE", 2)
        monkeypatch.setattr(lengths, "SMALLEST_CACHE_BYTES", 63 * 288)
        assert lengths.shortest_cache(config, batch, jnp.dtype(dtype)) == slots
        monkeypatch.setattr(lengths, "SHORTEST_CACHE", 20)
        assert lengths.shortest_cache(config, batch, jnp.dtype(dtype)) == max(slots, 20)
    monkeypatch.setattr(lengths, "SMALLEST_CACHE_BYTES", 0)
    assert lengths.shortest_cache(config, 3, jnp.dtype("float32")) == 20


def test_caches_have_the_shape_and_dtype_asked_for():
    config = TransformerLMConfig(vocab_size=V, **{**BASE, "num_kv_heads": 2, "head_dim": 7})
    torch_config = TorchTransformerLMConfig(**config.settings())
    caches = decoding.make_cache(config, 3, 11, jnp.bfloat16)
    torch_caches = torch_decoding.make_cache(torch_config, 3, 11, torch.bfloat16)
    assert len(caches) == len(torch_caches) == config.num_layers
    for cache, twin in zip(caches, torch_caches, strict=True):
        for candidate, reference in ((cache.k_RSH, twin.k_BSKH), (cache.v_RSH, twin.v_BSKH)):
            assert candidate.shape == (3 * 2, 11, 7)
            assert reference.shape == (3, 11, 2, 7)
            assert candidate.dtype == jnp.bfloat16
            assert reference.dtype == torch.bfloat16
        assert cache.slots == 11
        assert int(cache.length) == twin.length == 0


@pytest.mark.parametrize("name", full_after(1, ["learned", "rotary"]))
def test_a_bfloat16_cache_rounds_the_same_on_both_sides(name):
    model, twin = pair(name)
    exact = generation.generate(model, prompts(), TOKENS, greedy=True)
    tokens = generation.generate(model, prompts(), TOKENS, greedy=True, cache_dtype="bfloat16")
    twin_tokens = torch_generate(twin, prompts(), TOKENS, greedy=True, cache_dtype=torch.bfloat16)
    np.testing.assert_array_equal(twin_tokens, tokens)
    assert (tokens != exact).any(), "at these weights rounding must show"


def test_bfloat16_models_generate():
    model, twin = build(positions="rotary", head_dim=10, num_layers=1, dtype=jnp.bfloat16)
    tokens = generation.generate(model, prompts(), TOKENS, key=jax.random.key(0))
    twin_tokens = torch_generate(twin.bfloat16(), prompts(), TOKENS)
    for drawn in (tokens, twin_tokens):
        assert drawn.shape == (3, TOKENS)
        assert drawn.min() >= 0
        assert drawn.max() < V


@pytest.mark.parametrize(("batch", "num_kv_heads"), full_after(2, [(1, 4), (3, 2), (1, 2), (3, 1)]))
def test_the_loop_copies_no_cache(batch, num_kv_heads):
    """Each step writes its keys and values in place, whatever the batch and the groups."""
    model, _ = build(positions="rotary", head_dim=10, num_kv_heads=num_kv_heads, dtype=np.float32)
    definition, parameters = split(model)
    rows = list(prompts(batch).astype(np.int64))
    window = generation.Window.pack(rows, np.zeros(batch, bool), CONTEXT)
    common = {"key": None, "stop_tokens": np.zeros(0, np.int32)}
    prefill, extend = decoding.generating_programs(definition, None, jnp.dtype("float32"))
    window = prefill(parameters, {}, window, 0, slots_read=16, **common)
    compiled = extend.lower(parameters, {}, window, 1, 5, **common).compile()
    rows_of_cache = batch * num_kv_heads
    shape = rf"f32\[{rows_of_cache},{CONTEXT},10\]"
    program = compiled.as_text()
    assert re.search(rf"= {shape}\S* fusion\(.*dynamic.update.slice", program), program
    # Four buffers of the two layers go in and out; every other one of that size would be a copy.
    assert not re.search(rf"= {shape}\S* (copy|transpose)\(", program)
    size = rows_of_cache * CONTEXT * 10 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * size


@pytest.mark.parametrize("chunk", [1, 7])
def test_texts_that_share_a_prompt_are_those_of_their_keys(chunk, monkeypatch):
    model, twin = pair("rotary")
    prompt, mask = prompts(), np.arange(7)[None, :] >= 7 - np.array([4, 7, 1])[:, None]
    settings = {"temperature": 0.9, "mask": mask}
    keys = [jax.random.key(seed) for seed in (3, 4, 3)]
    texts = generation.stream_samples(model, prompt, TOKENS, keys, chunk=chunk, **settings)
    # One after the other, then two at once.
    first = list(texts[0])
    pairs = list(itertools.zip_longest(texts[1], texts[2]))
    assert first[0].shape == pairs[0][0].shape == (3, 1)
    for found, key in zip((first, *zip(*pairs, strict=True)), keys, strict=True):
        alone = generation.generate(model, prompt, TOKENS, key=key, **settings)
        np.testing.assert_array_equal(np.concatenate(found, axis=1), alone)

    reads = []
    hidden = type(twin).hidden

    def spy(self, tokens, *arguments, **more):
        reads.append(tokens.shape[1])
        return hidden(self, tokens, *arguments, **more)

    monkeypatch.setattr(type(twin), "hidden", spy)
    settings = {"mask": torch.from_numpy(mask), "chunk": chunk}
    torch_prompt = torch.from_numpy(prompt)

    def generators():
        return [torch.Generator().manual_seed(seed) for seed in (3, 4)]

    made = torch_generation.stream_samples(twin, torch_prompt, 5, generators(), **settings)
    texts = [torch.cat(list(text), dim=1) for text in made]
    assert reads == [7, *[1] * 9]
    for text, generator in zip(texts, generators(), strict=True):
        alone = torch_generation.generate(
            twin, torch_prompt, 5, generator=generator, mask=settings["mask"]
        )
        assert torch.equal(text, alone)
