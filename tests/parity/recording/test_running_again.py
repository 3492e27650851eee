"""Operators that are run again with other numbers may make fewer arrays than they made first."""

import numpy as np

from jaxformer.parity.recording.operators.running_again import run_again
from jaxformer.parity.recording.operators.tape import Tape


def test_an_array_that_is_not_made_again_says_nothing():
    def of_positive(array):
        return [array[at : at + 1] for at in np.flatnonzero(array > 0)]

    tape = Tape()
    start = tape.add(np.array([1.0, 2.0]), "input")
    first, second = tape.record("split", [start], of_positive(start.data), of_positive)
    found = run_again(tape.operators, {start.index: np.array([3.0, -1.0])})
    assert found[first.index] == [3.0]
    assert np.isnan(found[second.index]).all()
