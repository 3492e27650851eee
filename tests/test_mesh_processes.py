"""A mesh over several processes: the same run as in one, and checkpoints that any mesh takes."""

import pytest

from tests.several import fresh, run
from tests.tiny import DROPOUT, TEXT, losses, steps

FLAGS = ["--strategy", "mesh", "--fsdp", 2, "--tensor", 2, "--d-ff", 32, "--batch-size", 8]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


def test_a_mesh_over_two_processes_is_the_run_of_one(cache, empty_folder):
    (empty_folder / "text.txt").write_text(TEXT)
    flags = [*DROPOUT, *FLAGS]
    run(1, 4, *fresh("text.txt", "one", "--steps", 20, *flags), cache=cache)
    half = fresh("text.txt", "two", "--steps", 10, "--decay-steps", 20, *flags)
    told = run(2, 2, *half, cache=cache)
    assert "4 × cpu in 2 processes" in told[0][0]
    assert steps("two") == [10]
    resume = ["train", "--out", "two", "--resume", "--steps", 20]
    # From parts on two processes to other parts on one.
    told = run(1, 2, *resume, "--fsdp", 1, cache=cache)
    assert "not bitwise" in told[0][0]
    for name in ("train_loss", "val_loss"):
        expected, found = losses("one", name), losses("two", name)
        assert found.keys() == expected.keys()
        # In float32, where sums come in another order.
        assert max(abs(found[step] - expected[step]) for step in expected) < 1e-4
