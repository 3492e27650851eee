"""Memory of a comparison does not outlive it."""

import gc

import pytest

from jaxformer.parity.comparison.modules import compare
from jaxformer.parity.recording.operators.tape import Tape
from tests.parity.test_mutants import generator
from tests.support import mutants
from tests.support.subjects import subject

pytestmark = pytest.mark.usefixtures("float64")


def tapes():
    gc.collect()
    return sum(type(one) is Tape for one in gc.get_objects())


@pytest.mark.parametrize("mutate", [None, mutants.scaled_gradient])
def test_nothing_that_was_recorded_outlives_a_comparison(mutate):
    """PyTorch's graph holds what takes gradients, where no collector sees it."""
    found = subject("gpt2")
    candidate = found.fresh()
    if mutate is not None:
        mutate(found, candidate, generator("gpt2", "memory"))
    before = tapes()
    report = compare(found.torch_module, candidate, found.inputs, dtype="float32")
    assert (report.verdict == "bug") == (mutate is not None)
    assert tapes() == before
