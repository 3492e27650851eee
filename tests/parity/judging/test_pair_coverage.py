"""What was compared is counted on every way, and what was never reached is said."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxformer.parity import assert_parity, compare
from jaxformer.parity.comparison.modules import compare as compare_modules
from jaxformer.parity.report.report import Report
from jaxformer.parity.report.text import coverage_lines
from jaxformer.porting import from_torch
from tests.support import mutants
from tests.support.subjects import subject

pytestmark = pytest.mark.usefixtures("settings_of_jax")

D = 6
X = np.random.default_rng(0).normal(size=(3, 5, D)).astype(np.float32)


class ReferenceGate(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.gate, self.act = nn.Linear(D, D), nn.Linear(D, D), nn.ReLU()

    def forward(self, x):
        return self.act(self.linear(x)), torch.sigmoid(self.gate(x))


class UngatedReference(ReferenceGate):
    def forward(self, x):
        return self.act(self.linear(x))


class CandidateGate(nnx.Module):
    def __init__(self, reference):
        for name in ("linear", "gate"):
            own, other = nnx.Linear(D, D, rngs=nnx.Rngs(0)), getattr(reference, name)
            own.kernel.set_value(jnp.asarray(other.weight.detach().numpy().T))
            own.bias.set_value(jnp.asarray(other.bias.detach().numpy()))
            setattr(self, name, own)

    def __call__(self, x):
        return jax.nn.relu(self.linear(x)), jax.nn.sigmoid(self.gate(x))


class Ungated(CandidateGate):
    """Returns what the gate has no part in."""

    def __call__(self, x):
        return jax.nn.relu(self.linear(x))


NAMES = {"linear": "linear", "gate": "gate"}


def gate(candidate=CandidateGate):
    torch.manual_seed(0)
    reference = ReferenceGate()
    return reference, candidate(reference)


@pytest.mark.tier("full")
def test_modules_known_by_name_are_counted():
    with jax.enable_x64(True):
        found = subject("gpt2")
        report = compare_modules(found.torch_module, found.fresh(), found.inputs)
    coverage = report.coverage
    own, all_own = coverage.candidate_modules
    wanted, called = coverage.modules
    assert own < all_own
    assert wanted < called
    assert wanted == len({node.reference_path for node in report})
    names = {name for name, _ in nnx.to_flat_state(nnx.state(found.fresh(), nnx.Param))}
    assert coverage.parameters == coverage.gradients == (len(names), len(names))
    count = len([*found.torch_module.parameters()])
    assert coverage.reference_parameters == (count, count)
    # Products are there once more in the backward pass; GPT-2 has one for queries, keys and values.
    layers = len(found.torch_module.transformer.h)
    # Two lookups, and the head twice.
    rest = 4
    assert coverage.operators == (8 * layers + rest,) * 2
    assert coverage.candidate_operators == (12 * layers + rest,) * 2
    assert coverage.values is None
    assert not report.is_by_operators
    first, second, third = coverage_lines(report)
    shown = str(report)
    assert "against" in shown.splitlines()[0]
    assert " ".join((first, second, third)) in " ".join(shown.split())
    counts = f"{wanted} of {called} modules by themselves, {8 * layers + rest} of "
    assert first.startswith(f"compared of the reference: {counts}")
    counts = f"{own} of {all_own} modules by themselves, {12 * layers + rest} of "
    assert second.startswith(f"compared of the candidate: {counts}")
    assert third == "the other modules were compared as parts of those around them"
    assert Report.from_dict(report.to_dict()).coverage == coverage


def test_modules_without_a_name_are_counted_too():
    coverage = compare(*gate(), [X], names={"linear": "linear"}).coverage
    assert coverage.modules == (4, 4)
    assert coverage.parameters == coverage.reference_parameters == (4, 4)


def test_operators_of_both_sides_are_counted():
    report = compare(*gate(), X, backward=False)
    coverage = report.coverage
    assert coverage.modules == (4, 4)
    assert coverage.operators == coverage.candidate_operators == (2, 2)
    assert coverage.parameters == coverage.reference_parameters == (4, 4)
    first, second = coverage_lines(report)
    assert "2 of 2 operators with parameters, 4 of 4 parameters" in first
    assert "values" in second


@pytest.mark.parametrize("names", [None, NAMES])
def test_a_part_that_was_never_reached_makes_the_report_incomplete(names):
    reference, candidate = gate(Ungated)
    options = {} if names is None else {"names": names}
    report = compare(reference, candidate, [X], **options)
    assert report.verdict == "incomplete"
    assert any("gate" in sentence for sentence in report.incomplete)
    with pytest.raises(AssertionError, match="gate"):
        assert_parity(reference, candidate, [X], **options)


def test_what_neither_side_reaches_is_no_part_of_the_comparison():
    reference = UngatedReference()
    candidate = Ungated(reference)
    report = compare(reference, candidate, [X], names=NAMES)
    assert report.verdict == "rounding"
    assert not report.incomplete


@pytest.mark.tier("full")
def test_a_pooler_that_the_reference_calls_is_called_here_too():
    """jaxformer's models pool by a method of their own, which a plain call leaves out."""
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=12,
    )  # fmt: skip
    torch.manual_seed(0)
    reference = transformers.BertModel(config).eval()
    ids = np.random.default_rng(0).integers(0, 20, (2, 7))
    report = compare(reference, from_torch(reference), ids)
    assert report.verdict in ("equal", "rounding"), report
    assert not [node.path for node in report.nodes if node.verdict == "incomplete"]

    def pooled(original, self, hidden):
        return jax.nn.relu(self.pooler(hidden[:, 0]))

    candidate = from_torch(reference)
    mutants.replace_methods(candidate, pooled=pooled)
    # What is made beside the model's own result is compared too.
    for backward in (False, True):
        (cause,) = compare(reference, candidate, ids, backward=backward).root_causes
        assert (cause.path, cause.stage) == ("", "forward")
        assert cause.message.startswith("its result")
