"""Training on documents that share windows: resumed, in several processes, and rejected."""

import json

import numpy as np
import pytest

from tests.support.folders_of_tokens import write_folder, write_nanogpt
from tests.support.several import fresh, run
from tests.support.tiny import losses, manifest, records, resume, train, train_arguments

PACKED = ["--packing", "--sampling", "epoch"]
V = 50


def write_documents(path, *, has_answers=False, seed=0):
    """Documents of 1 to 20 ids, of which about a half belongs to answers."""
    random = np.random.default_rng(seed)
    splits = {"train": random.integers(0, V, 900), "val": random.integers(0, V, 150)}
    documents, answers = {}, {}
    for name, ids in splits.items():
        # Something to learn: an id and its successor.
        ids[1::2] = (ids[::2] + 1) % V
        ends = np.cumsum(random.integers(1, 21, len(ids)))
        documents[name] = [0, *ends[ends < len(ids)]]
        answers[name] = random.random(len(ids)) < 0.5
    more = {"answers": answers} if has_answers else {}
    return write_folder(path, splits, vocab_size=V, shard=100, documents=documents, **more)


@pytest.mark.tier("full")
def test_a_packed_run_is_cut_and_resumed(tmp_path, capsys):
    folder = write_documents(tmp_path / "tokens")
    flags = [*PACKED, "--decay-steps", 30, "--sample-tokens", 0]
    assert train(folder, tmp_path / "whole", "--steps", 30, *flags) == 0
    shown = capsys.readouterr().out
    assert "documents packed into" in shown
    # At a step that is no whole number of epochs or calls.
    assert train(folder, tmp_path / "cut", "--steps", 13, *flags) == 0
    assert resume(tmp_path / "cut", "--steps", 30) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    states = [manifest(tmp_path / name, 30)["state_sha256"] for name in ("cut", "whole")]
    assert states[0] == states[1]
    found = losses(tmp_path / "whole", "val_loss")
    assert found[30] < found[10] < np.log(V) + 0.5
    assert resume(tmp_path / "cut", "--steps", 31, "--no-packing") == 2


@pytest.mark.tier("slow")
@pytest.mark.parametrize("count", [2, 4])
def test_processes_read_the_packed_batch_of_one(tmp_path, count):
    folder = write_documents(tmp_path / "tokens", has_answers=True)
    flags = ["--sample-tokens", 0, "--eval-batch-size", 64, *PACKED]
    assert train(folder, tmp_path / "one", "--steps", 6, *flags, "--devices", 4) == 0
    arguments = fresh(folder, tmp_path / "several", "--steps", 3, "--decay-steps", 6, *flags)
    run(count, 4 // count, *arguments)
    assert resume(tmp_path / "several", "--steps", 6, "--devices", 4) == 0
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "several")
    # In float32, where sums come in another order.
    assert max(abs(found[step] - expected[step]) for step in range(1, 7)) < 1e-5


@pytest.mark.tier("full")
def test_one_device_trains_as_a_mesh_with_micro_batches_does(tmp_path):
    folder = write_documents(tmp_path / "tokens", has_answers=True)
    mesh = ["--strategy", "mesh", "--fsdp", 2, "--tensor", 2, "--devices", 4, "--accumulation", 2]
    for name, flags in (("one", []), ("mesh", mesh)):
        assert train(folder, tmp_path / name, "--steps", 10, *PACKED, *flags) == 0
    for name in ("train_loss", "val_loss"):
        expected, found = losses(tmp_path / "one", name), losses(tmp_path / "mesh", name)
        assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.tier("full")
def test_answers_alone_are_trained_on(tmp_path):
    """In windows at random too: the loss of a step is the mean over answers."""
    folder = write_documents(tmp_path / "tokens", has_answers=True)
    assert train(folder, tmp_path / "run", "--steps", 10) == 0
    assert len(records(tmp_path / "run")) == 11
    shards = folder / "index.json"
    index = json.loads(shards.read_text())
    for shard in index["splits"]["val"]["shards"]:
        file = folder / shard["answers"]["file"]
        file.write_bytes(bytes(len(file.read_bytes())))
    assert train(folder, tmp_path / "none", "--steps", 10) == 3


def test_what_has_no_documents_is_rejected(refuse, tmp_path, whole_text):
    refuse(train_arguments(whole_text, "out", *PACKED), 2, "--packing needs a folder of tokens")
    folder = write_nanogpt(tmp_path / "ids", {"train": np.arange(500), "val": np.arange(50)})
    refuse(train_arguments(folder, "out", *PACKED), 3, "does not say where documents begin")


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--packing"], "packing needs sampling='epoch'"),
        ([*PACKED, "--attention-kernel", "cudnn"], "packing needs attention_kernel="),
        (
            [
                *PACKED, "--positions", "rotary", "--rotary-scaling", "dynamic",
                "--rotary-scaling-factor", "2", "--rotary-original-context-length", "4",
            ],
            "rotary_scaling='dynamic' follows the length",
        ),
        ([*PACKED, "--positions", "alibi", "--alibi-in-bfloat16"], "alibi_in_bfloat16 rounds"),
    ],
)  # fmt: skip
def test_models_that_mix_documents_are_rejected(refuse, tmp_path, flags, reason):
    refuse(train_arguments(write_documents(tmp_path / "tokens"), "out", *flags), 2, reason)
