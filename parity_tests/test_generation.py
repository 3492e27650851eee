import re

import jax
import numpy as np
import pytest
import torch

from jaxformer import generation
from jaxformer.layers import dropout_modules, seed_dropout
from parity_tests.generating import (
    CONTEXT,
    MODELS,
    TOKENS,
    V,
    build,
    pair,
    prompts,
    torch_generate,
)
from tests.support.tiers import full_after, full_except
from torch_ref import generation as torch_generation
from torch_ref.logits import filter_logits as torch_filter_logits


@pytest.mark.parametrize("name", full_after(2, MODELS))
def test_greedy_text_is_the_same_with_and_without_cache_on_both_sides(name):
    model, twin = pair(name)
    prompt = prompts()
    cached = generation.generate(model, prompt, TOKENS, greedy=True)
    assert cached.shape == (3, TOKENS)
    assert cached.dtype == np.int32
    distinct = [len(np.unique(row)) for row in cached]
    assert min(distinct) >= 5, "a model that repeats itself would hide a wrong window"
    others = {
        "recomputed": generation.generate(model, prompt, TOKENS, greedy=True, use_cache=False),
        "torch cached": torch_generate(twin, prompt, TOKENS, greedy=True),
        "torch recomputed": torch_generate(twin, prompt, TOKENS, greedy=True, use_cache=False),
    }
    for other, tokens in others.items():
        np.testing.assert_array_equal(tokens, cached, err_msg=other)


@pytest.mark.parametrize("name", full_except(MODELS, lambda name: name in ("learned", "rotary")))
def test_left_padded_rows_continue_as_in_a_batch_of_one(name):
    model, twin = pair(name)
    prompt = prompts()
    lengths = np.array([4, 7, 1])
    mask = np.arange(7)[None, :] >= 7 - lengths[:, None]
    one_by_one = np.concatenate(
        [
            torch_generate(twin, row[None, 7 - n :], TOKENS, greedy=True, use_cache=False)
            for row, n in zip(prompt, lengths, strict=True)
        ]
    )
    for use_cache in (True, False):
        settings = {"greedy": True, "use_cache": use_cache, "mask": mask}
        together = generation.generate(model, prompt, TOKENS, **settings)
        np.testing.assert_array_equal(together, one_by_one)
        np.testing.assert_array_equal(torch_generate(twin, prompt, TOKENS, **settings), one_by_one)
    # The same shapes as above, so nothing is compiled for it.
    first_row = np.repeat(prompt[:1, 3:], 3, axis=0)
    tokens = generation.generate(model, first_row, TOKENS, greedy=True)
    np.testing.assert_array_equal(tokens, np.repeat(one_by_one[:1], 3, axis=0))


def test_text_follows_the_documented_window():
    _, twin = pair("learned")
    prompt = prompts(batch=1)
    window, expected = list(prompt[0]), []
    for _ in range(TOKENS):
        if len(window) > CONTEXT:
            window = window[-(CONTEXT // 2) :]
        with torch.no_grad():
            logits = twin(torch.tensor([window]))[0, -1]
        expected.append(int(logits.argmax()))
        window.append(expected[-1])
    assert torch_generate(twin, prompt, TOKENS, greedy=True)[0].tolist() == expected


@pytest.mark.parametrize("length", [CONTEXT - 1, CONTEXT, CONTEXT + 1, 3 * CONTEXT])
def test_prompts_up_to_the_context_are_kept_and_longer_ones_cut_to_half(length):
    model, twin = pair("learned")
    prompt = prompts(length=length)
    kept = prompt if length <= CONTEXT else prompt[:, -(CONTEXT // 2) :]
    with torch.no_grad():
        expected = twin(torch.from_numpy(kept))[:, -1].argmax(dim=-1).numpy()
    tokens = generation.generate(model, prompt, 5, greedy=True)
    np.testing.assert_array_equal(tokens[:, 0], expected)
    np.testing.assert_array_equal(torch_generate(twin, prompt, 5, greedy=True), tokens)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_work(context):
    model, twin = build(context_length=context, num_layers=1)
    prompt = prompts(length=2)
    tokens = generation.generate(model, prompt, 7, greedy=True)
    for use_cache in (True, False):
        settings = {"greedy": True, "use_cache": use_cache}
        np.testing.assert_array_equal(generation.generate(model, prompt, 7, **settings), tokens)
        np.testing.assert_array_equal(torch_generate(twin, prompt, 7, **settings), tokens)


def test_chunks_and_the_cache_do_not_change_what_is_sampled():
    model, twin = pair("alibi")
    prompt = prompts()
    settings = {"temperature": 0.8, "top_k": 13, "top_p": 0.9}
    key = jax.random.key(5)
    whole = generation.generate(model, prompt, TOKENS, key=key, **settings)
    for chunk, use_cache in ((1, True), (7, True), (16, False)):
        parts = list(
            generation.stream(
                model, prompt, TOKENS, key=key, chunk=chunk, use_cache=use_cache, **settings
            )
        )
        assert max(part.shape[1] for part in parts) <= chunk
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    other = generation.generate(model, prompt, TOKENS, key=jax.random.key(6), **settings)
    assert (other != whole).any()

    def torch_parts(chunk):
        generator = torch.Generator().manual_seed(5)
        return list(
            torch_generation.stream(
                twin, torch.from_numpy(prompt), TOKENS, generator=generator, chunk=chunk, **settings
            )
        )

    torch.testing.assert_close(torch.cat(torch_parts(7), 1), torch.cat(torch_parts(TOKENS), 1))


def test_shorter_texts_are_the_beginning_of_longer_ones():
    model, _ = pair("alibi")
    key = jax.random.key(1)
    longer = generation.generate(model, prompts(), 29, key=key)
    shorter = generation.generate(model, prompts(), 11, key=key)
    np.testing.assert_array_equal(shorter, longer[:, :11])


def test_no_tokens_is_an_empty_result():
    model, twin = pair("alibi")
    assert generation.generate(model, prompts(), 0, greedy=True).shape == (3, 0)
    assert torch_generate(twin, prompts(), 0, greedy=True).shape == (3, 0)


def test_top_k_of_one_is_greedy():
    model, twin = pair("alibi")
    greedy = generation.generate(model, prompts(), TOKENS, greedy=True)
    tokens = generation.generate(model, prompts(), TOKENS, top_k=1, key=jax.random.key(0))
    np.testing.assert_array_equal(tokens, greedy)
    np.testing.assert_array_equal(torch_generate(twin, prompts(), TOKENS, top_k=1), greedy)


def test_tokens_are_drawn_with_the_filtered_probabilities():
    model, twin = pair("none")
    count = 5000
    prompt = np.repeat(prompts(batch=1), count, axis=0)
    settings = {"temperature": 5.0, "top_k": 17, "top_p": 0.8}
    with torch.no_grad():
        logits = twin(torch.from_numpy(prompt[:1]))[0, -1]
    p = torch_filter_logits(logits, **settings).softmax(dim=-1).numpy()
    assert 5 < np.count_nonzero(p) < 17
    drawn = {
        "jax": generation.generate(model, prompt, 1, key=jax.random.key(2), **settings),
        "torch": torch_generate(
            twin, prompt, 1, generator=torch.Generator().manual_seed(2), **settings
        ),
    }
    for side, tokens in drawn.items():
        frequency = np.bincount(tokens[:, 0], minlength=V) / count
        assert (frequency[p == 0] == 0).all(), side
        assert (np.abs(frequency - p) <= 4 * np.sqrt(p * (1 - p) / count)).all(), side


def test_the_model_stays_in_its_mode_and_is_used_in_evaluation_mode():
    rates = {"embedding_dropout": 0.3, "attention_dropout": 0.2, "residual_dropout": 0.4}
    model, twin = build(num_layers=1, **rates)
    expected = generation.generate(model, prompts(), 9, greedy=True)
    np.testing.assert_array_equal(torch_generate(twin, prompts(), 9, greedy=True), expected)

    model.train()
    seed_dropout(model, jax.random.key(0))
    model.embedding_dropout.deterministic = True
    before = {path: vars(d).copy() for path, d in dropout_modules(model).items()}
    np.testing.assert_array_equal(generation.generate(model, prompts(), 9, greedy=True), expected)
    assert {path: vars(d) for path, d in dropout_modules(model).items()} == before

    twin.train()
    twin.embedding_dropout.eval()
    modes = [module.training for module in twin.modules()]
    parts = []
    for part in torch_generation.stream(twin, torch.from_numpy(prompts()), 9, greedy=True, chunk=2):
        assert [module.training for module in twin.modules()] == modes
        assert torch.is_grad_enabled()
        assert not part.requires_grad
        parts.append(part)
    np.testing.assert_array_equal(torch.cat(parts, dim=1).numpy(), expected)


REFUSED = {
    "temperature must be positive and finite: got 0": {"temperature": 0},
    "temperature must be positive and finite: got nan": {"temperature": float("nan")},
    "temperature must be positive and finite: got inf": {"temperature": float("inf")},
    "temperature must be at least 1e-30 and finite in float32: got 1e-40": {"temperature": 1e-40},
    "temperature must be at least 1e-30 and finite in float32: got 1e+39": {"temperature": 1e39},
    "top_k must be at least 1: got 0": {"top_k": 0},
    "top_k must be an integer: got 2.5": {"top_k": 2.5},
    "top_p must be in (0, 1]: got 0.0": {"top_p": 0.0},
    "top_p must be in (0, 1]: got 1.5": {"top_p": 1.5},
    "top_p must be in (0, 1]: got nan": {"top_p": float("nan")},
    "top_p must be at least 1e-30: got 1e-38": {"top_p": 1e-38},
    "num_tokens must not be negative: got -1": {"num_tokens": -1},
    "num_tokens must be an integer: got 5.5": {"num_tokens": 5.5},
    "chunk must be an integer: got None": {"chunk": None},
    "stop_tokens must be an integer: got 2.0": {"stop_tokens": [1, 2.0]},
    "chunk must be at least 1: got 0": {"chunk": 0},
    "must be (B, T) with B, T >= 1: got shape (2, 0)": {"prompt": np.zeros((2, 0), np.int32)},
    "must be (B, T) with B, T >= 1: got shape (5,)": {"prompt": np.zeros(5, np.int32)},
    "must hold integer ids": {"prompt": np.zeros((1, 3), np.float32)},
    "prompt ids must be in [0, 31): got 31": {"prompt": np.array([[0, 31, 1]])},
    "prompt ids must be in [0, 31): got -1": {"prompt": np.array([[0, 2], [-1, 1]])},
    "the mask must be boolean": {"mask": np.ones((3, 7), np.int32)},
    "with the prompt's shape (3, 7)": {"mask": np.ones((3, 6), bool)},
    "every row of the mask": {"mask": np.arange(7)[None, :].repeat(3, 0) < 5},
    "every row of the mask must be padding": {"mask": np.zeros((3, 7), bool)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_work_is_refused_before_anything_runs(message):
    model, twin = pair("none")
    settings = {"prompt": prompts(), "num_tokens": 4, "mask": None, **REFUSED[message]}
    prompt, num_tokens, mask = (settings.pop(k) for k in ("prompt", "num_tokens", "mask"))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        generation.stream(model, prompt, num_tokens, greedy=True, mask=mask, **settings)
    assert "\n" not in str(error.value)
    torch_mask = None if mask is None else torch.from_numpy(mask)
    with pytest.raises(ValueError, match=re.escape(message)):
        torch_generation.stream(
            twin, torch.from_numpy(prompt), num_tokens, greedy=True, mask=torch_mask, **settings
        )


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool"])
def test_a_cache_of_integers_is_refused(dtype):
    model, twin = pair("none")
    with pytest.raises(ValueError, match="cache_dtype must be a dtype of floats"):
        generation.generate(model, prompts(), 4, greedy=True, cache_dtype=dtype)
    with pytest.raises(ValueError, match="cache_dtype must be a dtype of floats"):
        torch_generation.generate(
            twin, torch.from_numpy(prompts()), 4, greedy=True, cache_dtype=getattr(torch, dtype)
        )


def test_a_cache_of_an_unknown_dtype_is_refused():
    model, _ = pair("none")
    with pytest.raises(ValueError, match="cache_dtype must be a dtype of floats"):
        generation.generate(model, prompts(), 4, greedy=True, cache_dtype="bf16")


def test_sampling_needs_a_key():
    model, _ = pair("none")
    with pytest.raises(ValueError, match="sampling needs a key"):
        generation.generate(model, prompts(), 4)
    with pytest.raises(ValueError, match=r"must be a random key: pass key=jax.random.key\(3\)"):
        generation.generate(model, prompts(), 4, key=3)


@pytest.mark.tier("full")
def test_a_layer_with_full_attention_sees_past_the_window_through_the_cache():
    settings = {**MODELS["alternating_windows"], "full_attention_layers": ()}
    prompt = prompts()
    windowed = generation.generate(build(**settings)[0], prompt, TOKENS, greedy=True)
    for layers in ((0,), (1,), (0, 1, 2)):
        model, twin = build(**{**settings, "full_attention_layers": layers})
        text = generation.generate(model, prompt, TOKENS, greedy=True)
        assert (text != windowed).any()
        np.testing.assert_array_equal(torch_generate(twin, prompt, TOKENS, greedy=True), text)


def test_a_model_without_a_head_cannot_generate():
    model, twin = build(num_layers=1, head="none")
    with pytest.raises(ValueError, match="only a model with a head can generate"):
        generation.stream(model, prompts(), 4, greedy=True)
    with pytest.raises(ValueError, match="only a model with a head can generate"):
        torch_generation.stream(twin, torch.from_numpy(prompts()), 4, greedy=True)


def test_a_model_that_sees_the_future_cannot_generate():
    model, twin = build(causal=False, num_layers=1)
    with pytest.raises(ValueError, match="only a causal model can generate"):
        generation.generate(model, prompts(), 4, greedy=True)
    with pytest.raises(ValueError, match="only a causal model can generate"):
        torch_generate(twin, prompts(), 4, greedy=True)
