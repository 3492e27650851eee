"""Root causes that are one bug are listed once."""

import dataclasses

from jaxformer.parity.diagnosis.causes import merge_causes
from jaxformer.parity.findings import RootCause

QUERIES = RootCause("rope.py:3", "reference.py:10", "interleaved, not halves", 0.1)
KEYS = dataclasses.replace(QUERIES, torch_source="reference.py:11", error=0.3)


def test_a_line_that_is_wrong_in_one_way_is_one_cause():
    (found,) = merge_causes([QUERIES, KEYS])
    assert found == dataclasses.replace(QUERIES, places=2, error=0.3)


def test_what_is_not_known_to_be_one_bug_stays_apart():
    unknown = [dataclasses.replace(cause, diagnosis="") for cause in (QUERIES, KEYS)]
    without_a_line = [dataclasses.replace(cause, jax_source="") for cause in (QUERIES, KEYS)]
    backward = dataclasses.replace(QUERIES, stage="backward")
    other = dataclasses.replace(QUERIES, diagnosis="another base")
    causes = [QUERIES, backward, other, *unknown, *without_a_line]
    assert merge_causes(causes) == causes
