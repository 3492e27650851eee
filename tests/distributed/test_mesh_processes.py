"""A mesh over several processes: the same run as in one, and checkpoints that any mesh takes."""

import pytest

from tests.support.several import fresh, run
from tests.support.tiers import SLOW
from tests.support.tiny import DROPOUT, TEXT, losses, resume, steps, train

SELDOM = ["--sample-tokens", 0, "--eval-interval", 5, "--eval-batch-size", 64]


@pytest.mark.parametrize(
    ("each", "mesh"),
    [
        (1, ["--fsdp", 2]),
        pytest.param(2, ["--fsdp", 2, "--tensor", 2], marks=SLOW),
    ],
    ids=["fsdp", "fsdp and tensor"],
)
@pytest.mark.tier("full")
def test_a_mesh_over_two_processes_is_the_run_of_one(tmp_path, empty_folder, each, mesh):
    (empty_folder / "text.txt").write_text(TEXT)
    flags = ["--strategy", "mesh", *mesh, "--d-ff", 32, "--batch-size", 8, *SELDOM, *DROPOUT]
    count = ["--devices", 2 * each]
    assert train("text.txt", "one", "--steps", 10, *flags, *count) == 0
    half = fresh("text.txt", "two", "--steps", 5, "--decay-steps", 10, *flags)
    outputs = run(2, each, *half)
    assert f"{2 * each} × cpu in 2 processes" in outputs[0][0]
    assert steps("two") == [5]
    # From parts on two processes to the same parts on one.
    assert resume("two", "--steps", 10, *count) == 0
    for name in ("train_loss", "val_loss"):
        expected, found = losses("one", name), losses("two", name)
        assert found.keys() == expected.keys()
        # In float32, where sums come in another order.
        assert max(abs(found[step] - expected[step]) for step in expected) < 1e-4
