"""Training on a folder of tokens: on the devices, from the disk, cut, resumed, and damaged."""

import numpy as np
import pytest

from jaxformer.cli.main import main
from tests.support.folders_of_tokens import write_folder, write_nanogpt
from tests.support.several import fresh, run
from tests.support.tiers import FULL, SLOW, full_after
from tests.support.tiny import (
    DROPOUT,
    TEXT,
    losses,
    manifest,
    records,
    resume,
    same_run,
    snapshot,
    start,
    steps,
    train,
    train_arguments,
)  # fmt: skip
from tests.support.tokens import SIZE, corpus, tokenizer

# What reads the ids changes no bit of what users' programs compute: their tests are ``optimized``.

STREAMED = ["--resident-tokens", 1]
VOCABULARY = sorted(set(TEXT))


def splits():
    ids = np.array([VOCABULARY.index(c) for c in TEXT])
    boundary = int(len(ids) * 0.9)
    return {"train": ids[:boundary], "val": ids[boundary:]}


@pytest.fixture
def folder(tmp_path):
    return write_nanogpt(tmp_path / "nanogpt", splits(), VOCABULARY)


def tokens_of(kind, count=6000):
    return tokenizer(kind).encode(corpus()[: count * 3]).ids[:count]


def write_tokens(path, **more):
    ids = tokens_of("gpt2")
    write_folder(path, {"train": ids[:5000], "val": ids[5000:]}, vocab_size=SIZE, **more)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


def flip_a_bit(shard):
    ids = np.fromfile(shard, "<u2")
    ids[7] ^= 1
    ids.tofile(shard)


@pytest.mark.tier("full")
@pytest.mark.optimized
def test_a_folder_of_nanogpt_trains_as_its_text_does(folder, whole_text, tmp_path, capsys):
    """Whether its ids lie on the devices or stay on the disk: to the bit, in users' programs."""
    whole, flags = tmp_path / "whole", ["--steps", 30, "--sample-tokens", 0, *DROPOUT]
    assert train(whole_text, whole, *flags) == 0
    for name, more in (("resident", []), ("streamed", STREAMED)):
        assert train(folder, tmp_path / name, *flags, *more) == 0
        assert losses(tmp_path / name) == losses(whole)
        assert losses(tmp_path / name, "val_loss") == losses(whole, "val_loss")
    assert manifest(tmp_path / "resident", 30)["vocabulary"] == "".join(VOCABULARY)
    assert records(tmp_path / "streamed")[3]["tokens_seen"] == 4 * 4 * 8
    assert "read from the disk" in capsys.readouterr().out


@pytest.mark.tier("full")
def test_a_run_from_the_disk_is_cut_and_resumed(folder, tmp_path):
    flags = [*DROPOUT, *STREAMED, "--sampling", "epoch", "--decay-steps", 20]
    assert train(folder, tmp_path / "whole", "--steps", 20, *flags) == 0
    assert train(folder, tmp_path / "cut", "--steps", 10, *flags) == 0
    assert resume(tmp_path / "cut", "--steps", 20) == 0
    same_run(tmp_path / "cut", tmp_path / "whole", 20)


@pytest.mark.optimized
@pytest.mark.parametrize("count", [pytest.param(2, marks=FULL), pytest.param(4, marks=SLOW)])
def test_processes_read_the_batch_of_one(folder, tmp_path, count):
    flags = ["--sample-tokens", 0, "--eval-batch-size", 64, *STREAMED]
    assert train(folder, tmp_path / "one", "--steps", 6, *flags, "--devices", 4) == 0
    arguments = fresh(folder, tmp_path / "several", "--steps", 3, "--decay-steps", 6, *flags)
    run(count, 4 // count, *arguments)
    assert steps(tmp_path / "several") == [3]
    # Resumed in one process.
    assert resume(tmp_path / "several", "--steps", 6, "--devices", 4) == 0
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "several")
    # In float32, where sums come in another order.
    assert max(abs(found[step] - expected[step]) for step in range(1, 7)) < 1e-5


@pytest.mark.tier("full")
@pytest.mark.optimized
def test_a_mesh_and_micro_batches_read_the_same(folder, tmp_path):
    mesh = ["--strategy", "mesh", "--fsdp", 2, "--tensor", 2, "--devices", 4, "--accumulation", 2]
    flags = ["--steps", 5, "--sample-tokens", 0, *mesh]
    for name, more in (("resident", []), ("streamed", STREAMED)):
        assert train(folder, tmp_path / name, *flags, *more) == 0
    assert losses(tmp_path / "resident") == losses(tmp_path / "streamed")


def test_a_folder_with_a_tokenizer_is_scored_in_bits_per_byte(tmp_path, capsys):
    path = write_tokens(tmp_path / "tokens", tokenizer_sha256=None)
    assert train(path, tmp_path / "run", "--steps", 10, "--eval-tokens", 100) == 0
    # The path before it may be so long that the line is wrapped.
    shown = " ".join(capsys.readouterr().out.split())
    assert f"5,000 + 1,000 tokens of {SIZE}" in shown
    assert (tmp_path / "run" / "tokenizer.json").exists()
    assert main(["sample", str(tmp_path / "run"), "--prompt", "the", "--tokens", "3"]) == 0


@pytest.mark.tier("full")
def test_ids_without_a_tokenizer_are_shown_as_numbers(tmp_path, capsys):
    path = write_nanogpt(tmp_path / "ids", splits())
    assert train(path, tmp_path / "run", "--steps", 10) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "tokens of 50,257" in shown
    assert "nats/token" in shown
    assert main(["sample", str(tmp_path / "run"), "--prompt-ids", "1,2", "--tokens", "3"]) == 0


def test_a_shard_that_is_cut_short_is_rejected(refuse, tmp_path):
    path = write_tokens(tmp_path / "tokens")
    shard = path / "train-00002.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    refuse(train_arguments(path, "out"), 3, "train-00002.bin")


@pytest.mark.parametrize("name", ["train-00002.bin", "val-00000.bin"])
def test_a_flipped_bit_is_found(refuse, tmp_path, name):
    path = write_tokens(tmp_path / "tokens")
    flip_a_bit(path / name)
    refuse(train_arguments(path, "out"), 3, f"{name} is damaged")


@pytest.mark.parametrize("flags", full_after(1, [STREAMED, []]))
@pytest.mark.tier("full")
def test_a_flipped_bit_of_a_large_folder_is_found_while_training(
    tmp_path, capsys, monkeypatch, flags
):
    monkeypatch.setattr("jaxformer.data.token_folders.MOST_COMPARED", 0)
    path = write_tokens(tmp_path / "tokens")
    assert train(path, tmp_path / "good", "--steps", 3, *flags) == 0
    flip_a_bit(path / "train-00002.bin")
    # The thread is done long before the steps are.
    assert train(path, tmp_path / "bad", "--steps", 100_000, *flags) == 3
    assert "train-00002.bin is damaged" in capsys.readouterr().err


def test_a_missing_tokenizer_is_found(refuse, tmp_path):
    path = write_tokens(tmp_path / "tokens", tokenizer_sha256="0" * 64)
    (path / "tokenizer.json").unlink()
    refuse(train_arguments(path, "out"), 3, "tokenizer.json is missing")


def test_ids_of_a_larger_vocabulary_are_rejected(refuse, tmp_path):
    path = write_nanogpt(tmp_path / "ids", {"train": np.arange(500), "val": np.arange(50)}, "ab")
    refuse(train_arguments(path, "out"), 3, "outside of 2 tokens")


@pytest.mark.parametrize("name", ["training", "validation"])
def test_a_split_without_a_window_is_rejected(refuse, tmp_path, name):
    sizes = {"training": (8, 50), "validation": (50, 0)}[name]
    ids = {"train": np.arange(sizes[0]), "val": np.arange(sizes[1])}
    path = write_folder(tmp_path / "tokens", ids, vocab_size=60)
    refuse(train_arguments(path, "out"), 3, f"the {name} split", "a window needs 9")


def test_another_tokenizer_in_the_folder_is_rejected(refuse, tmp_path):
    path = write_tokens(tmp_path / "tokens", tokenizer_sha256="0" * 64)
    refuse(train_arguments(path, "out"), 3, "is not the tokenizer that made the ids")


def test_a_tokenizer_beside_tokens_is_rejected(refuse, tmp_path):
    path = write_tokens(tmp_path / "tokens")
    refuse(train_arguments(path, "out", "--tokenizer", "chars"), 2, "leave out --tokenizer")


@pytest.mark.parametrize("tokenizers", [("gpt2", "llama"), ("gpt2", "gpt2")])
@pytest.mark.tier("full")
def test_a_model_and_a_folder_have_the_same_tokenizer(tmp_path, capsys, tokenizers):
    path = write_tokens(tmp_path / "tokens")
    text = tmp_path / "text.txt"
    text.write_text(corpus()[:20_000])
    tokenizer(tokenizers[1]).save(str(tmp_path / "other.json"))
    assert train(text, tmp_path / "a", "--steps", 1, "--tokenizer", tmp_path / "other.json") == 0
    arguments = ["--init-from", tmp_path / "a", "--fresh-optimizer", "--steps", 1]
    is_same = tokenizers[0] == tokenizers[1]
    assert train(path, tmp_path / "b", *arguments) == (0 if is_same else 3)
    assert ("made by another tokenizer" in capsys.readouterr().err) is not is_same


@pytest.mark.tier("full")
def test_other_ids_are_no_folder_to_resume_with(folder, tmp_path, capsys):
    assert train(folder, tmp_path / "run", "--steps", 2) == 0
    ids = splits()
    ids["train"][3] = 0 if ids["train"][3] else 1
    write_nanogpt(folder, ids, VOCABULARY)
    assert resume(tmp_path / "run", "--steps", 4) == 2
    assert "corpus (SHA-256" in capsys.readouterr().err


@pytest.mark.tier("full")
def test_a_shard_that_breaks_while_training_loses_no_step(tmp_path):
    """What was trained is saved before the run ends."""
    ids = np.arange(40_000) % 50
    path = write_folder(tmp_path / "tokens", {"train": ids, "val": ids[:100]}, vocab_size=50)
    flags = ["--steps", 100_000, "--checkpoint-interval", 99_999, *STREAMED]
    process = start(*train_arguments(path, tmp_path / "run", *flags))
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 20:
        assert process.poll() is None, process.communicate()
    for shard in path.glob("train-*.bin"):
        shard.write_bytes(b"")
    out, error = process.communicate(timeout=120)
    assert process.returncode == 3, (out, error)
    assert "was cut short while it was read" in error
    assert steps(tmp_path / "run")
    assert snapshot(tmp_path / "run")


@pytest.mark.tier("full")
def test_a_folder_can_be_planned_for(folder, capsys):
    assert main(["plan", "--data", str(folder), *STREAMED_PLAN]) == 0
    assert "corpus" in capsys.readouterr().out


STREAMED_PLAN = ["--resident-tokens", "1", "--d-model", "16", "--num-heads", "2", "--devices", "1"]
