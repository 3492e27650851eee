"""Several processes read together, number for number, the batches that one reads."""

import numpy as np
import pytest

from tests.support.folders_of_tokens import write_folder
from tests.support.rows_of_a_process import NOT_READ
from tests.support.several import fresh, run
from tests.support.tiers import SLOW

STREAMED = ["--resident-tokens", 1, "--seed", 3, "--batch-size", 8]


def write_source(path, seed):
    random = np.random.default_rng(seed)
    ids = {"train": random.integers(0, 40, 900), "val": random.integers(0, 40, 150)}
    documents = {name: range(0, len(ids[name]), 13) for name in ids}
    answers = {name: random.random(len(ids[name])) < 0.5 for name in ids}
    return write_folder(path, ids, vocab_size=40, documents=documents, answers=answers)


def rows_of(tmp_path, count, data, flags):
    """What each process reads of every call, (n, B, …)."""
    out = tmp_path / f"of{count}"
    arguments = fresh("unused", out, *STREAMED, *flags, "--peer-timeout", 60)
    at = arguments.index("--data")
    arguments = [*arguments[:at], *data, *arguments[at + 2 :]]
    module = "tests.support.rows_of_a_process"
    run(count, 4 // count, *arguments, module=module)
    return [np.load(out / f"rows-{number}.npz") for number in range(count)]


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], id="random", marks=SLOW),
        pytest.param(["--sampling", "epoch", "--packing"], id="packed"),
        pytest.param(["--strategy", "mesh", "--accumulation", 2], id="mesh", marks=SLOW),
    ],
)
def test_two_and_four_processes_read_the_batch_of_one(tmp_path, flags):
    """Each its own share of it, of a mixture of two folders, and where a run is resumed too."""
    data = []
    for name, share in (("a", 0.7), ("b", 0.3)):
        data += ["--data", f"{write_source(tmp_path / name, ord(name))}:{share}"]
    (one,) = rows_of(tmp_path, 1, data, flags)
    for count in (2, 4):
        several = rows_of(tmp_path, count, data, flags)
        for name, expected in one.items():
            assert expected.min() >= -100
            parts = np.stack([part[name] for part in several])
            is_read = (parts != NOT_READ).any(axis=(1, 3))
            # Every row is read by one process.
            np.testing.assert_array_equal(is_read.sum(axis=0), 1)
            np.testing.assert_array_equal(is_read.sum(axis=1), 8 // count)
            np.testing.assert_array_equal(parts.max(axis=0), expected)
