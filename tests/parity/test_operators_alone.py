"""What pairs of modules find in our own models, the operators of the whole models find alone.

Pairs are the first cut of the same comparison. They add what needs modules: tables of the reference
given to the candidate, and each module judged by itself.
"""

import copy
import re

import pytest

from jaxformer.parity.comparison.operators import compare_operators
from tests.parity.test_mutants import CASES, generator
from tests.support import mutants
from tests.support.mutants import REFERENCE_MUTANTS
from tests.support.subjects import subject
from tests.support.tiers import SLOW, full_except

pytestmark = pytest.mark.usefixtures("float64")

FULL = ("gpt2-eps", "gpt2-no_residual", "prepost-mask_shift", "llama-scaled_gradient")
USUAL = [case for case in CASES if not case.marks]


# A factor of 1.000001 that float32 tables, which pairs are given by the reference, hide.
HIDDEN = ("gemma2", mutants.reference_output)


def layers(texts):
    """The numbers of the layers that paths are in."""
    return {int(number) for text in texts for number in re.findall(r"\.(\d+)\b", text)}


@pytest.mark.parametrize(
    ("name", "mutate"),
    full_except(
        full_except(USUAL, lambda name, mutate: f"{name}-{mutate.__name__}" in FULL, SLOW),
        lambda *_: False,
    ),
)
def test_a_mutant_is_found(name, mutate):
    found, random = subject(name), generator(name, mutate.__name__)
    reference, candidate = found.torch_module, found.candidate
    if mutate in REFERENCE_MUTANTS:
        reference = copy.deepcopy(reference)
        mutated = mutate(found, reference, random)
    else:
        candidate = found.fresh()
        mutated = mutate(found, candidate, random)
    report = compare_operators(reference, candidate, found.inputs, found.jax_inputs)
    if mutate is mutants.narrow:
        # All is computed in float64. A line that rounds to less than float32 is named.
        assert report.verdict == "rounding"
        assert bool(report.casts) == ("bfloat16" in mutated.what)
        return
    if (name, mutate) == HIDDEN:
        assert report.verdict == "rounding"
        assert report.tables
        return
    # The bias of keys moves no result, so nothing but its numbers is wrong.
    assert report.verdict == "bug" or (mutate is mutants.zeroed_bias and report.incomplete)
    assert mutated.stage != "backward" or any(cause.is_backward for cause in report.root_causes)
    places = [cause.torch_module for cause in report.root_causes]
    seen = layers([*places, *report.weights, *report.incomplete])
    # What a block returns wrongly is what the next one reads.
    expected = layers(mutated.where)
    assert not expected or seen & (expected | {number + 1 for number in expected})
