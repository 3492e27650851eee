"""Texts that share the rows of one cache are those that each request gets alone, on both sides."""

import jax
import numpy as np
import pytest
import torch

from jaxformer import continuous_generation
from jaxformer.continuous_generation import Request, generate_requests
from jaxformer.generation import generate
from parity_tests.generating import CONTEXT, MODELS, V, build, pair
from tests.support.tiers import full_after
from torch_ref.continuous_generation import Request as TwinRequest
from torch_ref.continuous_generation import generate_requests as twin_requests

# Prompts shorter and longer than the context, and texts that outgrow it.
LENGTHS = ((7, 9), (1, 40), (CONTEXT, 3), (12, 1), (30, 25), (3, 0), (20, 11), (2, 60), (9, 2))


def make_requests(lengths=LENGTHS, seed=0):
    draw = np.random.default_rng(seed)
    return [
        Request(draw.integers(0, V, length), count, jax.random.key(number))
        for number, (length, count) in enumerate(lengths)
    ]


def alone(model, requests, stop_tokens=(), **settings):
    """Each text by itself, up to its first stop token."""
    return [
        generate(
            model, r.prompt[None], r.num_tokens, key=r.key, stop_tokens=stop_tokens, **settings
        )[0]
        for r in requests
    ]


def together(model, requests, **settings):
    found = list(generate_requests(model, requests, **settings))
    assert sorted(number for number, _ in found) == list(range(len(requests)))
    texts = dict(found)
    assert all(text.dtype == np.int32 for text in texts.values())
    return [texts[number] for number in range(len(requests))]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for text, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(text, other)


@pytest.mark.parametrize("name", full_after(1, [m for m in MODELS if m != "none"], slow_after=4))
def test_greedy_texts_are_those_of_each_request_alone_on_both_sides(name):
    model, twin = pair(name)
    requests = make_requests()
    found = together(model, requests, rows=3, greedy=True)
    assert_same(found, alone(model, requests, greedy=True))
    wanted = [TwinRequest(torch.from_numpy(r.prompt), r.num_tokens) for r in requests]
    assert_same(found, [t.numpy() for _, t in twin_requests(twin, wanted, greedy=True)])


@pytest.mark.parametrize("rows", full_after(0, [2, 20, 1, 5], slow_after=2))
def test_sampled_texts_follow_their_own_keys_and_end_with_their_stop_tokens(rows):
    model, _ = pair("rotary")
    requests = make_requests()
    settings = {"temperature": 1.3, "top_k": 9, "top_p": 0.95}
    free = alone(model, requests, **settings)
    assert_same(together(model, requests, rows=rows, **settings), free)
    settings["stop_tokens"] = [int(free[1][5]), int(free[7][50])]
    ended = alone(model, requests, **settings)
    assert sum(map(len, ended)) < sum(map(len, free))
    assert_same(together(model, requests, rows=rows, **settings), ended)


@pytest.mark.tier("full")
def test_texts_do_not_depend_on_what_is_written_beside_them():
    """Also raw keys, a cache in another dtype, and no requests at all."""
    model, _ = pair("alibi")
    requests = [r._replace(key=jax.random.PRNGKey(r.num_tokens)) for r in make_requests()]
    forward = together(model, requests, rows=3, cache_dtype="bfloat16")
    backward = together(model, requests[::-1], rows=2, cache_dtype="bfloat16")
    assert_same(forward, backward[::-1])
    assert list(generate_requests(model, [])) == []


@pytest.mark.tier("full")
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_work(context):
    model, _ = build(context_length=context, num_layers=1)
    requests = make_requests(((1, 5), (2, 9), (4, 30), (3, 2)))
    assert_same(together(model, requests, rows=2, greedy=True), alone(model, requests, greedy=True))


@pytest.mark.tier("full")
def test_the_cache_grows_and_is_shifted_far_below_the_context():
    """Prompts that are longer than all before them, in a context that no text fills."""
    model, _ = build(context_length=500, num_layers=1, positions="rotary", head_dim=10)
    requests = make_requests(((3, 70), (5, 200), (90, 20), (2, 150), (170, 9), (1, 1), (60, 80)))
    assert_same(together(model, requests, rows=3, greedy=True), alone(model, requests, greedy=True))


@pytest.mark.tier("full")
def test_latent_attention_and_experts():
    kinds = (
        {"positions": "rotary", "head_dim": 10, "latent_width": 13, "rotary_head_dim": 4},
        {"num_experts": 5, "experts_per_token": 2, "activation": "swiglu"},
    )
    for settings in kinds:
        model, _ = build(num_layers=1, **settings)
        requests = make_requests()
        found = together(model, requests, rows=3, greedy=True)
        assert_same(found, alone(model, requests, greedy=True))


def test_programs_are_few(monkeypatch):
    """One for all rows and each rounded length, however many requests there are."""
    model, _ = pair("learned")
    read = []
    pack = continuous_generation.Window.pack
    monkeypatch.setattr(
        continuous_generation.Window,
        "pack",
        lambda rows, ended, slots: read.append(slots) or pack(rows, ended, slots),
    )
    together(model, make_requests(), rows=3, greedy=True)
    assert set(read) == {16, 24}


def test_bad_requests_are_rejected_by_the_call():
    model, _ = pair("learned")
    request = make_requests()[0]
    with pytest.raises(ValueError, match="rows must be at least 1: got 0"):
        generate_requests(model, [request], rows=0)
    with pytest.raises(ValueError, match="needs a key in each request"):
        generate_requests(model, [request._replace(key=None)])
    with pytest.raises(ValueError, match=r"prompt ids must be in \[0, 31\): got 31"):
        generate_requests(model, [request, request._replace(prompt=np.array([31]))])
    with pytest.raises(ValueError, match="rows must be an integer"):
        generate_requests(model, [request], rows=1.5)
    with pytest.raises(ValueError, match="num_tokens must not be negative"):
        generate_requests(model, [request._replace(num_tokens=-1)])
    dynamic, _ = build(
        positions="rotary", head_dim=10, rotary_scaling="dynamic", rotary_scaling_factor=2.0,
        num_layers=1, rotary_original_context_length=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match="follow the longest"):
        generate_requests(dynamic, [request])
