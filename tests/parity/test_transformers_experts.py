"""Models of transformers whose experts run in one product, as by default, are compared."""

import numpy as np
import pytest
import torch
import transformers
from flax import nnx

from jaxformer import compare, compare_generation, compare_training, from_torch
from jaxformer.parity.matching.layouts import nearest_layout
from jaxformer.parity.recording.torch_values import experts_one_by_one
from tests.support.tiers import FULL

IDS = np.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def mixtral():
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=13, hidden_size=8, intermediate_size=6, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        num_local_experts=4,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).eval()


def by_operators(module):
    """Compares the port as a plain function, which no dialect knows."""
    definition, state = nnx.split(from_torch(module))
    return compare(module, (lambda state, ids: nnx.merge(definition, state)(ids), state), IDS)


def test_a_model_is_as_before_when_it_has_run(mixtral):
    wrapped = torch.nn.Sequential(mixtral)
    before = mixtral.config._experts_implementation
    assert before != "eager"
    with experts_one_by_one(wrapped), torch.no_grad():
        assert mixtral.double()(torch.tensor(IDS)).logits.dtype == torch.float64
    assert mixtral.config._experts_implementation == before
    mixtral.float()


@FULL
@pytest.mark.parametrize(
    "run",
    [
        pytest.param(lambda module: compare(module, inputs=IDS), id="modules"),
        pytest.param(by_operators, id="operators"),
        pytest.param(lambda module: compare_training(module, steps=1), id="training"),
        pytest.param(lambda module: compare_generation(module, tokens=1), id="generation"),
    ],
)
def test_models_are_compared_as_their_class_makes_them(mixtral, run):
    before = mixtral.config._experts_implementation
    assert run(mixtral).verdict in ("exact", "rounding")
    assert mixtral.config._experts_implementation == before


def test_what_an_expert_without_tokens_makes_is_near_nothing():
    assert nearest_layout(np.zeros((0, 3)), np.zeros((3, 0))) is None
