"""The same operations counted and the same fit made on both sides; time and memory measured."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch.utils.flop_counter import FlopCounterMode

import torch_ref.builders
import torch_ref.config
import torch_ref.costs
import torch_ref.encoder_decoder
import torch_ref.transformer_lm
from jaxformer import costs
from jaxformer.builders import make_block
from jaxformer.config import EncoderDecoderConfig, TransformerConfig, TransformerLMConfig
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.parameters import merge, split
from jaxformer.transformer_lm import TransformerLM

CONFIG = TransformerConfig(d_model=24, num_heads=4, context_length=64, d_ff=40)
CONFIGS = {
    "multi-head": CONFIG,
    "grouped, gated, own head size": dataclasses.replace(
        CONFIG, num_kv_heads=2, head_dim=10, activation="swiglu", d_ff=None, positions="rotary"
    ),
    "output norms": dataclasses.replace(CONFIG, branch_output_norm=True, activation="silu"),
    "latent": dataclasses.replace(
        CONFIG,
        positions="rotary",
        head_dim=10,
        latent_width=13,
        rotary_head_dim=4,
        value_head_dim=7,
        query_latent_width=9,
    ),
    "experts": dataclasses.replace(
        CONFIG,
        activation="swiglu",
        num_experts=5,
        experts_per_token=3,
        expert_d_ff=11,
        shared_expert_d_ff=9,
        shared_expert_gate=True,
    ),
    "shared norm": dataclasses.replace(
        CONFIG, block="parallel", shared_norm=True, activation="gelu_bloom"
    ),
}


def twin_of(config):
    return torch_ref.config.TransformerConfig(**config.settings())


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_operations_are_those_that_torch_carries_out(name):
    config, length = CONFIGS[name], 17
    block = torch_ref.builders.make_block(twin_of(config))
    counted = torch_ref.costs.count_operations(block, length)
    assert costs.count_operations(make_block(config, rngs=nnx.Rngs(0)), length) == counted

    x = torch.randn(3, length, 24, requires_grad=True)
    counter = FlopCounterMode(display=False)
    with counter:
        # With the weights asked for, attention is made of plain products.
        output = block(x, return_weights=True)[0]
    assert counter.get_total_flops() == 3 * (counted["attention"] + counted["dense"])
    # The counter starts anew: backward alone takes twice as many.
    with counter:
        output.sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (counted["attention"] + counted["dense"])


def test_counted_operations_are_nearly_all_that_xla_carries_out():
    config, length = dataclasses.replace(CONFIG, d_model=96, d_ff=200), 64
    block = make_block(config, rngs=nnx.Rngs(0))
    definition, parameters = split(block)
    x = jnp.zeros((1, length, 96), jnp.float32)
    compiled = jax.jit(lambda p, x: merge(definition, p)(x)).lower(parameters, x).compile()
    counted = sum(costs.count_operations(block, length).values())
    assert 1 <= compiled.cost_analysis()["flops"] / counted < 1.15


MODEL = TransformerLMConfig(d_model=24, num_heads=4, context_length=64, num_layers=3, vocab_size=70)
MODELS = {
    "tied": MODEL,
    "untied, grouped, gated": dataclasses.replace(
        MODEL, tie_embeddings=False, num_kv_heads=2, activation="swiglu", positions="rotary"
    ),
    "masked": dataclasses.replace(MODEL, head="masked_lm", causal=False, pooler=True),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_operations_are_those_that_torch_carries_out(name):
    config, length, batch = MODELS[name], 17, 3
    twin_config = torch_ref.config.TransformerLMConfig(**config.settings())
    twin = torch_ref.transformer_lm.TransformerLM(twin_config)
    counted = torch_ref.costs.count_training_operations(twin, length)
    abstract = nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0)))
    assert costs.count_training_operations(abstract, length) == counted

    counter = FlopCounterMode(display=False)
    with counter:
        logits, _ = twin(torch.arange(batch * length).reshape(batch, length), return_weights=True)
    forward = counter.get_total_flops()
    with counter:
        logits.sum().backward()
    assert forward + counter.get_total_flops() == batch * length * counted


@pytest.mark.parametrize("is_tied", [True, False])
def test_operations_of_a_source_and_its_target_are_those_that_torch_carries_out(is_tied):
    config = EncoderDecoderConfig(
        d_model=24, num_heads=4, num_kv_heads=2, encoder_d_ff=30, num_encoder_layers=2,
        num_decoder_layers=3, context_length=64, source_vocab_size=70, target_vocab_size=50,
        shared_embedding=False, tie_embeddings=is_tied,
    )  # fmt: skip
    length, source_length, batch = 17, 26, 2
    twin = torch_ref.encoder_decoder.EncoderDecoder(
        torch_ref.config.EncoderDecoderConfig(**config.settings())
    )
    abstract = nnx.eval_shape(lambda: EncoderDecoder(config, rngs=nnx.Rngs(0)))
    counted = costs.count_training_operations(abstract, length, source_length)
    assert torch_ref.costs.count_training_operations(twin, length, source_length) == counted

    counter = FlopCounterMode(display=False)
    source = torch.arange(batch * source_length).reshape(batch, -1)
    target = torch.arange(batch * length).reshape(batch, -1)
    with counter:
        memory, _ = twin.encode(source, return_weights=True)
        hidden, _ = twin.decode(target, memory, return_weights="both")
        logits = twin.logits(hidden)
    forward = counter.get_total_flops()
    with counter:
        logits.sum().backward()
    exact = forward + counter.get_total_flops()
    assert exact // (batch * (length + source_length)) == counted


def test_training_operations_are_those_of_the_published_formula():
    """PaLM's 6 N + 12 L H Q T; N counts no table that is only looked up, nor norms and biases."""
    model = nnx.eval_shape(lambda: TransformerLM(MODEL, rngs=nnx.Rngs(0)))
    matrices = 3 * (4 * 24**2 + 2 * 24 * 4 * 24) + 70 * 24
    assert costs.count_training_operations(model, 50) == 6 * matrices + 12 * 3 * 4 * 6 * 50


def test_the_terms_grow_as_they_are_named():
    def count(length=16, **settings):
        config = dataclasses.replace(CONFIG, **settings)
        return costs.count_operations(make_block(config, rngs=nnx.Rngs(0)), length)

    one, longer, wider = count(), count(32), count(d_model=48, d_ff=80)
    assert longer == {"attention": 4 * one["attention"], "dense": 2 * one["dense"]}
    assert wider == {"attention": 2 * one["attention"], "dense": 4 * one["dense"]}
    assert one == {"attention": 4 * 16**2 * 24, "dense": 8 * 16 * 24**2 + 4 * 16 * 24 * 40}


def synthetic(noise):
    random = np.random.default_rng(0)
    length, d_model = (grid.ravel() for grid in np.meshgrid([32, 64, 128, 512], [64.0, 96, 256]))
    terms = {
        "length": length,
        "d_model": d_model,
        "attention_operations": 12.0 * length**2 * d_model,
        "dense_operations": 72.0 * length * d_model**2,
        "attention_weights": 4.0 * length**2,
        "activations": 5.0 * length * d_model,
    }
    seconds = 2e-4 + 3e-11 * terms["attention_operations"] + 5e-12 * terms["dense_operations"]
    size = 1e5 + 16 * terms["attention_weights"] + 6 * terms["activations"]
    factors = 1 + noise * random.standard_normal((2, len(length)))
    return {**terms, "seconds": seconds * factors[0], "bytes": size * factors[1]}


def test_the_fit_finds_the_coefficients_and_agrees():
    measured = synthetic(0)
    fit = costs.fit_costs(measured)
    expected = {
        "seconds": {"constant": 2e-4, "attention_operations": 3e-11, "dense_operations": 5e-12},
        "bytes": {"constant": 1e5, "attention_weights": 16, "activations": 6},
    }
    for what, coefficients in expected.items():
        assert fit[what].pop("error") < 1e-9
        assert fit[what] == pytest.approx(coefficients, rel=1e-9)
        fitted = costs.evaluate_fit(fit[what], measured)
        np.testing.assert_allclose(fitted, measured[what], rtol=1e-9)

    noisy = synthetic(0.05)
    fit = costs.fit_costs(noisy)
    assert fit == torch_ref.costs.fit_costs(noisy)
    assert 0.01 < fit["seconds"]["error"] < 0.08
    for what, coefficients in expected.items():
        for name, value in coefficients.items():
            assert fit[what][name] == pytest.approx(value, rel=0.5)
    for side in (costs, torch_ref.costs):
        with pytest.raises(ValueError, match="a fit needs 3 points or more: got 2"):
            side.fit_costs({name: column[:2] for name, column in noisy.items()})


def test_measured_points_agree_in_all_but_time_and_memory():
    with jax.enable_x64(False):
        candidate = costs.measure_blocks([CONFIG], [64, 256], batch_size=2, rounds=1)
    reference = torch_ref.costs.measure_blocks([twin_of(CONFIG)], [64, 256], batch_size=2, rounds=1)
    assert candidate.keys() == reference.keys()
    for name in candidate.keys() - {"seconds", "bytes"}:
        assert (candidate[name] == reference[name]).all(), name
    for measured in (candidate, reference):
        assert measured["length"].tolist() == [64, 256]
        assert measured["d_model"].tolist() == [24, 24]
        assert measured["attention_operations"].tolist() == [
            3 * 2 * 4 * length**2 * 24 for length in (64, 256)
        ]
        assert (measured["seconds"] > 0).all()
    # XLA keeps the weights for the backward pass: four times the length, up to 16 times the bytes.
    kept = 4 * candidate["attention_weights"]
    assert (candidate["bytes"] > kept).all()
    assert 8 < candidate["bytes"][1] / candidate["bytes"][0] < 16
    # Torch's fused attention does not, and its saved tensors grow with the length alone.
    assert 3.9 < reference["bytes"][1] / reference["bytes"][0] < 4.1
    assert (reference["bytes"] > 4 * reference["activations"]).all()


def test_of_experts_those_count_that_a_token_has():
    settings = {
        "d_model": 24, "num_heads": 4, "context_length": 8, "d_ff": 40, "activation": "swiglu",
        "num_experts": 6, "experts_per_token": 3, "expert_d_ff": 10, "num_layers": 1,
    }  # fmt: skip
    config = TransformerLMConfig(**settings)
    block = make_block(config, rngs=nnx.Rngs(0))
    twin = torch_ref.builders.make_block(torch_ref.config.TransformerLMConfig(**settings))
    expected = 2 * 7 * (4 * 24 * 24 + 24 * 6 + 3 * 3 * 24 * 10)
    assert costs.count_operations(block, 7)["dense"] == expected
    assert torch_ref.costs.count_operations(twin, 7)["dense"] == expected
