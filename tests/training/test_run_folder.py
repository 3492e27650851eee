"""A run's folder: which runs may begin or resume in it, and which process may write to it."""

import fcntl
import os
import shutil
import subprocess
import sys

import pytest

from jaxformer.training.run_folder import RunFolder
from tests.support.tiny import ROOT, train_arguments

HOLD = """
import sys, time
from jaxformer.training.run_folder import RunFolder, stored_config
with RunFolder(sys.argv[1], resume=True) as folder:
    folder.begin(stored_config(sys.argv[1]))
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def here(whole, empty_folder):
    """A finished run and its text, in the folder that may not change."""
    shutil.copytree(whole.parent, empty_folder, dirs_exist_ok=True)
    return empty_folder


def test_a_folder_that_holds_a_run_needs_resume(refuse, here):
    refuse(train_arguments("text.txt", "run"), 2, "run already holds a run", "--resume")


@pytest.mark.parametrize("left", ["config.json", "metrics.jsonl"])
def test_a_run_that_came_no_further_than_its_first_file_counts(refuse, text, left, here):
    (here / "begun").mkdir()
    (here / "begun" / left).write_text("{}")
    refuse(train_arguments(text, "begun"), 2, "begun already holds a run")


def test_resuming_without_a_run_is_rejected(refuse, text, here):
    refuse(train_arguments(text, "nothing", "--resume"), 4, "nothing holds no run")
    (here / "empty").mkdir()
    refuse(train_arguments(text, "empty", "--resume"), 4, "empty holds no run")


def test_resuming_with_an_unreadable_config_is_rejected(refuse, here):
    (here / "run" / "config.json").write_text("{")
    refuse(train_arguments("text.txt", "run", "--resume"), 4, "config.json cannot be read")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ("--d-model 32", "model.d_model (16 -> 32)"),
        ("--num-layers 2 --seed 3", "model.num_layers (1 -> 2), seed (1337 -> 3)"),
        ("--batch-size 8", "batch_size (4 -> 8)"),
        ("--dtype bfloat16", "dtype (float32 -> bfloat16)"),
        ("--residual-dropout 0.5", "model.residual_dropout (0.1 -> 0.5)"),
        ("--data python-docs", "data ("),
    ],
)
def test_a_resumed_run_may_not_become_another_one(refuse, here, flags, word):
    refuse(["train", "--out", "run", "--resume", *flags.split()], 2, "must keep", word)


def test_a_changed_text_is_noticed_at_resume(refuse, here, whole_text):
    original = whole_text.read_text()
    try:
        whole_text.write_text(original.replace("cat", "tac"))
        refuse(["train", "--out", "run", "--resume"], 2, "must keep", "corpus (SHA-256 ",
            "give the text as it was")  # fmt: skip
        whole_text.write_text(original + "Ω")
        refuse(["train", "--out", "run", "--resume"], 2, "the text that the run began with")
    finally:
        whole_text.write_text(original)


def test_with_all_checkpoints_damaged_nothing_is_left_to_resume(refuse, here):
    for step in (10, 20, 30):
        (here / "run" / "checkpoints" / str(step) / "MANIFEST.json").unlink()
    words = "run/checkpoints holds no checkpoint that can be used", "start a new run"
    refuse(["train", "--out", "run", "--resume"], 4, *words)


def test_a_resumed_run_that_cannot_save_is_refused_at_its_start(refuse, here, monkeypatch):
    # For root too, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "checkpoints")
    words = "cannot write to run/checkpoints: no permission"
    refuse(["train", "--out", "run", "--resume"], 7, words)
    shutil.rmtree("run/checkpoints")
    (here / "run" / "checkpoints").touch()
    refuse(["train", "--out", "run", "--resume"], 7, "run/checkpoints: it is no folder")


@pytest.mark.parametrize("resume", [[], ["--resume"]], ids=["fresh", "resume"])
def test_a_folder_in_use_is_rejected_with_its_holder(refuse, here, whole_text, resume):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, "run"],
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    try:
        assert holder.stdout.readline() == "held\n"
        words = "run is in use by", f"process {holder.pid},"
        arguments = ["train", "--data", whole_text, "--devices", 1, "--out", "run"]
        refuse([*arguments, *resume], 8, *words)
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def test_the_lock_goes_with_its_holder(here):
    with (
        RunFolder("run", resume=True),
        (here / "run" / ".lock").open() as lock,
        pytest.raises(BlockingIOError),
    ):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (here / "run" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
