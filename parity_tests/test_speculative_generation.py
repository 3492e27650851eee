"""Text written with a draft is what the model writes alone, on both sides."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer import generation, speculative_rounds
from jaxformer.parameters import get_parameters, map_parameters
from jaxformer.porting import export_arrays
from jaxformer.speculative_generation import generate_with_draft, stream_with_draft
from parity_tests.generating import CONTEXT, MODELS, TOKENS, build, pair, prompts
from tests.support.tiers import full_after
from torch_ref import speculative_generation as twin_generation
from torch_ref import speculative_rounds as twin_rounds


def near(model, twin, noise=0.05):
    """Both models with weights a little apart, whose proposals are often right."""
    draw = np.random.default_rng(5)
    draft = map_parameters(
        model,
        lambda parameters: {
            name: array + draw.normal(0, noise, array.shape) for name, array in parameters.items()
        },
    )
    draft.eval()
    draft_twin = type(twin)(twin.config).double().eval()
    arrays = export_arrays(get_parameters(draft))
    draft_twin.load_state_dict({name: torch.from_numpy(np.array(a)) for name, a in arrays.items()})
    return draft, draft_twin


def twin_text(twin, draft, prompt, count, mask=None, **settings):
    mask = None if mask is None else torch.from_numpy(mask)
    prompt = torch.from_numpy(prompt)
    settings |= {"greedy": True, "mask": mask}
    return twin_generation.generate_with_draft(twin, draft, prompt, count, **settings).numpy()


@pytest.mark.parametrize("name", full_after(1, MODELS, slow_after=5))
def test_greedy_text_is_the_models_own_on_both_sides(name):
    model, twin = pair(name)
    prompt = prompts(batch=2)
    alone = generation.generate(model, prompt, TOKENS, greedy=True)
    draft, draft_twin = near(model, twin)
    together = generate_with_draft(model, draft, prompt, TOKENS, greedy=True, draft_tokens=3)
    np.testing.assert_array_equal(together, alone)
    found = twin_text(twin, draft_twin, prompt, TOKENS, draft_tokens=3)
    np.testing.assert_array_equal(found, alone)


def test_a_draft_that_agrees_saves_passes(monkeypatch):
    """The model itself is always right: K + 1 tokens a pass."""
    _, twin = pair("rotary")
    lengths = []
    read = twin_generation._Writer.read

    def spy(self, name, tokens, start):
        lengths.append((name, tokens.shape[1] - start))
        return read(self, name, tokens, start)

    monkeypatch.setattr(twin_generation._Writer, "read", spy)
    twin_text(twin, twin, prompts(batch=1), 1 + 3 * 5, draft_tokens=4)
    assert [length for name, length in lengths if name == "model"] == [7, 5, 5, 5]


@pytest.mark.tier("full")
@pytest.mark.parametrize("draft_tokens", [1, 2, 5])
def test_rows_masks_ends_and_chunks_are_those_without_a_draft(draft_tokens):
    model, twin = pair("learned")
    # Another model altogether, with a longer context: it is seldom right.
    draft, draft_twin = build(num_layers=1, d_model=20, context_length=CONTEXT + 3, seed=2)
    prompt, mask = prompts(), np.arange(7)[None, :] >= 7 - np.array([4, 7, 1])[:, None]
    free = generation.generate(model, prompt, TOKENS, greedy=True, mask=mask)
    stop = [int(free[0, 9]), int(free[1, 30]), int(free[2, 17])]
    settings = {"greedy": True, "mask": mask, "stop_tokens": stop}
    alone = generation.generate(model, prompt, TOKENS, **settings)
    settings["draft_tokens"] = draft_tokens
    for chunk in (1, 7, 100):
        parts = list(stream_with_draft(model, draft, prompt, TOKENS, chunk=chunk, **settings))
        assert parts[0].shape == (3, 1)
        np.testing.assert_array_equal(np.concatenate(parts, axis=1), alone)
    del settings["greedy"]
    found = twin_text(twin, draft_twin, prompt, TOKENS, **settings)
    np.testing.assert_array_equal(found, alone)


@pytest.mark.tier("full")
@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_work(context):
    model, twin = build(context_length=context, num_layers=1)
    draft, draft_twin = near(model, twin)
    prompt = prompts(length=2)
    alone = generation.generate(model, prompt, 7, greedy=True)
    np.testing.assert_array_equal(generate_with_draft(model, draft, prompt, 7, greedy=True), alone)
    np.testing.assert_array_equal(twin_text(twin, draft_twin, prompt, 7), alone)


@pytest.mark.parametrize("side", ["jax", "torch"])
def test_what_is_accepted_or_drawn_has_the_models_probabilities(side):
    """All outcomes of two proposals of three tokens, with their exact probabilities."""
    draw = np.random.default_rng(0)
    size = 3
    p1, q1 = draw.dirichlet(np.ones(size)), draw.dirichlet(np.ones(size))
    q1 = np.array([p1[0], *(1 - p1[0]) * q1[1:] / q1[1:].sum()])  # equal in one place
    p2, q2 = draw.dirichlet(np.ones(size), size), draw.dirichlet(np.ones(size), size)
    p2[1] = q2[1]  # nothing is rejected there
    p3 = draw.dirichlet(np.ones(size), (size, size))
    proposals = np.array(list(itertools.product(range(size), repeat=2)))
    first, second = proposals.T
    model = np.stack([np.tile(p1, (9, 1)), p2[first], p3[first, second]], axis=1)
    draft = np.stack([np.tile(q1, (9, 1)), q2[first]], axis=1)
    if side == "jax":
        accept, rest = map(
            np.asarray, speculative_rounds.accept_proposals(model, draft, jnp.array(proposals))
        )
    else:
        arguments = map(torch.from_numpy, (model, draft, proposals))
        accept, rest = (x.numpy() for x in twin_rounds.accept_proposals(*arguments))
    weight = q1[first] * q2[first, second]
    found1, found2 = np.zeros(size), np.zeros((size, size))
    for row, (x, y) in enumerate(proposals):
        one, two = accept[row]
        found1[x] += weight[row] * one
        found1 += weight[row] * (1 - one) * rest[row, 0]
        found2[x, y] += weight[row] * one * two
        found2[x] += weight[row] * one * (1 - two) * rest[row, 1]
    np.testing.assert_allclose(found1, p1, rtol=1e-12)
    np.testing.assert_allclose(found2, np.minimum(p1, q1)[:, None] * p2, rtol=1e-12)
    np.testing.assert_array_equal(rest[:, 2], model[:, 2])


@pytest.mark.tier("full")
@pytest.mark.parametrize("side", ["jax", "torch"])
def test_sampled_texts_have_the_models_probabilities(side):
    """Three tokens of three, in a batch: Pearson's statistic against the model's own."""
    size, length = 3, 3
    model, twin = build(vocab_size=size, num_layers=1, seed=4)
    draft, draft_twin = build(vocab_size=size, num_layers=1, seed=9)
    prompt, rows, calls = np.array([[0, 2, 1]], np.int32), 4, 240
    settings = {"temperature": 5.0, "draft_tokens": 2}
    texts = np.array(list(itertools.product(range(size), repeat=length)))
    whole = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
    logits = np.asarray(model(jnp.asarray(whole)))[:, 2:5] / settings["temperature"]
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = np.take_along_axis(p, texts[..., None], axis=-1)[..., 0].prod(axis=1)
    many = np.repeat(prompt, rows, axis=0)
    counts = np.zeros(len(texts))
    for call in range(calls):
        if side == "jax":
            made = generate_with_draft(
                model, draft, many, length, key=jax.random.key(call), **settings
            )
        else:
            made = twin_generation.generate_with_draft(
                twin, draft_twin, torch.from_numpy(many), length, **settings,
                generator=torch.Generator().manual_seed(call),
            ).numpy()  # fmt: skip
        np.add.at(counts, made @ size ** np.arange(length)[::-1], 1)
    expected *= rows * calls
    assert expected.min() > 5
    statistic = np.sum((counts - expected) ** 2 / expected)
    # The 99.9th percentile of chi-squared with 26 degrees of freedom.
    assert statistic < 54.05


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": 30}, "the model's vocabulary: got 30 and 31 tokens"),
        ({"context_length": CONTEXT - 1}, "at least the model's context_length: got 23 and 24"),
        ({"causal": False, "head": "masked_lm"}, "only a causal model with a head"),
        ({"draft_tokens": 1.5}, "draft_tokens must be an integer: got 1.5"),
        ({"draft_tokens": 0}, "draft_tokens must be at least 1: got 0"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(change, words):
    model, twin = pair("learned")
    count = change.pop("draft_tokens", 4)
    draft, draft_twin = build(num_layers=1, **change)
    with pytest.raises(ValueError, match=words):
        stream_with_draft(model, draft, prompts(), 3, greedy=True, draft_tokens=count)
    with pytest.raises(ValueError, match=words):
        twin_generation.stream_with_draft(
            twin, draft_twin, torch.from_numpy(prompts()), 3, greedy=True, draft_tokens=count
        )
    with pytest.raises(ValueError, match="sampling needs a key"):
        stream_with_draft(model, model, prompts(), 3)
