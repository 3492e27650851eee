"""The same numbers about the same model on both sides, and the facts that they are to show."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import torch_ref.analysis
import torch_ref.config
import torch_ref.encoder_decoder
import torch_ref.layers
import torch_ref.positions
import torch_ref.transformer_lm
from jaxformer import analysis
from jaxformer.config import EncoderDecoderConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.layers import Dropout, inject_keep_masks
from jaxformer.parameters import get_parameters, merge, set_parameters, split
from jaxformer.porting.mapping.naming import torch_name
from jaxformer.positions import (
    ALiBi,
    LearnedPositions,
    NoPositions,
    RelativePositions,
    Rotary,
    SinusoidalPositions,
)
from jaxformer.transformer_lm import TransformerLM
from parity_tests.harness import perturbed
from parity_tests.twins import copy_to_torch
from tests.support.tiers import full_after

CONFIG = TransformerLMConfig(
    vocab_size=29, context_length=17, d_model=24, num_layers=2, num_heads=4, d_ff=40
)
CONFIGS = {
    "learned": CONFIG,
    "post-norm, relative": dataclasses.replace(CONFIG, block="post_norm", positions="relative"),
    "grouped, rotary, gated, window": dataclasses.replace(
        CONFIG,
        num_kv_heads=2,
        positions="rotary",
        activation="swiglu",
        norm="rms_norm",
        sliding_window=5,
        score_soft_cap=9.0,
        tie_embeddings=False,
    ),
    "one windowed layer, output norms": dataclasses.replace(
        CONFIG,
        position_offset=2,
        norm="rms_norm",
        norm_unit_offset=True,
        branch_output_norm=True,
        sliding_window=5,
        full_attention_layers=(1,),
        head_bias=True,
    ),
    "shared norm, token types, masked-LM head": dataclasses.replace(
        CONFIG, block="parallel", shared_norm=True, num_token_types=3, head="masked_lm"
    ),
}
TOKENS = np.random.default_rng(3).integers(0, 29, (2, 17))


def build(config=CONFIG, training=False):
    model = TransformerLM(config, rngs=nnx.Rngs(0))
    set_parameters(model, perturbed(model))
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**config.settings())
    )
    copy_to_torch(model, twin)
    model.train() if training else model.eval()
    twin.train(training)
    return model, twin


def stream(seed=0, shape=(2, 17, 24)):
    x = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(x), torch.from_numpy(x)


def assert_same(candidate, reference):
    if isinstance(candidate, dict):
        assert candidate.keys() == reference.keys()
        for key in candidate:
            assert_same(candidate[key], reference[key])
        return
    candidate, reference = np.asarray(candidate), np.asarray(reference)
    assert candidate.dtype == reference.dtype
    assert candidate.shape == reference.shape
    scale = max(float(np.abs(reference).max()), 1e-30)
    assert float(np.abs(candidate.astype(float) - reference.astype(float)).max()) <= 1e-12 * scale


@pytest.mark.parametrize("name", CONFIGS)
def test_attention_maps_agree(name):
    model, twin = build(CONFIGS[name])
    allowed = np.arange(17)[None, :] < np.array([[17], [11]])
    candidate = analysis.attention_maps(
        model, jnp.asarray(TOKENS), mask=jnp.asarray(allowed)[:, None, None]
    )
    reference = torch_ref.analysis.attention_maps(
        twin, torch.from_numpy(TOKENS), mask=torch.from_numpy(allowed)[:, None, None]
    )
    assert_same(candidate, reference)
    assert candidate.shape == (2, 2, 4, 17, 17)
    np.testing.assert_allclose(candidate[:, 0].sum(axis=-1), 1, rtol=0, atol=1e-12)
    assert (candidate[:, 1, :, :, 11:] == 0).all()
    assert (np.triu(candidate, 1) == 0).all()


@pytest.mark.parametrize("block", full_after(1, ["post_norm", "parallel"]))
@pytest.mark.tier("full")
def test_maps_of_an_encoder_and_decoder_agree(block):
    config = EncoderDecoderConfig(
        source_vocab_size=23, target_vocab_size=29, context_length=17, d_model=24, num_heads=4,
        encoder_num_heads=3, d_ff=40, num_encoder_layers=3, num_decoder_layers=2, block=block,
    )  # fmt: skip
    model = EncoderDecoder(config, rngs=nnx.Rngs(0))
    set_parameters(model, perturbed(model))
    model.eval()
    twin = torch_ref.encoder_decoder.EncoderDecoder(
        torch_ref.config.EncoderDecoderConfig(**config.settings())
    ).eval()
    copy_to_torch(model, twin)
    source, target = TOKENS[:, :11] % 23, TOKENS[:, :7]
    allowed = (np.arange(11)[None] < np.array([[11], [6]]))[:, None, None]
    kinds = analysis.sequence_attention_maps(
        model, jnp.asarray(source), jnp.asarray(target), memory_mask=jnp.asarray(allowed)
    )
    reference = torch_ref.analysis.sequence_attention_maps(
        twin,
        torch.from_numpy(source),
        torch.from_numpy(target),
        memory_mask=torch.from_numpy(allowed),
    )
    assert_same(kinds, reference)
    assert {kind: maps.shape for kind, maps in kinds.items()} == {
        "encoder": (3, 2, 3, 11, 11),
        "decoder": (2, 2, 4, 7, 7),
        "cross": (2, 2, 4, 7, 11),
    }
    assert (kinds["cross"][:, 1, ..., 6:] == 0).all()
    np.testing.assert_allclose(kinds["cross"].sum(axis=-1), 1, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match=r"layer must be in \[0, 2\): got 2"):
        analysis.sequence_attention_maps(model, jnp.asarray(source), jnp.asarray(target), layer=2)


def test_layers_and_heads_are_chosen_from_the_whole():
    model, twin = build()
    tokens, torch_tokens = jnp.asarray(TOKENS), torch.from_numpy(TOKENS)
    whole = analysis.attention_maps(model, tokens)
    for choice, expected in (
        ({"layer": 1}, whole[1]),
        ({"head": 1}, whole[:, :, 1]),
        ({"layer": 1, "head": 3}, whole[1, :, 3]),
        ({"layer": 0, "head": "mean"}, whole[0].mean(axis=1)),
        ({"head": "mean"}, whole.mean(axis=2)),
    ):
        assert_same(analysis.attention_maps(model, tokens, **choice), expected)
        assert_same(torch_ref.analysis.attention_maps(twin, torch_tokens, **choice), expected)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"layer": 2}, r"layer must be in \[0, 2\): got 2"),
        ({"head": -1}, r"head must be in \[0, 4\): got -1"),
    ],
)
def test_a_layer_or_head_that_is_not_there_is_refused(choice, message):
    model, twin = build()
    with pytest.raises(ValueError, match=message):
        analysis.attention_maps(model, jnp.asarray(TOKENS), **choice)
    with pytest.raises(ValueError, match=message):
        torch_ref.analysis.attention_maps(twin, torch.from_numpy(TOKENS), **choice)


def test_the_maps_are_the_weights_applied_after_dropout():
    config = dataclasses.replace(CONFIG, num_layers=1, attention_dropout=0.4)
    model, twin = build(config, training=True)
    keep = np.random.default_rng(7).random((2, 4, 17, 17)) < 0.6
    place = "blocks.0.attention.attention_dropout"
    inject_keep_masks(model, {place: jnp.asarray(keep)})
    torch_ref.layers.inject_keep_masks(twin, {place: torch.from_numpy(keep)})
    x, torch_x = stream()
    attention, twin_attention = model.blocks[0].attention, twin.blocks[0].attention

    maps = analysis.attention_maps(attention, x)
    assert_same(maps, torch_ref.analysis.attention_maps(twin_attention, torch_x))
    assert maps.shape == (1, 2, 4, 17, 17)
    assert ((maps[0] == 0) == ~keep).all()
    values = np.asarray(attention.v_proj(x)).reshape(2, 17, 4, 6)
    heads = np.einsum("bnts,bsnh->btnh", maps[0], values).reshape(2, 17, 24)
    for output in (attention(x), twin_attention(torch_x).detach()):
        np.testing.assert_allclose(
            np.asarray(attention.o_proj(jnp.asarray(heads))), output, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("name", full_after(2, CONFIGS))
def test_gradient_norms_agree_by_the_naming_rule(name):
    model, twin = build(CONFIGS[name])
    candidate = analysis.gradient_norms(model, jnp.asarray(TOKENS))
    reference = torch_ref.analysis.gradient_norms(twin, torch.from_numpy(TOKENS))
    assert candidate.keys() == get_parameters(model).keys()
    assert {torch_name(key) for key in candidate} == reference.keys()
    scale = max(reference.values())
    for key, norm in candidate.items():
        assert abs(norm - reference[torch_name(key)]) <= 1e-12 * scale, key
        zero = key.endswith("k_proj.bias") and CONFIGS[name].attention.score_soft_cap is None
        assert zero == (norm < 1e-12 * scale), key
    assert all(parameter.grad is None for parameter in twin.parameters())


def test_gradient_norms_are_those_of_finite_differences():
    model, _ = build()
    tokens, name = jnp.asarray(TOKENS), "blocks.1.feed_forward.down_proj.bias"
    definition, parameters = split(model)

    @jax.jit
    @jax.vmap
    def total(bias):
        return jnp.sum(merge(definition, {**parameters, name: bias})(tokens))

    steps = 1e-5 * jnp.eye(24)
    bias = parameters[name][None]
    gradient = (total(bias + steps) - total(bias - steps)) / 2e-5
    expected = analysis.gradient_norms(model, tokens)[name]
    np.testing.assert_allclose(np.linalg.norm(gradient), expected, rtol=1e-7)


def test_the_sum_of_a_fresh_layer_norm_has_no_gradient_before_it():
    model = TransformerLM(dataclasses.replace(CONFIG, block="post_norm"), rngs=nnx.Rngs(0))
    norms = analysis.gradient_norms(model.blocks[0], stream()[0])
    after = {"feed_forward_norm.scale", "feed_forward_norm.bias"}
    assert min(norms[name] for name in after) > 1
    assert max(norm for name, norm in norms.items() if name not in after) < 1e-10


def test_statistics_of_the_same_fresh_weights_agree():
    model, twin = build()
    tokens, torch_tokens = jnp.asarray(TOKENS), torch.from_numpy(TOKENS)
    before = get_parameters(model)
    compared = analysis.initialization_comparison(model, tokens, seed=5)
    assert list(compared) == ["xavier_uniform", "kaiming_uniform", "normal"]
    for scheme, statistics in compared.items():
        with analysis.reinitialized(model, scheme, 5):
            fresh = get_parameters(model)
            copy_to_torch(model, twin)
        assert_same(statistics, torch_ref.analysis.output_statistics(twin(torch_tokens)))
        assert all((fresh[name] == 0).all() for name in fresh if name.endswith("bias"))
        assert all((fresh[name] != before[name]).any() for name in fresh if fresh[name].ndim > 1)
    after = get_parameters(model)
    assert all((after[name] == before[name]).all() for name in before)


def test_initializations_have_the_same_distribution_on_both_sides():
    config = dataclasses.replace(CONFIG, d_model=96, d_ff=200, vocab_size=300, num_layers=1)
    model, twin = build(config)
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    candidate = analysis.initialization_comparison(model, jnp.asarray(TOKENS))
    reference = torch_ref.analysis.initialization_comparison(twin, torch.from_numpy(TOKENS))
    assert list(candidate) == list(reference)
    for scheme in candidate:
        assert 0.85 < candidate[scheme]["std"] / reference[scheme]["std"] < 1.18
        assert candidate[scheme]["min"] < -2 * candidate[scheme]["std"]
        assert candidate[scheme]["max"] > 2 * candidate[scheme]["std"]
    assert (
        candidate["normal"]["std"]
        < candidate["xavier_uniform"]["std"]
        < candidate["kaiming_uniform"]["std"]
    )
    assert all((p == before[name]).all() for name, p in twin.named_parameters())


def test_an_unknown_initialization_is_refused():
    model, twin = build()
    for side, module in ((analysis, model), (torch_ref.analysis, twin)):
        with (
            pytest.raises(ValueError, match=r"scheme must be one of .*: got 'gpt2'"),
            side.reinitialized(module, "gpt2", 0),
        ):
            pass


def test_statistics_are_those_of_the_population():
    for output in (jnp.array([[1.0, 2.0], [3.0, 6.0]]), torch.tensor([[1.0, 2.0], [3.0, 6.0]])):
        side = analysis if isinstance(output, jnp.ndarray) else torch_ref.analysis
        assert side.output_statistics(output) == {
            "mean": 3.0, "std": 3.5**0.5, "min": 1.0, "max": 6.0,
        }  # fmt: skip


def test_norm_orders_agree_and_only_post_norm_keeps_the_scale():
    config = dataclasses.replace(CONFIG, num_layers=6, initialization="torch")
    model, twin = build(config)
    x, torch_x = stream()
    mask = np.tril(np.ones((17, 17), bool))
    candidate = analysis.norm_order_comparison(model.blocks, x, jnp.asarray(mask))
    assert_same(
        candidate,
        torch_ref.analysis.norm_order_comparison(twin.blocks, torch_x, torch.from_numpy(mask)),
    )
    assert_same(
        candidate["pre_norm"], analysis.depth_statistics(model.blocks, x, jnp.asarray(mask))
    )

    fresh = TransformerLM(config, rngs=nnx.Rngs(0))
    fresh.eval()
    facts = analysis.norm_order_comparison(fresh.blocks, x)
    np.testing.assert_allclose(facts["post_norm"]["std"][1:], 1, rtol=0, atol=1e-5)
    np.testing.assert_allclose(facts["post_norm"]["mean"][1:], 0, rtol=0, atol=1e-12)
    assert (np.diff(facts["pre_norm"]["std"]) > 0).all()
    assert facts["pre_norm"]["std"][-1] > 1.1


@pytest.mark.parametrize(
    "settings", [{"branch_output_norm": True}, {"block": "parallel", "shared_norm": True}], ids=str
)
def test_norm_orders_use_all_norms_of_the_blocks(settings):
    model, twin = build(dataclasses.replace(CONFIG, **settings))
    x, torch_x = stream()
    candidate = analysis.norm_order_comparison(model.blocks, x)
    assert_same(candidate, torch_ref.analysis.norm_order_comparison(twin.blocks, torch_x))
    plain = analysis.norm_order_comparison(build()[0].blocks, x)
    assert (candidate["pre_norm"]["std"][1:] != plain["pre_norm"]["std"][1:]).all()
    if settings.get("branch_output_norm"):
        assert_same(candidate["pre_norm"], analysis.depth_statistics(model.blocks, x))


def test_norm_orders_keep_the_mode_of_the_blocks():
    config = dataclasses.replace(CONFIG, residual_dropout=0.5)
    model, twin = build(config)
    x, torch_x = stream()
    candidate = analysis.norm_order_comparison(model.blocks, x)
    assert_same(candidate, torch_ref.analysis.norm_order_comparison(twin.blocks, torch_x))


def test_position_tables_agree():
    candidate = [
        LearnedPositions(23, 10, offset=2, rngs=nnx.Rngs(0)),
        SinusoidalPositions(23, 10),
        Rotary(8, 23, base=500.0),
        ALiBi(3),
        RelativePositions(4, 6, rngs=nnx.Rngs(0)),
        NoPositions(),
    ]
    reference = [
        torch_ref.positions.LearnedPositions(23, 10, offset=2),
        torch_ref.positions.SinusoidalPositions(23, 10),
        torch_ref.positions.Rotary(8, 23, base=500.0),
        torch_ref.positions.ALiBi(3),
        torch_ref.positions.RelativePositions(4, 6),
        torch_ref.positions.NoPositions(),
    ]
    for one, other in zip(candidate, reference, strict=True):
        if get_parameters(one):
            copy_to_torch(one, other)
    tables = analysis.position_tables(None, *candidate, length=19)
    assert_same(tables, torch_ref.analysis.position_tables(None, *reference, length=19))
    assert {name: table.shape for name, table in tables.items()} == {
        "learned": (19, 10),
        "sinusoidal": (19, 10),
        "rotary_cos": (19, 4),
        "rotary_sin": (19, 4),
        "alibi": (3, 19, 19),
        "relative": (9, 6),
    }
    np.testing.assert_array_equal(tables["learned"], candidate[0].embedding[2:21])
    assert tables["alibi"][0, 7, 2] == -5 * 2**-4
    np.testing.assert_allclose(
        tables["rotary_cos"][5], np.cos(5 * 500.0 ** (-np.arange(4) / 4)), atol=1e-6
    )
    for side, scheme, dropout in (
        (analysis, candidate[2], Dropout(0.0)),
        (torch_ref.analysis, reference[2], torch_ref.layers.Dropout(0.0)),
    ):
        with pytest.raises(ValueError, match="rotary_cos positions end at 23: got length=24"):
            side.position_tables(scheme, length=24)
        with pytest.raises(ValueError, match="Dropout is not a position scheme with a table"):
            side.position_tables(dropout, length=3)


def test_masks_agree():
    candidate = analysis.mask_tables(13, window=4, lengths=[13, 8])
    assert_same(candidate, torch_ref.analysis.mask_tables(13, window=4, lengths=[13, 8]))
    query, key = np.indices((13, 13))
    assert (candidate["causal"] == (key <= query)).all()
    assert (candidate["window"] == (abs(key - query) < 4)).all()
    assert (candidate["padding"][1] == (key < 8)).all()
    assert (
        candidate["combined"] == candidate["causal"] & candidate["window"] & candidate["padding"]
    ).all()
    assert not candidate["combined"][1, 11].any()
