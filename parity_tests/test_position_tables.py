"""Frequencies, sinusoids and slopes against the functions of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.falcon.modeling_falcon import build_alibi_tensor
from transformers.models.hunyuan_v1_dense.configuration_hunyuan_v1_dense import (
    HunYuanDenseV1Config,
)
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor
from transformers.models.xglm.modeling_xglm import XGLMSinusoidalPositionalEmbedding

from jaxformer.disentangled import DisentangledPositions
from jaxformer.position_tables import RotaryScaling, rotary_frequencies, sinusoidal_table
from jaxformer.positions import ALiBi, RelativeBuckets, Rotary, alibi_slopes

HALF, ORIGINAL = 24, 512
SHORT, LONG = (tuple(1 + step * i for i in range(HALF)) for step in (0.05, 0.7))
# Settings of transformers, and of RotaryScaling.
KINDS = {
    "linear": ({"factor": 3.0}, {"factor": 3.0}),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"factor": 8.0},
    ),
    "yarn": ({"factor": 4.0}, {"factor": 4.0}),
    "yarn-exact": (
        {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
        {"factor": 4.0, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False},
    ),
    "yarn-factor": (
        {"factor": 4.0, "attention_factor": 0.8}, {"factor": 4.0, "attention_factor": 0.8},
    ),
    "longrope": (
        {"factor": 4.0, "short_factor": list(SHORT), "long_factor": list(LONG)},
        {"factor": 4.0, "short_factors": SHORT, "long_factors": LONG},
    ),
    "longrope-factor": (
        {"factor": 4.0, "short_factor": list(SHORT), "long_factor": list(LONG),
         "attention_factor": 1.3},
        {"factor": 4.0, "short_factors": SHORT, "long_factors": LONG, "attention_factor": 1.3},
    ),
    "dynamic": ({"factor": 3.0}, {"factor": 3.0}),
    "dynamic-odd": ({"factor": 1.1}, {"factor": 1.1}),
    "proportional": (
        {"factor": 2.0, "partial_rotary_factor": 0.3}, {"factor": 2.0, "proportion": 0.3},
    ),
}  # fmt: skip


def pair(kind: str, base: float) -> tuple[LlamaConfig, RotaryScaling]:
    """The same scaling on both sides."""
    foreign, scaling = KINDS[kind]
    kind = kind.partition("-")[0]
    config = LlamaConfig(
        hidden_size=4 * HALF, num_attention_heads=2, head_dim=2 * HALF,
        max_position_embeddings=ORIGINAL,
        rope_parameters={"rope_type": kind, "rope_theta": base, **foreign}
        | ({} if kind == "dynamic" else {"original_max_position_embeddings": ORIGINAL}),
    )  # fmt: skip
    return config, RotaryScaling(kind, original_context_length=ORIGINAL, **scaling)


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_frequencies_are_those_of_transformers(kind, base):
    config, scaling = pair(kind, base)
    for length in (ORIGINAL, ORIGINAL + 1, 3 * ORIGINAL + 5):
        grows = kind.startswith("dynamic") and length > ORIGINAL
        seq_len = torch.tensor(length) if grows else length
        found, factor = ROPE_INIT_FUNCTIONS[scaling.kind](config, "cpu", seq_len=seq_len)
        candidate = rotary_frequencies(2 * HALF, base, scaling, length)
        # torch's float32 powers are an ulp or two off the correctly rounded ones.
        np.testing.assert_allclose(candidate, found.numpy(), rtol=4 * 2.0**-23, atol=0)
        assert scaling.table_factor == factor


@pytest.mark.parametrize("kind", [k for k in KINDS if k.startswith(("dynamic", "longrope"))])
@pytest.mark.parametrize("length", [ORIGINAL - 3, ORIGINAL, ORIGINAL + 1, 2 * ORIGINAL])
def test_tables_follow_the_length_as_in_transformers(kind, length):
    config, scaling = pair(kind, 10000.0)
    module = LlamaRotaryEmbedding(config)
    found = module(torch.zeros(()), torch.arange(length)[None])
    rotary = Rotary(2 * HALF, 3 * ORIGINAL, scaling=scaling)
    # What one ulp or two of a frequency turn in so many positions, and one rounding.
    allowed = 4 * 2.0**-23 * length * scaling.table_factor + 2.0**-22
    for table, reference in zip(rotary.tables(length), found, strict=True):
        assert np.max(np.abs(table[:length] - reference[0, :, :HALF].numpy())) <= allowed


def test_the_base_grows_as_hunyuan_lets_it():
    parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}
    config = HunYuanDenseV1Config(
        hidden_size=4 * HALF, num_attention_heads=2, head_dim=2 * HALF, rope_parameters=parameters
    )
    found = HunYuanDenseV1RotaryEmbedding(config).inv_freq.numpy()
    candidate = rotary_frequencies(2 * HALF, 10000.0, RotaryScaling("ntk", 1000.0))
    np.testing.assert_allclose(candidate, found, rtol=4 * 2.0**-23, atol=0)


def test_sinusoids_in_halves_are_those_of_xglm():
    found = XGLMSinusoidalPositionalEmbedding.get_embedding(302, 37).numpy()
    # One ulp of a frequency at position 301, and one rounding.
    np.testing.assert_allclose(sinusoidal_table(302, 37, True), found, rtol=0, atol=301 * 2.0**-23)


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16, 25, 71])
@pytest.mark.parametrize("max_bias", [8, 5])
def test_slopes_are_those_of_mpt(heads, max_bias):
    found = -build_mpt_alibi_tensor(heads, 2, max_bias)[:, 0, 0].numpy()
    np.testing.assert_allclose(alibi_slopes(heads, max_bias), found, rtol=4 * 2.0**-23)


@pytest.mark.parametrize("heads", [4, 6, 71, 128])
def test_the_bias_in_bfloat16_is_that_of_falcon_to_the_bit(heads):
    keys = 1000
    found = build_alibi_tensor(torch.ones((1, keys), dtype=torch.int64), heads, torch.float32)
    scheme = ALiBi(heads, in_bfloat16=True, scale=1.0)
    candidate = scheme.bias(np.zeros((1, 1, heads, 1)), np.arange(keys)[None] - (keys - 1))
    np.testing.assert_array_equal(np.asarray(candidate)[0, :, 0], found.numpy()[:, 0])


def test_longrope_wants_a_factor_for_each_pair():
    with pytest.raises(ValueError, match="one factor for each pair: got 2 for 3"):
        rotary_frequencies(6, 10000.0, RotaryScaling("longrope", short_factors=(1.0, 2.0)))


@pytest.mark.parametrize("is_wide", [True, False])
def test_buckets_are_the_same_in_both_modes_of_jax(is_wide):
    position = RelativeBuckets(8, 2, max_distance=20, rngs=nnx.Rngs(0))
    other = DisentangledPositions(12, 2, 6, span=5, max_distance=30, rngs=nnx.Rngs(0))

    def run(distance):
        return position.bias(None, distance), other._buckets(distance)

    def distance():
        return jnp.arange(7)[None] - jnp.arange(7)[:, None]

    # While a program of the other mode holds the tables.
    with jax.enable_x64(not is_wide):
        program = jax.make_jaxpr(run)(distance())
        found = run(distance())
    with jax.enable_x64(is_wide):
        jax.tree.map(np.testing.assert_array_equal, run(distance()), found)
    del program
