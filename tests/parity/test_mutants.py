"""Mutation tests: the parity debugger names every injected bug, where it is, and nothing else."""

import copy
import zlib

import numpy as np
import pytest

from jaxformer.parity.comparison.api import assert_parity
from jaxformer.parity.comparison.modules import compare_with
from jaxformer.parity.comparison.reference_run import ReferenceRun
from tests.support import mutants
from tests.support.mutants import MUTANTS, REFERENCE_MUTANTS
from tests.support.subjects import SUBJECTS, Mutated, subject
from tests.support.tiers import SLOW, first_of_each, full_after, full_except

pytestmark = pytest.mark.usefixtures("float64")

ROTARY = ["unified rotary gated", "llama", "mistral", "gemma2", "gpt_neox", "torch_ref"]
BLOCKS = ["prepost", "minimal", "charlm"]
MODELS = [name for name in SUBJECTS if name not in BLOCKS]
# The models to which a mutant applies, where not all do.
PLACES = {
    "zeroed_bias": [n for n in SUBJECTS if n not in ("llama", "mistral", "gemma2")],
    "swapped": MODELS,
    "mask_shift": [n for n in SUBJECTS if n != "bert"],
    "model_mask": [*ROTARY[1:], "gpt2", "torch_ref post-norm", "encdec gpt"],
    "rotary_layout": ROTARY,
    "rotary_base": ROTARY,
    "soft_cap": ["gemma2"],
    "embedding_scale": ["gemma2", "encdec"],
    "positions_shift": ["unified learned", "gpt2", "bert", "torch_ref post-norm", "encdec gpt"],
}
# The second models of a family are left to the slow tier.
SECOND_MODELS = ("unified alibi post-norm", "mistral", "torch_ref post-norm", "encdec gpt")
FIRST_MODELS = [name for name in SUBJECTS if name not in SECOND_MODELS]
# Model by model, so that compiled programs are shared.
CASES = [
    pytest.param(
        name, mutate, id=f"{name}-{mutate.__name__}", marks=[SLOW] * (name in SECOND_MODELS)
    )
    for name in SUBJECTS
    for mutate in (*MUTANTS, *REFERENCE_MUTANTS)
    if name in PLACES.get(mutate.__name__, SUBJECTS)
]
# Several at once, in different places.
TOGETHER = [
    (mutants.eps, mutants.scaled_gradient),
    (mutants.one_element, mutants.no_residual, mutants.activation),
    (mutants.attention_scale, mutants.narrow, mutants.permuted),
]


def generator(name: str, mutate: object) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(f"{name} {mutate}".encode()))


def assert_named(report, *mutated: Mutated) -> None:
    """Asserts that exactly the injected bugs are found, each at its stage."""
    expected = {(path, each.stage) for each in mutated for path in each.where}
    found = {(node.path, node.stage) for node in report.root_causes}
    assert found == expected, [(n.path, n.stage, n.message, n.worst) for n in report.root_causes]
    assert report.verdict == "bug"
    for node in report.root_causes:
        assert node.message
        assert node.worst.excess > 1
    for each in mutated:
        assert any(each.remark in remark for remark in report.remarks) or not each.remark


# The default tier plants each bug in one model, the full tier in three.
@pytest.mark.parametrize(
    ("name", "mutate"),
    first_of_each(
        first_of_each(CASES, lambda name, mutate: mutate.__name__, SLOW, 3),
        lambda name, mutate: mutate.__name__,
    ),
)
def test_a_mutant_is_named(name, mutate):
    random = generator(name, mutate.__name__)
    found = subject(name)
    if mutate in REFERENCE_MUTANTS:
        reference = copy.deepcopy(found.torch_module)
        mutated = mutate(found, reference, random)
        reference = ReferenceRun(
            reference, found.inputs, dialect=found.dialect, config=found.candidate
        )
        report = compare_with(reference, found.candidate, found.jax_inputs, dtype="float64")
    else:
        candidate = found.fresh()
        mutated = mutate(found, candidate, random)
        report = found.compare(candidate)
    assert_named(report, mutated)


# Those of some models show it; the others are left to the slow tier.
@pytest.mark.parametrize(
    "name",
    full_except(
        full_except(FIRST_MODELS, lambda name: name in ("gpt2", "llama", "encdec"), SLOW),
        lambda name: name == "gpt2",
    ),
)
@pytest.mark.parametrize("several", TOGETHER, ids=lambda v: "+".join(p.__name__ for p in v))
def test_mutants_do_not_hide_each_other(name, several):
    found = subject(name)
    for attempt in range(50):
        random = np.random.default_rng((attempt, zlib.crc32(name.encode())))
        candidate = found.fresh()
        mutated = [mutate(found, candidate, random) for mutate in several]
        where = [path for each in mutated for path in each.where]
        if len(where) == len(set(where)):
            break
    assert len(where) == len(set(where))
    assert_named(found.compare(candidate), *mutated)


def test_there_are_enough():
    usual = [case.values[0] for case in CASES if not case.marks]
    assert len(usual) >= 200
    assert len({name.partition(" ")[0] for name in usual}) >= 5
    assert set(PLACES) <= {mutate.__name__ for mutate in MUTANTS}


@pytest.mark.parametrize("name", full_after(3, FIRST_MODELS))
def test_without_a_mutant_nothing_is_found(name):
    found = subject(name)
    report = found.compare(found.fresh())
    assert report.verdict in ("exact", "rounding")
    assert not report.settings
    assert not report.remarks


def test_a_mutant_is_named_in_the_dtype_under_test_too():
    found = subject("gpt2")
    candidate = found.fresh()
    mutated = mutants.no_residual(found, candidate, generator("gpt2", "bfloat16"))
    report = compare_with(found.reference, candidate, found.jax_inputs, dtype="bfloat16")
    assert_named(report, mutated)
    (node,) = report.root_causes
    assert node.in_context.candidate_rounding > 10 * node.in_context.reference_rounding


def test_assert_parity_names_all_root_causes():
    found = subject("llama")
    candidate = found.fresh()
    mutants.eps(found, candidate, np.random.default_rng(0))
    candidate.blocks[1].attention.scale *= 2
    with pytest.raises(AssertionError, match=r"blocks\.1\.attention: .*norm: "):
        assert_parity(found.torch_module, candidate, found.inputs, dtype="float64")
    assert (
        assert_parity(found.torch_module, None, found.inputs, dtype="float64").verdict == "rounding"
    )
