"""Memory that is freed during a comparison changes nothing in the report."""

import numpy as np
import pytest
import torch

from jaxformer.parity.comparison import modules as comparison
from jaxformer.parity.comparison.modules import compare
from jaxformer.parity.trace import torch_trace
from tests.parity.test_mutants import assert_named, generator
from tests.support import mutants
from tests.support.subjects import F, V, ids, subject

pytestmark = [pytest.mark.optimized, pytest.mark.usefixtures("float64")]

NAMES = ["gpt2", "llama", "bert"]


class Tied(torch.nn.Module):
    """An embedding that is also the head, with an in-place operation between the two."""

    def __init__(self, in_place: bool):
        super().__init__()
        self.embedding = torch.nn.Embedding(V, F)
        self.inner = torch.nn.Linear(F, F)
        self.head = torch.nn.Linear(F, V, bias=False)
        self.head.weight = self.embedding.weight
        self.in_place = in_place

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.embedding(tokens))
        return self.head(x.relu_() if self.in_place else x.relu())


def pull(outputs: list[np.ndarray]) -> list[np.ndarray]:
    return [np.random.default_rng(5).standard_normal(a.shape) for a in outputs]


@pytest.mark.parametrize("in_place", [False, True])
def test_weights_are_freed_and_copied_again_where_records_were_overwritten(in_place):
    torch.manual_seed(0)
    module = Tied(in_place).double()
    expected = torch_trace.run(module, [ids()], cotangents=pull)
    made = []

    def copy_module() -> Tied:
        made.append(torch_trace.in_float64(module))
        return made[-1]

    used_up = torch_trace.in_float64(module)
    found = torch_trace.run(used_up, [ids()], cotangents=pull, copy_module=copy_module)
    assert len(made) == in_place
    assert used_up.inner.weight.numel() == 0
    assert module.inner.weight.numel() == F * F
    assert found.gradients.keys() == expected.gradients.keys()
    for name, gradient in expected.gradients.items():
        np.testing.assert_array_equal(found.gradients[name], gradient)
    np.testing.assert_array_equal(found.outputs[0], expected.outputs[0])
    # The gradient of the tied array is the sum of both shares.
    module(torch.from_numpy(ids())).backward(torch.from_numpy(pull(expected.outputs)[0]))
    shares = found.gradients["embedding.weight"] + found.gradients["head.weight"]
    np.testing.assert_allclose(shares, module.embedding.weight.grad.numpy(), rtol=0, atol=1e-13)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", NAMES)
def test_a_large_model_is_compared_as_a_small_one(name, monkeypatch):
    found = subject(name)
    candidate = found.fresh()
    mutated = mutants.scaled_gradient(found, candidate, generator(name, "large"))
    expected = compare(found.torch_module, candidate, found.inputs, dtype="float32")
    # Every model counts as large, so that all measures to save memory are taken.
    monkeypatch.setattr(comparison, "LARGE", 0)
    report = compare(found.torch_module, candidate, found.inputs, dtype="float32")
    assert_named(report, mutated)
    assert [node.path for node in report] == [node.path for node in expected]
    for one, other in zip(report, expected, strict=True):
        assert (one.verdict, one.stage, one.message) == (other.verdict, other.stage, other.message)
        assert one.differences.keys() == other.differences.keys()
        for place, difference in one.differences.items():
            assert difference.scale == pytest.approx(other.differences[place].scale, rel=1e-12)
            assert difference.is_bug == other.differences[place].is_bug
