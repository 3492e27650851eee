"""Modules that no dialect knows, with names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from torch import nn

from jaxformer.errors import UsageError
from jaxformer.layers import Linear
from jaxformer.parity.comparison.api import assert_parity, compare
from jaxformer.parity.report.report import Report
from tests.support.subjects import hidden, ids, randomize, root_causes

pytestmark = pytest.mark.usefixtures("float64")

D, F = 24, 40


class ReferenceMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.first = nn.Linear(D, F)
        self.second = nn.Linear(F, D)

    def forward(self, x):
        return x + self.second(torch.relu(self.first(self.norm(x))))


class CandidateMlp(nnx.Module):
    def __init__(self, reference: ReferenceMlp):
        rngs = nnx.Rngs(0)
        self.ln = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=rngs)
        self.up = nnx.Linear(D, F, rngs=rngs)
        self.down = nnx.Linear(F, D, rngs=rngs)
        self.ln.scale.set_value(jnp.asarray(reference.norm.weight.detach().numpy()))
        self.ln.bias.set_value(jnp.asarray(reference.norm.bias.detach().numpy()))
        for candidate, other in ((self.up, reference.first), (self.down, reference.second)):
            candidate.kernel.set_value(jnp.asarray(other.weight.detach().numpy().T))
            candidate.bias.set_value(jnp.asarray(other.bias.detach().numpy()))

    def __call__(self, x):
        return x + self.down(jax.nn.relu(self.up(self.ln(x))))


NAMES = {"ln": "norm", "up": "first", "down": "second"}


@pytest.fixture
def mlp():
    reference = randomize(ReferenceMlp())
    return reference, CandidateMlp(reference)


def test_names_label_the_report(mlp):
    report = compare(*mlp, [hidden()], names=NAMES)
    assert report.verdict == "rounding"
    assert [node.path for node in report] == ["", "ln", "up", "down"]
    assert [node.reference_path for node in report] == ["", "norm", "first", "second"]
    assert [node.kind for node in report][1:] == ["LayerNorm", "Linear", "Linear"]
    assert report.coverage.modules == (4, 4)
    assert report.coverage.gradients == (7, 7)


def test_names_change_nothing_of_what_is_found(mlp):
    reference, candidate = mlp
    candidate.ln.epsilon = 1e-6
    plain, named = (
        compare(reference, candidate, [hidden()], **given) for given in ({}, {"names": NAMES})
    )
    assert named.coverage == plain.coverage
    for report in (plain, named):
        (cause,) = report.root_causes
        assert (cause.path, cause.reference_path) == ("ln", "norm")
    assert named.root_causes == plain.root_causes
    assert str(named).splitlines()[-1].startswith("bug: ln (reference: norm)")
    assert Report.from_dict(named.to_dict()).root_causes == named.root_causes


def test_a_wrong_weight_is_named(mlp):
    reference, candidate = mlp
    candidate.up.kernel.set_value(candidate.up.kernel[...].at[3, 5].add(1e-3))
    report = compare(reference, candidate, [hidden()], names=NAMES)
    assert report.verdict == "bug"
    assert report.weights == ("up.kernel is not first.weight: equal but for entries 3 of axis 0",)


def test_modules_made_of_jaxformers_parts_need_no_names(mlp):
    reference, candidate = mlp
    own = Linear(D, F, rngs=nnx.Rngs(0))
    own.kernel.set_value(candidate.up.kernel[...])
    own.bias.set_value(candidate.up.bias[...])
    candidate.up = own
    for names in ({}, {"names": {"up": "first"}}):
        assert assert_parity(reference, candidate, hidden(), **names).is_by_operators


def test_swapped_names_are_named(mlp):
    swapped = {"ln": "norm", "up": "second", "down": "first"}
    report = compare(*mlp, [hidden()], names=swapped)
    assert report.verdict == "bug"
    assert report.weights == (
        "names pairs up with second, but it holds the numbers of first",
        "names pairs down with first, but it holds the numbers of second",
    )
    with pytest.raises(AssertionError, match="names pairs up with second"):
        assert_parity(*mlp, [hidden()], names=swapped)


def test_a_parameter_with_two_names_belongs_to_both_modules():
    reference = nn.ModuleDict({"table": nn.Embedding(11, D), "head": nn.Linear(D, 11, bias=False)})
    reference["head"].weight = reference["table"].weight
    reference.forward = lambda ids: reference["head"](torch.tanh(reference["table"](ids)))

    class Tied(nnx.Module):
        def __init__(self):
            matrix = jnp.asarray(reference["table"].weight.detach().numpy())
            self.embed = nnx.Embed(11, D, rngs=nnx.Rngs(0))
            self.embed.embedding.set_value(matrix)
            self.logits = nnx.Linear(D, 11, use_bias=False, rngs=nnx.Rngs(0))
            self.logits.kernel.set_value(matrix.T)

        def __call__(self, ids):
            return self.logits(jnp.tanh(self.embed(ids)))

    names = {"embed": "table", "logits": "head"}
    assert_parity(reference, Tied(), [ids() % 11], names=names)


def test_own_arithmetic_is_distinguished_from_that_of_submodules(mlp):
    reference, candidate = mlp
    candidate.ln.epsilon = 1e-6

    class Leaky(CandidateMlp):
        def __call__(self, x):
            return x + self.down(jax.nn.leaky_relu(self.up(self.ln(x))))

    candidate.__class__ = Leaky
    report = compare(reference, candidate, [hidden()], names=NAMES)
    assert root_causes(report) == [("", "forward"), ("ln", "forward")]
    assert report.root_causes[0].message == "the number 0.01 in mul must be 0"


def test_a_module_that_is_not_named_has_the_path_of_the_reference(mlp):
    reference, candidate = mlp
    candidate.ln.epsilon = 1e-6
    report = compare(reference, candidate, [hidden()], names={"up": "first", "down": "second"})
    assert root_causes(report) == [("norm", "forward")]


def test_unknown_names_are_listed(mlp):
    with pytest.raises(
        ValueError,
        match=r"the candidate has no lnn \(did you mean ln\?\); the reference has no third",
    ):
        compare(*mlp, [hidden()], names={"lnn": "norm", "up": "third"})
    with pytest.raises(UsageError, match="a map of names does not make one"):
        compare(mlp[0], None, [hidden()], names=NAMES)
    with pytest.raises(UsageError, match="dialect: serves jaxformer's own models"):
        compare(*mlp, [hidden()], names=NAMES, dialect="gpt2")


def test_neither_module_is_changed(mlp):
    reference, candidate = mlp
    reference.train()
    candidate.train()
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    x = torch.from_numpy(hidden())
    compare(reference, candidate, [x], names=NAMES)
    assert reference.training
    assert not x.requires_grad
    assert x.dtype == torch.float32
    for name, parameter in reference.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None
        assert torch.equal(parameter, before[name])
    assert not reference._forward_hooks
    assert not reference._forward_pre_hooks
    assert candidate.up.kernel[...].dtype == jnp.float32
    assert torch.float32 is torch.zeros(1).dtype
    assert torch.get_default_dtype() == torch.float32


class ReferenceTwice(nn.Module):
    """A submodule that is called twice, a keyword argument, and a dict as result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.unused = nn.Linear(D, D)
        self.gate = nn.Linear(D, D)

    def forward(self, x, *, scale):
        once = self.linear(x)
        again = self.linear(torch.tanh(once))
        return {"sum": once + scale * again, "gate": torch.sigmoid(self.gate(input=again))}


class CandidateTwice(nnx.Module):
    def __init__(self, reference):
        for name in ("linear", "unused", "gate"):
            linear = nnx.Linear(D, D, rngs=nnx.Rngs(0))
            other = getattr(reference, name)
            linear.kernel.set_value(jnp.asarray(other.weight.detach().numpy().T))
            linear.bias.set_value(jnp.asarray(other.bias.detach().numpy()))
            setattr(self, name, linear)

    def __call__(self, x, *, scale):
        once = self.linear(x)
        again = self.linear(jnp.tanh(once))
        return {"sum": once + scale * again, "gate": jax.nn.sigmoid(self.gate(again))}


TWICE = {name: name for name in ("linear", "unused", "gate")}


def run_twice(reference, candidate):
    def call(module, given):
        return module(given[0], scale=given[1])

    given = [hidden(), np.float32([[[0.5]]])]
    return compare(reference, candidate, given, names=TWICE, torch_call=call, jax_call=call)


@pytest.fixture
def twice():
    reference = randomize(ReferenceTwice())
    return reference, CandidateTwice(reference)


def test_modules_called_twice_dicts_keywords_and_unused_modules(twice):
    report = run_twice(*twice)
    assert report.verdict == "rounding"
    assert [node.path for node in report] == ["", "linear", "gate"]
    # The parameters that are read, and the input of several numbers.
    assert report.coverage.gradients == (5, 5)


def test_the_second_call_and_the_second_output_are_judged_too(twice):
    reference, candidate = twice

    class SecondCall(CandidateTwice):
        def __call__(self, x, *, scale):
            once = self.linear(x)
            again = self.linear(jnp.sin(once))
            return {"sum": once + scale * again, "gate": jax.nn.sigmoid(self.gate(again))}

    candidate.__class__ = SecondCall
    report = run_twice(reference, candidate)
    assert root_causes(report) == [("", "forward")]
    assert report.root_causes[0].jax_operators == ("sin",)
    assert "tanh" in report.root_causes[0].torch_operators

    class SecondOutput(CandidateTwice):
        def __call__(self, x, *, scale):
            result = super().__call__(x, scale=scale)
            return result | {"gate": result["gate"] * 1.001}

    candidate.__class__ = SecondOutput
    report = run_twice(reference, candidate)
    assert root_causes(report) == [("", "forward")]
    assert report.root_causes[0].message.startswith("the number 1.001 in mul must be 1")


def test_a_module_that_the_candidate_never_calls_is_a_bug_of_the_module_around_it(twice):
    reference, candidate = twice

    class Ungated(CandidateTwice):
        def __call__(self, x, *, scale):
            result = super().__call__(x, scale=scale)
            return result | {"gate": jnp.ones_like(result["gate"])}

    class Forgetful(Ungated):
        def __call__(self, x, *, scale):
            once = self.linear(x)
            again = self.linear(jnp.tanh(once))
            return {"sum": once + scale * again, "gate": jax.nn.sigmoid(again)}

    candidate.__class__ = Forgetful
    report = run_twice(reference, candidate)
    assert root_causes(report) == [("", "forward")]
    (gate,) = [node for node in report if node.path == "gate"]
    assert gate.verdict == "incomplete"
    assert report.root_causes[0].message == (
        "logistic reads the add of linear; it must read the add of gate"
    )
    assert any("gate.kernel of the candidate has no effect" in text for text in report.incomplete)

    class Eager(CandidateTwice):
        def __call__(self, x, *, scale):
            return super().__call__(self.linear(x), scale=scale)

    candidate.__class__ = Eager
    report = run_twice(reference, candidate)
    assert {path for path, _ in root_causes(report)} == {""}
    assert report.root_causes[0].message == (
        "the candidate reads linear.weight 3 times; the reference 2"
    )


def test_an_output_of_another_shape_is_a_bug(mlp):
    class Pooled(CandidateMlp):
        def __call__(self, x):
            return super().__call__(x)[:, 0]

    reference, candidate = mlp
    candidate.__class__ = Pooled
    report = compare(reference, candidate, [hidden()], names=NAMES)
    assert report.verdict == "bug"
    (cause,) = report.root_causes
    assert cause.diagnosis == "the result has the shape (2, 24), not (2, 11, 24)"


class ReferenceLookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, D, padding_idx=2)
        self.norm = nn.LayerNorm(D)

    def forward(self, ids):
        return self.norm(self.table(ids))


class CandidateLookup(nnx.Module):
    def __init__(self, reference):
        self.table = nnx.Embed(11, D, rngs=nnx.Rngs(0))
        self.table.embedding.set_value(jnp.asarray(reference.table.weight.detach().numpy()))
        self.norm = nnx.LayerNorm(D, epsilon=1e-5, use_fast_variance=False, rngs=nnx.Rngs(0))
        self.norm.scale.set_value(jnp.asarray(reference.norm.weight.detach().numpy()))
        self.norm.bias.set_value(jnp.asarray(reference.norm.bias.detach().numpy()))

    def __call__(self, ids):
        return self.norm(self.table(ids))


def test_integers_that_enter_a_submodule_are_compared():
    reference = randomize(ReferenceLookup())
    candidate = CandidateLookup(reference)
    tokens = ids() % 11
    names = {"table": "table", "norm": "norm"}
    assert compare(reference, candidate, [tokens], names=names).verdict == "rounding"

    class Shifted(CandidateLookup):
        def __call__(self, ids):
            return self.norm(self.table(jnp.roll(ids, 1, axis=1)))

    candidate.__class__ = Shifted
    report = compare(reference, candidate, [tokens], names=names)
    assert root_causes(report) == [("table", "forward")]
    assert report.root_causes[0].message.startswith("the candidate looks up rows")


def test_a_wrong_row_that_no_input_reads_is_found():
    reference = randomize(ReferenceLookup())
    candidate = CandidateLookup(reference)
    tokens = ids() % 5
    rows = candidate.table.embedding[...]
    candidate.table.embedding.set_value(rows.at[7].set(-rows[7]))
    names = {"table": "table", "norm": "norm"}
    report = compare(reference, candidate, [tokens], names=names)
    assert report.verdict == "bug"
    assert root_causes(report) == []
    assert report.weights == (
        "table.embedding is not table.weight: equal but for entries 7 of axis 0",
    )
    with pytest.raises(AssertionError, match="equal but for entries 7 of axis 0"):
        assert_parity(reference, candidate, [tokens], names=names)
