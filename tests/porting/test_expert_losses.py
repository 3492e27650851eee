"""The training loss of models with experts is that of transformers, its balance loss included."""

import jax
import numpy as np
import pytest
import torch

from jaxformer.parameters import split
from jaxformer.porting.api import export_plan, from_torch
from jaxformer.porting.formats.arrays import to_stored_tensors
from jaxformer.porting.mapping.transfer import import_tensors
from jaxformer.train_step import language_model_loss
from tests.support.hugging_face.building import build, randomize
from tests.support.hugging_face.case import GROUPED
from tests.support.hugging_face.cases.experts import OLMOE, QWEN, QWEN2
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.running import assert_close, tokens
from tests.support.tiers import full_after

pytestmark = pytest.mark.usefixtures("float64")

BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.7, "vocab_size": 37}
MODELS = [
    ("MixtralForCausalLM", {**GROUPED, "num_local_experts": 5}),
    ("Qwen2MoeForCausalLM", {**QWEN2, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    ("Qwen3MoeForCausalLM", {**QWEN, "norm_topk_prob": True}),
    ("OlmoeForCausalLM", OLMOE),
]


@pytest.mark.parametrize(("kind", "settings"), full_after(0, MODELS))
def test_losses_and_gradients_are_those_of_transformers(kind, settings):
    ids = tokens(2, (3, 41))
    # The last token has no target, and uses experts all the same.
    targets = np.concatenate([ids[:, 1:], np.full((3, 1), -1)], axis=1)
    divisor = (targets >= 0).sum()
    with in_float64():
        source = randomize(build(kind, {**settings, **BALANCED}).double())
        given = torch.as_tensor(ids)
        result = source(given, labels=given)
        result.loss.backward()
        target = from_torch(source)
        definition, parameters = split(target)

        def loss(parameters):
            return language_model_loss(definition, parameters, ids, targets, None, divisor=divisor)

        value, gradients = jax.value_and_grad(loss)(parameters)
    assert_close(value, result.loss.detach(), 1e-12)
    reference = {name: p.grad for name, p in source.named_parameters()}
    expected = import_tensors(export_plan(target).links, to_stored_tensors(reference))
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, expected[name].read(), 1e-12, name)
    assert result.aux_loss.item() > 0.1
