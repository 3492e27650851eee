"""Memory that is freed during a comparison changes nothing in the report."""

import jax
import numpy as np
import pytest
import torch

from jaxformer.parity.comparison import modules as comparison
from jaxformer.parity.comparison.modules import compare
from jaxformer.parity.recording.calls import torch_trace
from jaxformer.parity.recording.calls.torch_isolated import Directions, pull_back
from jaxformer.parity.recording.wide_parameters import wide_parameters, with_shared_parameters
from jaxformer.parity.segments.calls import products
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


@pytest.mark.parametrize("in_place", [False, True])
def test_each_use_of_a_tied_weight_has_its_own_gradient(in_place):
    torch.manual_seed(0)
    module = Tied(in_place)
    wide = with_shared_parameters(module)
    with wide_parameters(wide):
        trace = torch_trace.run(wide, [ids()])
    cotangent = np.random.default_rng(5).standard_normal(trace.outputs[0].shape)
    calls = trace.calls

    def pull(path, inner=(), given=cotangent):
        forced = {name: [calls[name]] for name in inner}
        return pull_back(
            wide, path, calls[path], forced, Directions(lambda place, array: given)
        ).parameters

    exact = torch_trace.in_float64(module)
    exact(torch.from_numpy(ids())).backward(torch.from_numpy(cotangent))
    (whole,) = (pull("")[id(p)] for p in [module.embedding.weight])
    np.testing.assert_allclose(whole, exact.embedding.weight.grad.numpy(), rtol=0, atol=1e-13)
    head = pull("head")[id(module.head.weight)]
    back = calls["head"].input_gradients[0] * (calls["head"].inputs[0] > 0)
    inner = pull("inner", given=back)
    np.testing.assert_allclose(
        inner[id(module.inner.weight)], exact.inner.weight.grad.numpy(), rtol=0, atol=1e-13
    )
    lookup = pull("embedding", given=calls["inner"].input_gradients[0])
    shares = head + lookup[id(module.embedding.weight)]
    np.testing.assert_allclose(shares, whole, rtol=0, atol=1e-13)
    assert module.inner.weight.dtype == torch.float32
    # What entered the head is not what it was before the operation in place.
    assert (calls["inner"].outputs[0] < 0).any()
    assert not (calls["head"].inputs[0] < 0).any()


@pytest.mark.tier("full")
def test_nothing_that_was_recorded_outlives_a_comparison(monkeypatch):
    found = subject("gpt2")
    recorded = []
    original = comparison.TeacherForcedRunner

    def runner(module, calls, trace, *args):
        recorded.append((calls, trace))
        return original(module, calls, trace, *args)

    monkeypatch.setattr(comparison, "TeacherForcedRunner", runner)
    compare(found.torch_module, found.fresh(), found.inputs)
    ((calls, trace),) = recorded
    made = [call for first in calls.values() for call in first.all]
    # Dropout is in no pair.
    assert any(path.endswith("dropout") for path in calls)
    assert not [leaf for call in made for leaf in jax.tree.leaves((call.args, call.output))]
    assert not [call for first in trace.calls.values() for call in first.all if call.outputs]
    assert not trace.outputs


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.tier("full")
def test_a_large_head_is_compared_in_slices(name, monkeypatch):
    found = subject(name)
    expected = compare(found.torch_module, found.fresh(), found.inputs)
    monkeypatch.setattr(products, "LARGE", 0)
    monkeypatch.setattr(products, "SLICE", 7 * F)
    sliced = []
    original = comparison.compare_held_product

    def compare_product(pair, *args):
        sliced.append(pair.path)
        return original(pair, *args)

    monkeypatch.setattr(comparison, "compare_held_product", compare_product)
    report = compare(found.torch_module, found.fresh(), found.inputs)
    # A linear layer inside a block is as good as a head.
    (head,) = [path for path in sliced if not path.startswith("blocks.")]
    assert head == ("token_embedding.attend" if name == "gpt2" else "lm_head")
    for path in sliced:
        (one,), (other,) = ([n for n in nodes if n.path == path] for nodes in (report, expected))
        assert (one.verdict, one.stage) == (other.verdict, other.stage)
        assert one.differences.keys() == other.differences.keys()
        for place, difference in one.differences.items():
            assert difference.scale == pytest.approx(other.differences[place].scale, rel=1e-12)


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", NAMES)
def test_a_large_model_is_compared_as_a_small_one(name, monkeypatch):
    found = subject(name)
    candidate = found.fresh()
    mutated = mutants.scaled_gradient(found, candidate, generator(name, "large"))
    expected = compare(found.torch_module, candidate, found.inputs, dtype="float32")
    # Every model counts as large, so that all measures to save memory are taken.
    monkeypatch.setattr(comparison, "LARGE", 0)
    monkeypatch.setattr(products, "LARGE", 0)
    report = compare(found.torch_module, candidate, found.inputs, dtype="float32")
    assert_named(report, mutated)
    assert [node.path for node in report] == [node.path for node in expected]
    for one, other in zip(report, expected, strict=True):
        assert (one.verdict, one.stage, one.message) == (other.verdict, other.stage, other.message)
        assert one.differences.keys() == other.differences.keys()
        for place, difference in one.differences.items():
            assert difference.scale == pytest.approx(other.differences[place].scale, rel=1e-12)
            assert difference.is_bug == other.differences[place].is_bug
