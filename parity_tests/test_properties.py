"""What must hold of each side by itself, beside the comparisons."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import jaxformer.masks
import torch_ref.masks
from jaxformer.attention import MultiHeadAttention, scaled_dot_product_attention
from jaxformer.config import TransformerLMConfig
from jaxformer.execution.query_blocks import large_query_blocks, query_blocks
from jaxformer.layers import Dropout
from jaxformer.masks import padding_mask
from jaxformer.parameters import get_parameters, set_parameters
from jaxformer.positions import Rotary
from jaxformer.transformer_lm import TransformerLM
from parity_tests.case_parts import attention, lm
from parity_tests.harness import JAX, TORCH, perturbed
from tests.support.tiers import FULL, full_except

SCHEMES = ["none", "learned", "sinusoidal", "rotary", "alibi", "relative"]
SOME_SCHEMES = full_except(SCHEMES, lambda scheme: scheme in ("learned", "rotary"))
RANDOM = np.random.default_rng(17)


def language_model(**settings):
    config = TransformerLMConfig(
        **{"vocab_size": 23, "context_length": 12, "d_model": 20, "num_heads": 4, "head_dim": 6,
           "num_layers": 2, "d_ff": 34, **settings}
    )  # fmt: skip
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    set_parameters(model, perturbed(model))
    model.eval()
    return model


@pytest.mark.parametrize("window", [pytest.param(None, marks=FULL), 50])
@pytest.mark.parametrize("width", [pytest.param(1, marks=FULL), 200])
@pytest.mark.tier("full")
def test_blocks_of_queries_change_nothing(window, width):
    """A mask that is known when the core is traced saves keys and changes no result."""
    q, k, v = (RANDOM.normal(size=(2, 200, heads, 6)) for heads in (4, 2, 2))
    bias = jnp.asarray(RANDOM.normal(size=(1, 4, width, 200)))
    mask = jaxformer.masks.causal_mask(200)
    if window is not None:
        mask = mask & jaxformer.masks.window_mask(200, None, window)
    dropout = Dropout(0.4)
    dropout.key = jax.random.key(5)

    def attend(mask, *arrays):
        out, weights = scaled_dot_product_attention(
            *arrays, mask=mask, bias=bias, soft_cap=3.0, dropout=dropout
        )
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(weights)), (out, weights)

    arrays = [jnp.asarray(x) for x in (q, k, v)]
    results = [
        jax.value_and_grad(functools.partial(attend, kind), argnums=(0, 1, 2), has_aux=True)(
            *arrays
        )
        for kind in (mask, jnp.asarray(mask))
    ]
    assert len(list(query_blocks(mask, 200, 200))) == 4
    for cut, whole in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(cut, whole, rtol=0, atol=1e-12)


def test_a_block_has_only_the_keys_that_its_queries_see():
    mask = jaxformer.masks.causal_mask(150) & jaxformer.masks.window_mask(150, None, 10)
    blocks = list(query_blocks(mask, 150, 150))
    assert [(block.queries, block.keys) for block in blocks] == [
        ((0, 64), (0, 64)),
        ((64, 128), (55, 128)),
        ((128, 150), (119, 150)),
    ]
    assert next(query_blocks(np.ones((1, 1, 1, 3), bool), 2, 3)).mask is None
    with large_query_blocks():
        counts = [len(list(query_blocks(mask, n, 150))) for n in (150, 512, 600, 8192)]
    assert counts == [1, 1, 2, 8]


@pytest.mark.parametrize("positions", SOME_SCHEMES)
@pytest.mark.tier("full")
def test_later_tokens_have_no_gradient_on_earlier_outputs(positions, monkeypatch):
    model = language_model(positions=positions)
    tokens = RANDOM.integers(0, 23, (2, 9))
    embed = TransformerLM.embed

    def early_outputs(delta):
        monkeypatch.setattr(TransformerLM, "embed", lambda self, *a: embed(self, *a) + delta)
        return jnp.sum(model(tokens)[:, :5] ** 2)

    gradient = jax.grad(early_outputs)(jnp.zeros((2, 9, 20)))
    assert (gradient[:, 5:] == 0).all()
    assert (jnp.abs(gradient[:, :5]).max(axis=(0, 2)) > 0).all()


@pytest.mark.parametrize("positions", SOME_SCHEMES)
def test_permuting_the_batch_permutes_the_output(positions):
    model = language_model(positions=positions)
    tokens = RANDOM.integers(0, 23, (5, 7))
    order = np.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(model(tokens)[order], model(tokens[order]), rtol=0, atol=1e-13)


@pytest.mark.parametrize("positions", SOME_SCHEMES)
@pytest.mark.parametrize("causal", [True, False])
def test_what_stands_in_padding_never_shows(positions, causal):
    model = language_model(positions=positions, causal=causal)
    tokens = RANDOM.integers(1, 23, (3, 8))
    tokens[0, 5:], tokens[1, 3:] = 0, 0
    mask = padding_mask(jnp.asarray(tokens))
    other = np.where(tokens == 0, RANDOM.integers(1, 23, tokens.shape), tokens)
    kept = tokens != 0
    assert (model(tokens, mask)[kept] == model(other, mask)[kept]).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotary_scores_depend_on_the_distance_only(interleaved):
    rotary = Rotary(6, 400, interleaved=interleaved)
    q, k = RANDOM.standard_normal((2, 1, 1, 3, 6))

    def score(query_position, key_position):
        turned = rotary.rotate(jnp.asarray(q), jnp.array([[query_position]]))
        other = rotary.rotate(jnp.asarray(k), jnp.array([[key_position]]))
        return np.asarray(jnp.sum(turned * other, axis=-1))

    size = np.linalg.norm(q) * np.linalg.norm(k)
    for shift in (1, 30, 300):
        # Angles are float32: at position p they are off by up to p ulps, on both sides.
        bound = 2 * (60 + shift) * np.finfo(np.float32).eps * size
        np.testing.assert_allclose(score(57 + shift, 40 + shift), score(57, 40), rtol=0, atol=bound)
    assert np.abs(score(57, 40) - score(57, 41)).max() > 1e-2


def test_grouped_query_with_all_heads_is_multi_head():
    whole = MultiHeadAttention(20, 4, head_dim=6, rngs=nnx.Rngs(0))
    grouped = MultiHeadAttention(20, 4, num_kv_heads=4, head_dim=6, rngs=nnx.Rngs(1))
    set_parameters(grouped, get_parameters(whole))
    x = jnp.asarray(RANDOM.standard_normal((2, 7, 20)))
    whole.eval()
    grouped.eval()
    assert (whole(x) == grouped(x)).all()


def test_grouped_query_is_multi_head_with_repeated_keys():
    q, k, v = (jnp.asarray(RANDOM.standard_normal((2, 7, n, 6))) for n in (4, 2, 2))
    grouped, _ = scaled_dot_product_attention(q, k, v)
    whole, _ = scaled_dot_product_attention(q, jnp.repeat(k, 2, axis=2), jnp.repeat(v, 2, axis=2))
    np.testing.assert_allclose(grouped, whole, rtol=0, atol=1e-14)


@pytest.mark.parametrize("blocked_by", ["mask", "bias"])
def test_a_fully_masked_row_gives_zeros_and_finite_gradients_on_both_sides(blocked_by):
    build = attention(output_bias=False)
    candidate, reference = build(JAX), build(TORCH)
    candidate.eval()
    reference.eval()
    x = RANDOM.standard_normal((2, 5, 20))
    mask = np.ones((2, 1, 5, 5), bool)
    mask[1, 0, 3] = False
    blocked = {
        "mask": mask,
        "bias": np.where(mask, 0.0, -np.inf),
    }[blocked_by]

    out, weights = candidate(
        jnp.asarray(x), **{blocked_by: jnp.asarray(blocked)}, return_weights=True
    )
    assert (out[1, 3] == 0).all()
    assert (weights[1, :, 3] == 0).all()
    assert (jnp.abs(weights.sum(-1)[0] - 1) < 1e-6).all()
    gradient = jax.grad(lambda y: jnp.sum(candidate(y, **{blocked_by: jnp.asarray(blocked)}) ** 2))(
        jnp.asarray(x)
    )
    assert jnp.isfinite(gradient).all()

    for fused in (True, False):
        leaf = torch.tensor(x, dtype=torch.float32, requires_grad=True)
        argument = torch.from_numpy(blocked)
        argument = argument if blocked_by == "mask" else argument.float()
        result = reference(leaf, **{blocked_by: argument}, return_weights=not fused)
        result = result if fused else result[0]
        assert (result[1, 3] == 0).all()
        result.square().sum().backward()
        assert torch.isfinite(leaf.grad).all()


def test_masks_are_the_same_on_both_sides():
    tokens = RANDOM.integers(0, 3, (4, 6))
    lengths = np.array([1, 6, 0, 3])
    candidate, reference = jaxformer.masks, torch_ref.masks
    pairs = [
        (candidate.causal_mask(5), reference.causal_mask(5)),
        (candidate.causal_mask(3, 7), reference.causal_mask(3, 7)),
        (candidate.window_mask(6, None, 2), reference.window_mask(6, None, 2)),
        (
            candidate.padding_mask(jnp.asarray(tokens)),
            reference.padding_mask(torch.from_numpy(tokens)),
        ),
        (
            candidate.padding_mask(jnp.asarray(tokens), pad_token=2),
            reference.padding_mask(torch.from_numpy(tokens), pad_token=2),
        ),
        (
            candidate.padding_mask_from_lengths(jnp.asarray(lengths), 6),
            reference.padding_mask_from_lengths(torch.from_numpy(lengths), 6),
        ),
    ]
    for jax_mask, torch_mask in pairs:
        assert jax_mask.dtype == bool
        np.testing.assert_array_equal(np.asarray(jax_mask), torch_mask.numpy())
    both = candidate.combine_masks(pairs[0][0][..., :5, :5], None, pairs[5][0][..., :5])
    expected = reference.combine_masks(pairs[0][1], None, pairs[5][1][..., :5])
    np.testing.assert_array_equal(np.asarray(both), expected.numpy())
    assert candidate.combine_masks(None, None) is None


def test_additive_and_boolean_masks_turn_into_each_other():
    mask = RANDOM.random((3, 4)) < 0.5
    for side, make, back in (
        (jaxformer.masks, jnp.asarray, np.asarray),
        (torch_ref.masks, torch.from_numpy, lambda t: t.numpy()),
    ):
        bias = back(side.boolean_to_additive(make(mask)))
        assert (bias[mask] == 0).all()
        assert np.isneginf(bias[~mask]).all()
        assert not np.isnan(bias).any()
        np.testing.assert_array_equal(back(side.additive_to_boolean(make(bias.copy()))), mask)
        assert not back(side.additive_to_boolean(make(np.array([-1e9, -np.inf, -1e4])))).any()


def test_a_mask_that_is_not_boolean_or_has_no_shape_is_refused():
    with pytest.raises(ValueError, match="boolean"):
        jaxformer.masks.expand_mask(jnp.zeros((2, 2)))
    with pytest.raises(ValueError, match="dimensions"):
        jaxformer.masks.expand_mask(jnp.zeros(2, bool))


REFUSED = {
    "token_types need num_token_types": lambda model, ids: model(ids, None, ids),
    "task_types need num_task_types": lambda model, ids: model(ids, task_types=ids),
    "logits need a head": lambda model, ids: model.logits(model.hidden(ids)),
    "pooled needs a pooler": lambda model, ids: model.pooled(model.hidden(ids)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_a_model_does_not_have_cannot_be_asked_for(message):
    ids = np.zeros((2, 5), int)
    for side, tokens in ((JAX, jnp.asarray(ids)), (TORCH, torch.from_numpy(ids))):
        with pytest.raises(ValueError, match=message):
            REFUSED[message](lm(head="none")(side), tokens)


def test_token_types_are_zero_by_default_and_a_model_without_a_head_gives_its_hidden_states():
    model = language_model(num_token_types=3, head="none")
    tokens = RANDOM.integers(0, 23, (2, 9))
    types = np.zeros_like(tokens)
    assert model(tokens).shape == (2, 9, 20)
    assert (model(tokens) == model(tokens, None, types)).all()
    assert (model(tokens) == model.hidden(tokens)).all()
    assert (model(tokens, None, types + 2) != model(tokens)).all()


@pytest.mark.parametrize("layers", [(), (0,), (1,), (0, 1)])
def test_only_layers_with_full_attention_see_past_the_window(layers):
    model = language_model(sliding_window=3, full_attention_layers=layers)
    tokens = RANDOM.integers(0, 23, (2, 12))
    _, weights = model(tokens, return_weights=True)
    for layer, weights_BNTS in enumerate(weights):
        seen_TS = np.asarray(weights_BNTS > 0).all(axis=(0, 1))
        width = 12 if layer in layers else 3
        np.testing.assert_array_equal(seen_TS, np.tri(12) - np.tri(12, k=-width) > 0)


def test_of_equal_probabilities_the_expert_of_the_lower_index_goes_first_on_both_sides():
    x = np.zeros((2, 6))
    chosen = []
    for side in (JAX, TORCH):
        router = side.experts.Router(6, 5, experts_per_token=3, **side.init)
        given = jnp.array(x, jnp.float32) if side is JAX else torch.tensor(x, dtype=torch.float32)
        routing = router(given)
        chosen.append(np.asarray(routing.experts).tolist())
        np.testing.assert_allclose(np.asarray(routing.weights.tolist()), 1 / 3, rtol=1e-6)
    assert chosen[0] == chosen[1] == [[0, 1, 2]] * 2
