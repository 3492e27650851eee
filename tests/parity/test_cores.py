"""Work on large arrays that is shared among the cores."""

import itertools

import numpy as np
import pytest

from jaxformer.parity import cores
from jaxformer.parity.cores import copy_to, share, widened


@pytest.fixture
def three_cores(monkeypatch):
    monkeypatch.setattr(cores, "count_cores", lambda: 3)
    cores._pool.cache_clear()
    yield
    cores._pool.cache_clear()


@pytest.mark.parametrize("count", [1, 2, 3, 7, 100])
def test_ranges_make_up_the_whole_in_order(three_cores, count):
    parts = share(count, 100 * cores.FEWEST, lambda rows: list(range(count))[rows])
    assert list(itertools.chain(*parts)) == list(range(count))
    assert len(parts) == min(count, 3)


def test_little_work_is_not_shared(three_cores):
    assert share(10, cores.FEWEST, lambda rows: rows) == [slice(0, 10)]


def test_a_share_may_share_its_own_work(three_cores):
    size = 100 * cores.FEWEST

    def work(rows):
        return sum(share(rows.stop - rows.start, size, lambda inner: inner.stop - inner.start))

    assert sum(share(1000, size, work)) == 1000


def test_an_error_of_a_share_is_raised(three_cores):
    def work(rows):
        if rows.stop == 9:
            raise ValueError("the last one")
        return rows

    with pytest.raises(ValueError, match="the last one"):
        share(9, 100 * cores.FEWEST, work)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_copy_in_float64_has_the_same_numbers(three_cores, dtype, order):
    shape = 5, cores.FEWEST
    array = np.asarray(np.random.default_rng(0).normal(size=shape).astype(dtype), order=order)
    made = widened(array)
    assert made.dtype == np.float64
    assert made.flags.writeable
    assert not np.may_share_memory(made, array)
    np.testing.assert_array_equal(made, array.astype(np.float64))


def test_numbers_are_copied_into_memory_that_is_there(three_cores):
    target = np.zeros((), np.float64)
    copy_to(target, np.float32(2.5))
    assert target == 2.5
