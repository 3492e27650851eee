"""Runs that are cut off, for whatever reason, resume bit-exact."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from jaxformer.char_data import window_starts
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.training import batches
from jaxformer.training.evaluation import Evaluator
from tests.support.tiers import FULL, full_after
from tests.support.tiny import (
    DROPOUT,
    losses,
    manifest,
    resume,
    same_run,
    snapshot,
    start,
    steps,
    train,
    train_arguments,
)


@pytest.fixture
def stop_at(monkeypatch):
    """Sends this process a signal while the batch of a step is made."""

    def plan(step, number):
        left = [step]

        def starts(seed, at, *rest):
            # The windows of a step are asked for again, for its record; a second signal would kill.
            if at in left:
                left.remove(at)
                signal.raise_signal(number)
            return window_starts(seed, at, *rest)

        monkeypatch.setattr(batches, "window_starts", starts)

    yield plan
    monkeypatch.undo()


def test_the_same_command_makes_the_same_run_whatever_a_call_holds(whole, whole_text):
    assert train(whole_text, "run", "--steps", 30, *DROPOUT, "--steps-per-call", 3) == 0
    same_run("run", whole)


@pytest.mark.tier("full")
def test_ten_steps_and_twenty_more_are_thirty(whole, whole_text):
    assert train(whole_text, "run", "--steps", 10, "--decay-steps", 30, *DROPOUT) == 0
    assert steps("run") == [10]
    assert resume("run", "--steps", 30) == 0
    same_run("run", whole)


@pytest.mark.parametrize(
    ("number", "code"),
    full_after(1, [(signal.SIGTERM, 143), (signal.SIGINT, 130)]),
    ids=["SIGTERM", "SIGINT"],
)
def test_a_run_cut_at_an_odd_step_continues_bit_for_bit(
    whole, whole_text, stop_at, capsys, number, code
):
    stop_at(12, number)
    arguments = ["--steps", 30, *DROPOUT, "--steps-per-call", 1]
    assert train(whole_text, "run", *arguments) == code
    err = capsys.readouterr().err
    assert "stopped after step 13; everything is saved" in err
    assert "train --resume --out run" in err
    assert err.count("\n") == 1
    assert steps("run") == [10, 13]
    assert manifest("run", 13)["val_loss"] is None, "it was not evaluated"
    page = Path("run/report.html").read_text(encoding="utf-8")
    assert "<td>13 of 30</td>" in page
    assert "<p>Resume where it stopped:</p>" in page
    stop_at(24, number)
    assert resume("run", "--steps-per-call", 2) == code
    assert 25 <= steps("run")[-1] <= 26
    stop_at(-1, number)
    assert resume("run") == 0
    same_run("run", whole)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=FULL)],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_real_process_that_gets_a_signal_saves_and_continues(text, number, code, empty_folder):
    intervals = ["--eval-interval", 100_000, "--checkpoint-interval", 100_000]
    total = 3000
    arguments = train_arguments(text, "cut", *intervals, *DROPOUT, "--steps-per-call", 1)
    process = start(*arguments, "--steps", total)
    wait_for(lambda: (empty_folder / "cut" / "metrics.jsonl").stat().st_size > 500, process)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, out + err
    (cut,) = steps("cut")
    assert 0 < cut < total
    assert f"stopped after step {cut}; everything is saved" in err
    assert err.count("\n") == 1
    assert f"step 1/{total}" in out
    assert "\x1b" not in out, "no colours and no bar where there is no terminal"

    goal = cut + 7
    schedule = ["--steps", goal, "--decay-steps", total]
    assert resume("cut", *schedule) == 0
    assert train(text, "uncut", *intervals, *DROPOUT, *schedule) == 0
    assert losses("cut") == losses("uncut")
    assert manifest("cut", goal)["state_sha256"] == manifest("uncut", goal)["state_sha256"]


def wait_for(condition, process, seconds=60):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None, process.communicate()
        try:
            if condition():
                return
        except FileNotFoundError:
            pass
        time.sleep(0.01)
    pytest.fail("it did not happen")


@pytest.mark.tier("full")
def test_a_signal_while_compiling_saves_and_continues(text, empty_folder):
    process = start(*train_arguments(text, "run", "--steps", 3))
    wait_for(lambda: (empty_folder / "run" / "config.json").exists(), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, out + err
    assert "stopped after step 0; everything is saved" in err
    assert steps("run") == [0]
    assert resume("run") == 0
    assert steps("run") == [0, 3]
    assert sorted(losses("run")) == [1, 2, 3]


@pytest.mark.tier("full")
def test_a_second_signal_stops_at_once(text, empty_folder):
    process = start(*train_arguments(text, "run", "--steps", 100_000))
    wait_for(lambda: (empty_folder / "run" / "checkpoints" / "10").exists(), process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143), out + err
    assert "Traceback" not in err
    # The save that was under way has left its temporary folder.
    newest = CheckpointFolder(Path("run/checkpoints")).steps()[-1]
    assert resume("run", "--steps", newest + 1) == 0
    assert steps("run")[-1] == newest + 1


@pytest.mark.tier("full")
def test_a_run_that_nobody_reads_any_more_saves_and_stops(text, empty_folder):
    """As under ``train | head``: it ends as other programs do, and loses nothing."""
    process = start(*train_arguments(text, "run", "--steps", 100_000))
    process.stdout.readline()
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(timeout=60) == 141, err
    (made,) = steps("run")[-1:]
    assert f"stopped after step {made}; everything is saved" in err
    assert resume("run", "--steps", made + 1) == 0


@pytest.mark.tier("full")
def test_a_signal_after_an_evaluation_leaves_its_sample(whole, whole_text, monkeypatch):
    validation_losses = Evaluator.validation_losses

    def followed(*arguments):
        found = validation_losses(*arguments)
        signal.raise_signal(signal.SIGTERM)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "validation_losses", followed)
        assert train(whole_text, "run", "--steps", 30, *DROPOUT) == 143
    assert resume("run") == 0
    same_run("run", whole)
    samples = [Path(run, "samples.jsonl").read_bytes() for run in ("run", whole)]
    assert samples[0] == samples[1]


def test_damaged_numbers_and_texts_are_passed_over(whole):
    shutil.copytree(whole, "run")
    with Path("run/metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "grad_norm": "much"}\n')
    with Path("run/samples.jsonl").open("a") as file:
        file.write('{"step": 5}\n')
    assert resume("run") == 0
    assert losses("run") == losses(whole)


@pytest.mark.tier("full")
def test_a_signal_while_evaluating_puts_the_evaluation_off(whole, whole_text, monkeypatch):
    validation_losses = Evaluator.validation_losses

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return validation_losses(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "validation_losses", interrupted)
        assert train(whole_text, "run", "--steps", 30, *DROPOUT) == 143
    assert steps("run") == [10]
    assert manifest("run", 10)["val_loss"] is None
    assert losses("run", "val_loss") == {}
    assert resume("run") == 0
    same_run("run", whole)
    assert manifest("run", 10)["val_loss"] == losses(whole, "val_loss")[10]


def test_the_newest_checkpoint_is_passed_over_when_damaged(whole, whole_text, capsys):
    shutil.copytree(whole, "run")
    manifest_file = "run/checkpoints/30/MANIFEST.json"
    with open(manifest_file, "a") as file:
        file.write(" ")
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 31, "train_lo')
    capsys.readouterr()
    assert resume("run") == 0
    out = capsys.readouterr().out
    assert "resuming from step 20" in out
    assert "warning: run/checkpoints/30/MANIFEST.json is damaged" in out
    found = sorted(path.name for path in Path("run/checkpoints").iterdir())
    assert found == ["10", "20", "30", "quarantine"]
    same_run("run", whole)


def test_a_killed_save_is_cleared_away_and_reported(whole, capsys):
    shutil.copytree(whole, "run")
    shutil.copytree("run/checkpoints/10", "run/checkpoints/.40.1.tmp")
    shutil.copytree("run/checkpoints/10/arrays", "run/checkpoints/40/arrays")
    assert resume("run", "--steps", 31) == 0
    out = capsys.readouterr().out
    assert ".40.1.tmp was cut short: removed" in out
    assert "run/checkpoints/40 is not a checkpoint: ignored" in out
    assert "resuming from step 30" in out
    assert "steps: 30 -> 31" in out


def test_a_run_killed_before_its_first_checkpoint_starts_over(whole, whole_text, capsys):
    shutil.copytree(whole, "run")
    shutil.rmtree("run/checkpoints")
    assert resume("run") == 0
    same_run("run", whole)
    assert (
        "warning: run has no checkpoint: the run starts over at step 0" in capsys.readouterr().out
    )


def test_a_run_whose_metrics_were_removed_says_where_they_begin(whole, capsys):
    shutil.copytree(whole, "run")
    Path("run/metrics.jsonl").unlink()
    assert resume("run", "--steps", 31) == 0
    assert "there is no metrics.jsonl: it begins after step 30" in capsys.readouterr().out
    first = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 31


def test_resuming_a_finished_run_changes_nothing_but_the_picture(whole):
    shutil.copytree(whole, "run")
    before = {p: content for p, (_, content) in snapshot("run").items()}
    assert resume("run") == 0
    after = {p: content for p, (_, content) in snapshot("run").items()}
    changed = {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    assert changed <= {".lock", "loss.png", "report.html"}


def test_settings_that_are_not_the_experiment_may_change_and_are_reported(whole, capsys):
    shutil.copytree(whole, "run")
    flags = "--steps 31 --eval-interval 5 --keep 1 --learning-rate 0.001"
    assert resume("run", *flags.split()) == 0
    out = capsys.readouterr().out
    for line in (
        "eval_interval: 10 -> 5",
        "keep: 3 -> 1",
        "optimizer.learning_rate: 0.01 -> 0.001",
    ):
        assert line in out
    assert manifest("run", 31)["config"]["optimizer"]["learning_rate"] == 0.001


@pytest.mark.tier("full")
def test_the_command_of_a_run_with_resume_added_continues(text):
    flags = ["--qkv-bias", "--no-tie-embeddings", "--norm", "rms_norm"]
    assert train(text, "run", "--steps", 5, *flags) == 0
    assert train(text, "run", "--steps", 5, *flags, "--resume") == 0
    assert manifest("run", 5)["config"]["model"]["qkv_bias"] is True


def test_a_resume_that_is_rejected_changes_nothing(whole, capsys):
    shutil.copytree(whole, "run")
    Path("run/checkpoints/30/MANIFEST.json").write_text("{}")
    Path("run/checkpoints/.31.77.tmp").mkdir()
    before = snapshot("run/checkpoints")
    assert resume("run", "--seed", 99) == 2
    assert "seed (1337 -> 99)" in capsys.readouterr().err
    assert snapshot("run/checkpoints") == before


def test_fewer_steps_than_a_run_has_made_are_rejected(whole, capsys):
    shutil.copytree(whole, "run")
    before = {p: content for p, (_, content) in snapshot("run").items()}
    assert resume("run", "--steps", 29) == 2
    expected = "--steps 29 is below step 30, which this run has reached: give that or more"
    assert expected in capsys.readouterr().err
    after = {p: content for p, (_, content) in snapshot("run").items()}
    assert {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)} <= {
        ".lock"
    }
