"""Every mutant of ``mutants.py`` is detected by its case."""

import pytest

from parity_tests.cases import CASES
from parity_tests.harness import DTYPES, Pair, output_draws, rounding_draws
from parity_tests.mutants import MUTANTS, Mutant
from parity_tests.test_cases import MADE_OF_MODELS, ROUNDING
from parity_tests.verdict import judge_float64, judge_rounding
from tests.support.tiers import SLOW, first_of_each, full_except


def quickest(mutants):
    """Returns parameters of which the default tier runs the first of each part or plain model."""

    def component(mutant):
        return mutant.case.partition("/")[0]

    first = first_of_each(mutants, component)
    return full_except(first, lambda mutant: component(mutant) not in MADE_OF_MODELS)


def run_proof(mutant: Mutant) -> None:
    """Runs the proof that must fail.

    Its output is judged first: that program compiles in a third of the time, and most bugs show.
    """
    case = next(case for case in CASES if case.name == mutant.case)
    pair = Pair(case, training=mutant.proof == "dropout")
    if mutant.proof in DTYPES:
        dtype = DTYPES[mutant.proof]
        judge_rounding(output_draws(pair, 1.0, dtype), dtype)
        judge_rounding(rounding_draws(pair, 1.0, dtype), dtype)
    else:
        reference = pair.torch(1.0)
        judge_float64(pair.jax_output(1.0), {"output": reference["output"]})
        judge_float64(pair.jax(1.0), reference)


@pytest.mark.parametrize(
    "mutant",
    quickest(MUTANTS),
    ids=lambda mutant: mutant.name,
)
def test_a_mutant_is_detected(mutant, monkeypatch):
    mutant.mutate(monkeypatch)
    with pytest.raises(AssertionError, match=r"differs|errs more|not finite"):
        run_proof(mutant)


def test_the_cases_pass_without_the_bugs():
    """``test_cases.py`` runs each of these proofs on the same inputs, without a bug."""
    cases = {case.name: case for case in CASES}
    proofs = {(mutant.case, mutant.proof) for mutant in MUTANTS}
    assert all(1.0 in cases[name].stds() for name, _ in proofs)
    assert all(cases[name].dropout for name, proof in proofs if proof == "dropout")
    rounded = {
        (case.name, dtype) for case, dtype in (r.values for r in ROUNDING if SLOW not in r.marks)
    }
    assert {given for given in proofs if given[1] in DTYPES} <= rounded


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "dropout"])
@pytest.mark.parametrize("component", ["attention", "feed_forward", "losses"])
def test_the_output_by_itself_passes_without_the_bugs(component, training):
    """The program without gradients is of this file alone; it must not be what fails above."""
    cases = [case for case in CASES if case.component == component]
    case = next((case for case in cases if case.dropout), cases[0])
    pair = Pair(case, training=training)
    judge_float64(pair.jax_output(1.0), {"output": pair.torch(1.0)["output"]})
    judge_rounding(output_draws(pair, 1.0, DTYPES["float32"]), DTYPES["float32"])


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 25
    components = {mutate.case.partition("/")[0] for mutate in MUTANTS}
    assert components == {case.component for case in CASES}
