"""The row of the padding token gets a gradient where it is looked up, which PyTorch leaves out.

Marian and Pegasus begin their targets with the padding token, so that fine-tuning moves its row.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxformer.parameters import merge, split
from jaxformer.porting.api import export_plan, from_torch
from tests.support.hugging_face.building import build_case, build_exact, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.precision import in_float64

pytestmark = pytest.mark.usefixtures("float64")
PAD = 1


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["marian", "pegasus"])
def test_all_other_rows_and_arrays_have_the_gradient_of_transformers(name):
    rng = np.random.default_rng(0)
    source, labels = rng.integers(3, 37, (2, 3, 9))
    target = np.concatenate((np.full((3, 1), PAD), labels[:, :-1]), axis=1)
    weights = randomize(build_case(CASES[name])).state_dict()
    found = {}
    for left_out in (True, False):
        model = build_exact(CASES[name], weights)
        if not left_out:
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding):
                    module.padding_idx = None
        with in_float64():
            logits = model(
                torch.as_tensor(source), decoder_input_ids=torch.as_tensor(target)
            ).logits
            loss = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), torch.as_tensor(labels)
            )
            loss.backward()
        found[left_out] = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    candidate = from_torch(model)
    definition, parameters = split(candidate)

    def loss_of(parameters):
        with in_float64():
            logits = merge(definition, parameters)(jnp.asarray(source), jnp.asarray(target))
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)
        return -picked.mean()

    gradients = jax.jit(jax.grad(loss_of))(parameters)
    names = {n: t.read() for n, t in export_plan(candidate, name, gradients).tensors.items()}
    rows = "model.shared.weight"
    largest = max(float(g.abs().max()) for g in found[False].values())
    for array, gradient in found[False].items():
        assert np.abs(names[array] - gradient.numpy()).max() <= 1e-12 * largest, array
    difference = np.abs(names[rows] - found[True][rows].numpy())
    assert difference[PAD].max() > 1e-3 * largest
    assert np.delete(difference, PAD, axis=0).max() <= 1e-12 * largest
