"""Mixtures: each source gives its share, and in epochs each of its own rows once."""

import numpy as np
import pytest

from jaxformer.sampling import MIXTURE_BLOCK, MixedRows, draw_rows, whole_shares
from tests.support.tiers import full_after


class Numbers:
    """Rows that tell which they are; every ``stride``-th stands in an epoch."""

    def __init__(self, name, count, stride=1):
        self.name, self.count, self.stride = name, count, stride

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        assert 0 <= index < self.count
        return (np.array([self.name]), np.array([index]))


def mixture():
    return MixedRows([Numbers(0, 41, stride=4), Numbers(1, 100), Numbers(2, 7)], [0.6, 0.3, 0.1])


def drawn(rows, sampling, steps, batch=10, seed=3):
    chosen = np.concatenate([draw_rows(rows, sampling, seed, step, batch) for step in steps])
    ends = np.cumsum([len(part) for part in rows.parts])
    sources = np.searchsorted(ends, chosen, side="right")
    found = np.stack([sources, chosen - np.append(0, ends)[sources]], axis=1)
    assert [int(x[0]) for x in rows[int(chosen[0])]] == found[0].tolist()
    return found


@pytest.mark.parametrize("sampling", full_after(1, ["random", "epoch"]))
def test_each_source_gives_its_share(sampling):
    found = drawn(mixture(), sampling, range(MIXTURE_BLOCK // 16), batch=16)
    counts = np.bincount(found[:, 0])
    np.testing.assert_array_equal(counts, whole_shares([0.6, 0.3, 0.1], MIXTURE_BLOCK))
    # Also in a short part of a run, up to chance: four standard deviations.
    part = np.bincount(found[:1000, 0]) / 1000
    assert (abs(part - [0.6, 0.3, 0.1]) < 4 * 0.0155).all()


def test_in_epochs_a_source_gives_each_row_once():
    found = drawn(mixture(), "epoch", range(200))
    for source, epoch in ((0, range(0, 41, 4)), (1, range(100)), (2, range(7))):
        rows = found[found[:, 0] == source, 1]
        for begin in range(0, len(rows) - len(epoch), len(epoch)):
            assert sorted(rows[begin : begin + len(epoch)]) == list(epoch)
        assert list(rows[: len(epoch)]) != list(epoch)


@pytest.mark.tier("full")
def test_across_blocks_too():
    """A block of rows ends within an epoch of a source, which goes on in the next block."""
    rows = MixedRows([Numbers(0, 50_000), Numbers(1, 3)], [0.5, 0.5])
    found = drawn(rows, "epoch", range(25), batch=4001)
    first = found[found[:, 0] == 0, 1]
    begin = MIXTURE_BLOCK // 2
    assert len(first) > begin + 10_000
    assert len(set(first.tolist())) == len(first) <= 50_000


def test_a_step_is_known_without_those_before_it():
    rows = mixture()
    whole = [draw_rows(rows, "epoch", 3, step, 10).tolist() for step in range(30)]
    assert draw_rows(rows, "epoch", 3, 17, 10).tolist() == whole[17]
    assert draw_rows(rows, "epoch", 4, 17, 10).tolist() != whole[17]


def test_a_share_that_gives_no_row_is_rejected():
    with pytest.raises(ValueError, match=r"at least 1\.5e-05 of all"):
        MixedRows([Numbers(0, 5), Numbers(1, 5)], [1, 1e-9])
