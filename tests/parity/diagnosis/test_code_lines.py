"""A bug of paired modules has its lines of code on both sides, and what would make it right."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxformer.parity.comparison.api import compare
from jaxformer.parity.report.report import Report
from tests.parity.test_user_modules import NAMES, CandidateMlp, ReferenceMlp
from tests.support import mutants
from tests.support.hugging_face.proof import Proof
from tests.support.hugging_face.running import tokens
from tests.support.subjects import hidden, randomize, subject

FULL = pytest.mark.tier("full")
pytestmark = pytest.mark.usefixtures("float64")


def line_of(source):
    """The code at a "path:line"."""
    path, _, line = source.rpartition(":")
    with open(path) as file:
        return file.read().splitlines()[int(line) - 1].strip()


def found_in(name, mutate):
    found = subject(name)
    candidate = found.fresh()
    mutated = mutate(found, candidate, np.random.default_rng(0))
    report = found.compare(candidate)
    (cause,) = report.root_causes
    assert (cause.path, cause.stage) == (*mutated.where, mutated.stage)
    return cause, report


@pytest.mark.tier("full")
def test_an_activation_of_our_own_model():
    def erf(found, candidate, random):
        candidate.blocks[1].feed_forward.activation = "gelu"
        return found.mutated("blocks.1.feed_forward", "forward", "erf")

    cause, report = found_in("gpt2", erf)
    assert cause.diagnosis == (
        "the candidate computes the erf GELU; the reference computes the tanh form of GELU"
    )
    assert cause.jax_source.rpartition(":")[0].endswith("jaxformer/feed_forward.py")
    assert "jax.lax.erf" in line_of(cause.jax_source)
    assert "torch" in line_of(cause.torch_source)
    assert cause.error == cause.worst.relative > 1e-6
    text = " ".join(str(report).split())
    assert f"1. {cause.diagnosis} (in {cause.path})" in text
    assert f"feed_forward.py:{cause.jax_source.rpartition(':')[2]} mul → erf" in text
    assert cause.diagnosis in report._repr_html_()


@pytest.mark.tier("full")
def test_a_gradient_that_stops_in_our_own_model():
    cause, report = found_in("llama", mutants.stopped_gradient)
    assert cause.diagnosis.startswith("no gradient arrives here in the candidate")
    assert "stop_gradient" in line_of(cause.jax_source)
    back = Report.from_dict(report.to_dict())
    assert back.root_causes[0].jax_source == cause.jax_source


@pytest.mark.tier("full")
def test_the_same_bug_in_every_layer_has_the_same_diagnosis():
    found = subject("llama")
    candidate = found.fresh()
    for block in candidate.blocks:
        block.attention.scale *= 2
    report = found.compare(candidate)
    assert len(report.root_causes) == len(candidate.blocks)
    (diagnosis,) = {cause.diagnosis for cause in report.root_causes}
    assert "must be" in diagnosis


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("mistral", ", by one: at the edge of a window of"),
        pytest.param("gpt2", ": it is not causal", marks=FULL),
    ],
)
@pytest.mark.tier("full")
def test_a_mask_that_the_model_makes(name, pattern):
    """The candidate's is of numpy, or none: its line is the one where it goes to the blocks."""

    def change(found, candidate, random):
        window = candidate.config.attention.sliding_window
        wrong = {"causal": False} if window is None else {"sliding_window": window + 1}
        candidate.config = dataclasses.replace(candidate.config, **wrong)
        return found.mutated("", "forward", "mask")

    cause, _ = found_in(name, change)
    assert cause.jax_source.rpartition(":")[0].endswith("jaxformer/blocks.py")
    assert "call(" in line_of(cause.jax_source)
    assert "masking_utils.py" in cause.torch_source
    assert cause.diagnosis.startswith(f"the mask differs{pattern}")


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt_neox", marks=FULL)])
def test_a_norm_that_is_not_called(name):
    """Of a parallel block the other norm reads what this one must have read."""
    cause, _ = found_in(name, mutants.no_norm)
    assert cause.jax_source.rpartition(":")[0].endswith("jaxformer/blocks.py")
    assert "self.attention(" in line_of(cause.jax_source)
    assert "modeling_gpt" in cause.torch_source
    assert cause.diagnosis.startswith("the candidate computes no norm; the reference computes ")


CHANGED = {
    "forward": "the number 1.25 in mul must be 1: the reference has no such step",
    "backward": "no gradient arrives here in the candidate; in the reference one does",
}


@pytest.mark.parametrize("name", ["gpt2", pytest.param("gpt_neox", marks=FULL)])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_one_of_several_modules_that_do_the_work_of_one(name, stage):
    """The reference fuses its projections, one after the other or head by head."""

    def call(original, self, x):
        return 1.25 * original(x) if stage == "forward" else jax.lax.stop_gradient(original(x))

    def change(found, candidate, random):
        mutants.replace_methods(candidate.blocks[1].attention.k_proj, __call__=call)
        return found.mutated("blocks.1.attention.k_proj", stage, "changed")

    cause, _ = found_in(name, change)
    assert cause.path.count(" + ") == 2
    assert "original(x)" in line_of(cause.jax_source)
    assert cause.diagnosis == CHANGED[stage]


@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_one_module_that_does_the_work_of_several(stage):
    """The reference has a projection for each head."""

    def call(original, self, x):
        return 1.25 * original(x) if stage == "forward" else jax.lax.stop_gradient(original(x))

    def change(found, candidate, random):
        mutants.replace_methods(candidate.attention.k_proj, __call__=call)
        return found.mutated("attention.k_proj", stage, "changed")

    cause, report = found_in("charlm", change)
    assert "original(x)" in line_of(cause.jax_source)
    assert "linear.py" in cause.torch_source or "charlm.py" in cause.torch_source
    assert cause.diagnosis == CHANGED[stage]
    assert not any("no lines of code" in remark for remark in report.remarks)


@FULL
def test_a_gradient_behind_a_router_has_a_line_that_stops_gradients():
    """Mixtral's router gives scores, and weights that it makes of them, and stops some itself."""
    proof = Proof("mixtral")
    mutants.replace_methods(
        proof.target.blocks[0].feed_forward,
        __call__=lambda original, self, x: jax.tree.map(jax.lax.stop_gradient, original(x)),
    )
    report = compare(proof.source, proof.target, [tokens(0, (2, 11))], dtype="float64")
    (cause,) = report.root_causes
    assert (cause.path, cause.stage) == ("blocks.0.feed_forward", "backward")
    assert "stop_gradient" in line_of(cause.jax_source)


def test_a_reference_that_fills_a_cache_is_run_again_as_it_was(monkeypatch):
    found = subject("gpt2")
    monkeypatch.setattr(found.torch_module.config, "use_cache", True)
    candidate = found.fresh()
    candidate.blocks[1].attention.scale *= 2
    (cause,) = compare(found.torch_module, candidate, found.inputs, dtype="float64").root_causes
    assert cause.path == "blocks.1.attention"
    assert cause.diagnosis
    assert "attention_core.py" in cause.jax_source


class LeakyMlp(CandidateMlp):
    def __call__(self, x):
        return x + self.down(jax.nn.leaky_relu(self.up(self.ln(x))))


def test_modules_by_name_have_the_lines_of_the_users_code():
    reference = randomize(ReferenceMlp())
    candidate = CandidateMlp(reference)
    candidate.__class__ = LeakyMlp
    candidate.ln.epsilon = 1e-6
    first, second = compare(reference, candidate, [hidden()], names=NAMES).root_causes
    assert "leaky_relu" in line_of(first.jax_source)
    assert "torch.relu" in line_of(first.torch_source)
    assert "1e-06" in second.diagnosis
    assert "must be 1e-05" in second.diagnosis


def test_a_wrong_weight_of_modules_by_name_is_named():
    reference = randomize(ReferenceMlp())
    candidate = CandidateMlp(reference)
    candidate.up.kernel.set_value(jnp.asarray(candidate.up.kernel[...]).at[3, 5].add(1e-3))
    report = compare(reference, candidate, [hidden()], names=NAMES)
    assert report.weights == ("up.kernel is not first.weight: equal but for entries 3 of axis 0",)
