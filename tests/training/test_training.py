"""Whole runs learn, and leave numbers, settings, checkpoints and a picture."""

import html
import json
import math
import shutil
import sys
import types
from io import StringIO

import jax
import numpy as np
import pytest
from rich.console import Console

from jaxformer.training.logging.progress import Reporter
from tests.support.tiny import DROPOUT, TEXT, losses, manifest, records, snapshot, steps, train


def test_a_run_learns(text, tmp_path):
    assert train(text, "run", "--steps", 120, "--sample-tokens", 0) == 0
    train_losses, val_losses = losses("run"), losses("run", "val_loss")
    vocabulary_size = len(manifest("run", 120)["vocabulary"])
    first = np.mean([train_losses[step] for step in (1, 2, 3)])
    assert abs(first - math.log(vocabulary_size)) < 0.1
    letters = np.unique(list(TEXT), return_counts=True)[1] / len(TEXT)
    entropy = -(letters * np.log(letters)).sum()
    assert val_losses[120] < entropy - 0.3, "it must know more than the frequency of letters"
    assert list(val_losses) == list(range(10, 121, 10))
    assert val_losses[120] < val_losses[60] < val_losses[10]


def test_a_run_leaves_numbers_settings_checkpoints_and_a_picture(whole):
    assert {p.name for p in whole.iterdir()} >= {"config.json", "metrics.jsonl", "checkpoints"}
    assert (whole / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert steps(whole) == [10, 20, 30]
    keys = {"step", "train_loss", "grad_norm", "learning_rate", "tokens_per_second", "tokens_seen"}
    trained = [r for r in records(whole) if "train_loss" in r]
    assert [r["step"] for r in trained] == list(range(1, 31))
    for record in trained:
        assert set(record) == keys
        assert all(math.isfinite(value) and value > 0 for value in record.values())
    evaluated = [r for r in records(whole) if "val_loss" in r]
    assert [set(r) for r in evaluated] == [{"step", "val_loss"}] * 3
    config = json.loads((whole / "config.json").read_text())
    assert config["model"]["vocab_size"] == len(set(TEXT))
    for step in (10, 20, 30):
        about = manifest(whole, step)
        assert about["step"] == step
        assert about["config"] == config
        assert about["vocabulary"] == "".join(sorted(set(TEXT)))
        assert about["val_loss"] == losses(whole, "val_loss")[step]


def test_the_learning_rate_warms_up_and_decays(whole):
    rates = [r["learning_rate"] for r in records(whole) if "learning_rate" in r]
    np.testing.assert_allclose(rates[:3], [1e-2 / 3, 2e-2 / 3, 1e-2], rtol=1e-6)
    assert rates[2:] == sorted(rates[2:], reverse=True)
    assert 1e-4 < rates[-1] < 2e-4


def test_a_warm_up_that_is_longer_than_the_run_is_said(text, capsys):
    flags = ["--sample-tokens", 0, "--learning-rate", 1e-2, "--steps", 3]
    assert train(text, "run", *flags, "--warmup-steps", 9) == 0
    warned = " ".join(capsys.readouterr().out.split())
    assert "warm-up takes 9 steps, and the run has 3: the learning" in warned
    assert "rate rises to 0.003, not to 0.01 (--warmup-steps)" in warned
    rates = [r["learning_rate"] for r in records("run") if "learning_rate" in r]
    assert max(rates) == pytest.approx(0.003)
    # The first steps of a longer run, and a run that has one step after its warm-up.
    for more in (["--warmup-steps", 9, "--decay-steps", 20], ["--warmup-steps", 2]):
        assert train(text, f"other-{more[1]}", *flags, *more) == 0
        assert "warm-up" not in capsys.readouterr().out


@pytest.mark.tier("full")
def test_another_seed_makes_another_run(whole, whole_text):
    assert train(whole_text, "run", "--steps", 10, "--seed", 2, *DROPOUT) == 0
    assert losses("run")[1] != losses(whole)[1]


@pytest.mark.tier("full")
def test_a_checkpoint_saved_without_an_evaluation_has_no_stale_one(text):
    flags = ["--steps", 12, "--eval-interval", 4, "--checkpoint-interval", 3, "--keep", 9]
    assert train(text, "run", *flags) == 0
    assert steps("run") == [3, 6, 9, 12]
    found = {step: manifest("run", step)["val_loss"] for step in steps("run")}
    assert found[3] is found[6] is found[9] is None
    assert found[12] == losses("run", "val_loss")[12]
    assert sorted(losses("run", "val_loss")) == [4, 8, 12]


def test_the_last_checkpoints_and_the_best_are_kept(text):
    flags = ["--steps", 40, "--eval-interval", 4, "--checkpoint-interval", 4, "--keep", 2]
    # The learning rate grows to far too much, so that the loss falls and then rises.
    growing = ["--warmup-steps", 40, "--learning-rate", 3, "--clip-norm", 100]
    assert train(text, "run", *flags, *growing) == 0
    val_losses = losses("run", "val_loss")
    best = min(val_losses, key=lambda step: val_losses[step])
    assert best < 36, "this test needs a run that gets worse"
    assert steps("run") == [best, 36, 40]


@pytest.mark.tier("full")
def test_micro_batches_and_devices_do_not_change_the_losses(text):
    """In float64, so that only the order of sums differs."""
    with jax.enable_x64(True):
        assert train(text, "one", "--steps", 20, "--batch-size", 8) == 0
        assert train(text, "four", "--steps", 20, "--batch-size", 8, "--accumulation", 4) == 0
        assert train(text, "wide", "--steps", 20, "--batch-size", 8, "--devices", 8) == 0
    one = list(losses("one").values())
    assert manifest("one", 20)["arrays"]["parameters/final_norm.scale"]["dtype"] == "float64"
    for other in ("four", "wide"):
        np.testing.assert_allclose(list(losses(other).values()), one, rtol=0, atol=1e-10)
        np.testing.assert_allclose(
            losses(other, "val_loss")[20], losses("one", "val_loss")[20], rtol=0, atol=1e-10
        )


def test_bfloat16_trains_float32_parameters(text, whole):
    assert train(text, "run", "--steps", 30, "--dtype", "bfloat16", "--accumulation", 2) == 0
    assert {what["dtype"] for what in manifest("run", 30)["arrays"].values()} == {
        "float32",
        "int32",
    }
    loss = losses("run", "val_loss")
    assert loss[30] < loss[10]
    # One rounding to 8 bits in every number of the forward pass, and never the same numbers.
    assert 0 < abs(losses("run")[1] - losses(whole)[1]) < 2**-7 * losses(whole)[1]


def test_samples_differ_from_evaluation_to_evaluation(text, monkeypatch):
    """With a learning rate near zero the model stays the same; its samples must differ."""
    texts = []
    monkeypatch.setattr(Reporter, "sample", lambda self, text: texts.append(text))
    flags = ["--steps", 30, "--learning-rate", 1e-30, "--min-learning-rate", 0]
    assert train(text, "run", *flags, "--sample-tokens", 40) == 0
    assert [len(text) for text in texts] == [40, 40, 40]
    assert len(set(texts)) == 3
    assert losses("run", "val_loss")[10] == losses("run", "val_loss")[30]


def test_a_terminal_sees_a_bar():
    screen = StringIO()
    reporter = Reporter(
        20, 0, Console(file=screen, force_terminal=True, width=100, highlight=False)
    )
    reporter.steps_done(10, 2.5, 12_345.0, 3.25)
    reporter.evaluation(10, 2.0, 0.1)
    reporter.steps_done(20, 2.25, 12_345.0, 3.25)
    reporter.close()
    shown = screen.getvalue()
    for words in (
        "20/20",
        "loss 2.250",
        "val 2.000",
        "12.3k tokens/s",
        "3.2 ms/step",
        "ETA",
        "\x1b",
    ):
        assert words in shown
    assert f"{2 / math.log(2):.4f} bits/char" in shown


def test_a_service_that_fails_is_reported_once_and_training_continues(text, capsys, monkeypatch):
    calls = []

    def fail(*_, **__):
        calls.append(1)
        raise ConnectionError("no route")

    fake = types.SimpleNamespace(init=lambda **_: None, log=fail, finish=fail, __spec__=None)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    assert train(text, "run", "--steps", 10, "--tracker", "wandb") == 0
    assert calls == [1]
    out = capsys.readouterr().out
    assert out.count("wandb does not answer (no route); metrics.jsonl is still written") == 1
    assert len(losses("run")) == 10


def test_a_fresh_run_that_fails_before_its_first_step_leaves_nothing(
    text, empty_folder, monkeypatch, capsys
):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("jaxformer.training.parallel.pmap.PmapStrategy.train", fail)
    before = snapshot(empty_folder.parent)
    assert train(text, "deep/er/run", "--steps", 3) == 7
    (empty_folder / "mine").mkdir()
    (empty_folder / "mine" / "notes.txt").write_text("keep")
    assert train(text, "mine", "--steps", 3) == 7
    assert [p.name for p in (empty_folder / "mine").iterdir()] == ["notes.txt"]
    shutil.rmtree("mine")
    after = snapshot(empty_folder.parent)
    assert {p: c for p, (_, c) in before.items()} == {p: c for p, (_, c) in after.items()}


def test_samples_are_kept_and_the_report_shows_the_run(whole):
    samples = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    evaluated = [r["step"] for r in records(whole) if "val_loss" in r]
    assert [one["step"] for one in samples] == evaluated
    page = (whole / "report.html").read_text(encoding="utf-8")
    losses = [r["val_loss"] for r in records(whole) if "val_loss" in r]
    for shown in (
        f"{losses[-1]:.4f} nats per token, at step 30",
        html.escape(samples[-1]["text"]),
        "<td>model.num_layers</td>",
        f"<td>{jax.__version__}</td>",
        "<svg",
        "--resume",
    ):
        assert shown in page
    assert "src=" not in page
    assert "<script" not in page
