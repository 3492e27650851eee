"""Whole runs: they learn, keep their work, go on bit for bit, and end well whatever happens."""

import json
import math
import shutil
import signal
import sys
import time
import types
from io import StringIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from jaxformer.char_data import window_starts
from jaxformer.cli import main
from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.parameters import split
from jaxformer.train_step import TrainState
from jaxformer.training import loop
from jaxformer.training.progress import Reporter
from jaxformer.training.strategies import DataParallel
from jaxformer.transformer_lm import TransformerLM
from tests.tiny import (
    TEXT,
    losses,
    manifest,
    records,
    snapshot,
    start,
    steps,
    train_arguments,
)

DROPOUT = ["--residual-dropout", 0.1, "--embedding-dropout", 0.1]


def train(text, out, *more):
    return main(train_arguments(text, out, *more))


def resume(out, *more):
    return main(["train", "--out", str(out), "--resume", *map(str, more)])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 30 steps with dropout, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text.txt").write_text(TEXT)
    assert train(folder / "text.txt", folder / "run", "--steps", 30, *DROPOUT) == 0
    return folder / "run"


@pytest.fixture
def whole_text(whole):
    return whole.parent / "text.txt"


@pytest.fixture
def stop_at(monkeypatch):
    """Sends this process a signal while the batch of a step is made."""

    def plan(step, number):
        def starts(seed, at, *rest):
            if at == step:
                signal.raise_signal(number)
            return window_starts(seed, at, *rest)

        monkeypatch.setattr(loop, "window_starts", starts)

    yield plan
    monkeypatch.undo()


def same_run(out, whole, last=30):
    assert losses(out) == losses(whole)
    assert losses(out, "val_loss") == losses(whole, "val_loss")
    assert manifest(out, last)["state_sha256"] == manifest(whole, last)["state_sha256"]


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
    keys = {"step", "train_loss", "grad_norm", "learning_rate", "tokens_per_second"}
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


def test_the_same_command_makes_the_same_run_whatever_a_call_holds(whole, whole_text):
    assert train(whole_text, "run", "--steps", 30, *DROPOUT, "--steps-per-call", 3) == 0
    same_run("run", whole)


def test_another_seed_makes_another_run(whole, whole_text):
    assert train(whole_text, "run", "--steps", 10, "--seed", 2, *DROPOUT) == 0
    assert losses("run")[1] != losses(whole)[1]


def test_ten_steps_and_twenty_more_are_thirty(whole, whole_text):
    assert train(whole_text, "run", "--steps", 10, "--decay-steps", 30, *DROPOUT) == 0
    assert steps("run") == [10]
    assert resume("run", "--steps", 30) == 0
    same_run("run", whole)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_run_cut_at_an_odd_step_goes_on_bit_for_bit(
    whole, whole_text, stop_at, capsys, number, code
):
    stop_at(12, number)
    arguments = ["--steps", 30, *DROPOUT, "--steps-per-call", 1]
    assert train(whole_text, "run", *arguments) == code
    err = capsys.readouterr().err
    assert "stopped after step 13; everything is saved" in err
    assert "train.py --resume --out run" in err
    assert err.count("\n") == 1
    assert steps("run") == [10, 13]
    assert manifest("run", 13)["val_loss"] is None, "it was not evaluated"
    stop_at(24, number)
    assert resume("run", "--steps-per-call", 2) == code
    assert 25 <= steps("run")[-1] <= 26
    stop_at(-1, number)
    assert resume("run") == 0
    same_run("run", whole)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "SIGINT"]
)
def test_a_real_process_that_gets_a_signal_saves_and_goes_on(text, number, code, empty_folder):
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


def test_a_signal_while_compiling_saves_and_goes_on(text, empty_folder):
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


def test_a_second_signal_stops_at_once(text, empty_folder):
    process = start(*train_arguments(text, "run", "--steps", 100_000))
    wait_for(lambda: (empty_folder / "run" / "checkpoints" / "10").exists(), process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode in (130, 143), out + err
    assert "Traceback" not in err
    assert resume("run", "--steps", max(steps("run")) + 1) == 0


def test_a_signal_while_evaluating_puts_the_evaluation_off(whole, whole_text, monkeypatch):
    windows = loop.evaluation_windows

    def interrupted(*arguments):
        signal.raise_signal(signal.SIGTERM)
        return windows(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "evaluation_windows", interrupted)
        assert train(whole_text, "run", "--steps", 30, *DROPOUT) == 143
    assert steps("run") == [10]
    assert manifest("run", 10)["val_loss"] is None
    assert losses("run", "val_loss") == {}
    assert resume("run") == 0
    same_run("run", whole)
    assert manifest("run", 10)["val_loss"] == losses(whole, "val_loss")[10]


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
    assert train(text, "run", *flags, "--learning-rate", 0.3, "--clip-norm", 100) == 0
    val_losses = losses("run", "val_loss")
    best = min(val_losses, key=lambda step: val_losses[step])
    assert best < 36, "this test needs a run that gets worse"
    assert steps("run") == [best, 36, 40]


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


def test_a_killed_save_is_cleared_away_and_told(whole, capsys):
    shutil.copytree(whole, "run")
    shutil.copytree("run/checkpoints/10", "run/checkpoints/.40.1.tmp")
    shutil.copytree("run/checkpoints/10/arrays", "run/checkpoints/40/arrays")
    assert resume("run", "--steps", 31) == 0
    out = capsys.readouterr().out
    assert ".40.1.tmp was cut short: removed" in out
    assert "run/checkpoints/40 is not a checkpoint: ignored" in out
    assert "resuming from step 30" in out
    assert "steps: 30 -> 31" in out


def test_a_run_killed_before_its_first_checkpoint_starts_over(whole, whole_text):
    shutil.copytree(whole, "run")
    shutil.rmtree("run/checkpoints")
    assert resume("run") == 0
    same_run("run", whole)


def test_resuming_a_finished_run_changes_nothing_but_the_picture(whole):
    shutil.copytree(whole, "run")
    before = {p: content for p, (_, content) in snapshot("run").items()}
    assert resume("run") == 0
    after = {p: content for p, (_, content) in snapshot("run").items()}
    changed = {p.name for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    assert changed <= {".lock", "loss.png"}


def test_settings_that_are_not_the_experiment_may_change_and_are_told(whole, capsys):
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


def test_the_command_of_a_run_with_resume_added_goes_on(text):
    flags = ["--qkv-bias", "--no-tie-embeddings", "--norm", "rms_norm"]
    assert train(text, "run", "--steps", 5, *flags) == 0
    assert train(text, "run", "--steps", 5, *flags, "--resume") == 0
    assert manifest("run", 5)["config"]["model"]["qkv_bias"] is True


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


class TestDivergence:
    def test_a_wild_step_is_not_applied_and_not_saved(self, text, capsys):
        code = train(text, "run", "--steps", 40, "--learning-rate", 1e30, "--clip-norm", 1)
        assert code == 6
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "is not finite" in err
        assert "no step was saved" in err
        assert "learning_rate" in err
        assert steps_or_none("run") == []
        (path,) = [p for p in snapshot("run") if p.name.startswith("divergence-")]
        facts = json.loads(path.read_text())
        step = facts["step"]
        assert path.name == f"divergence-{step}.json"
        ids = 9 * len(TEXT) // 10
        expected = window_starts(1337, step - 1, 4, ids - 8).tolist()
        assert facts["window_starts"] == expected
        assert facts["learning_rate"] > 1e29
        assert "nan" in (facts["train_loss"], facts["grad_norm"]) or "inf" in (
            facts["train_loss"], facts["grad_norm"]
        )  # fmt: skip
        assert max(losses("run")) == step

    def test_an_earlier_checkpoint_is_untouched_and_resumed(self, whole, capsys):
        shutil.copytree(whole, "run")
        before = snapshot("run/checkpoints")
        # The rate is 1e30 from the first resumed step on.
        assert resume("run", "--steps", 40, "--learning-rate", 1e30, "--eval-interval", 100) == 6
        assert "step 30 is the last one saved" in capsys.readouterr().err
        assert snapshot("run/checkpoints") == before
        assert resume("run", "--steps", 40, "--learning-rate", 1e-3) == 0
        assert steps("run")[-1] == 40

    def test_a_state_that_is_not_finite_is_not_saved(self, text, capsys):
        """One step with an infinite update: its own loss and gradient are finite."""
        flags = ["--steps", 1, "--learning-rate", 1e38, "--min-learning-rate", 1e38]
        assert train(text, "run", *flags, "--warmup-steps", 0, "--weight-decay", 1e30) == 6
        assert "after step 1 is not finite" in capsys.readouterr().err
        assert steps_or_none("run") == []
        assert (  # The numbers of the step itself are there.
            list(losses("run")) == [1]
        )

    def test_the_device_loop_stops_before_the_update(self):
        """Token 4 stands at one place of the corpus, and its embedding is infinite."""
        config = TransformerLMConfig(
            vocab_size=5,
            num_layers=1,
            d_model=4,
            num_heads=2,
            context_length=3,
            tie_embeddings=False,
        )
        definition, parameters = split(TransformerLM(config, rngs=nnx.Rngs(0)))
        table = parameters["token_embedding.embedding"].at[4].set(jnp.inf)
        parameters = {**parameters, "token_embedding.embedding": table}
        tokens = np.asarray([0, 1, 2, 3] * 5 + [4] + [0, 1, 2, 3] * 5, np.int32)
        starts = np.asarray([[0, 1], [18, 2], [3, 4]], np.int32)
        parallel = DataParallel(
            definition,
            OptimizerConfig(),
            seed=0,
            batch_size=2,
            context_length=3,
            uses_dropout=False,
            devices=jax.local_devices()[:2],
        )

        def run(count):
            state = parallel.replicate(TrainState.create(parameters, OptimizerConfig()))
            state, history = parallel.train(state, parallel.replicate(tokens), starts, count)
            return parallel.fetch(state), history["train_loss"]

        good, losses_of_one = run(1)
        state, losses_of_three = run(3)
        assert np.isfinite(losses_of_one).tolist() == [True]
        assert np.isfinite(losses_of_three).tolist() == [True, False], "the third is not made"
        assert state.step == good.step == 1
        pairs = zip(jax.tree.leaves(state), jax.tree.leaves(good), strict=True)
        assert all(a.tobytes() == b.tobytes() for a, b in pairs)


def steps_or_none(out):
    try:
        return steps(out)
    except FileNotFoundError:
        return []


def test_samples_differ_from_evaluation_to_evaluation(text, monkeypatch):
    """With a learning rate of nothing the model stays the same; its samples must not."""
    texts = []
    monkeypatch.setattr(loop.Reporter, "sample", lambda self, text: texts.append(text))
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


def test_a_service_that_fails_is_told_once_and_training_goes_on(text, capsys, monkeypatch):
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
    assert out.count("wandb does not answer (no route); metrics.jsonl goes on") == 1
    assert len(losses("run")) == 10


def test_a_fresh_run_that_fails_before_its_first_step_leaves_nothing(
    text, empty_folder, monkeypatch, capsys
):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr(loop.DataParallel, "train", fail)
    before = snapshot(empty_folder.parent)
    assert train(text, "deep/er/run", "--steps", 3) == 7
    (empty_folder / "mine").mkdir()
    (empty_folder / "mine" / "notes.txt").write_text("keep")
    assert train(text, "mine", "--steps", 3) == 7
    assert [p.name for p in (empty_folder / "mine").iterdir()] == ["notes.txt"]
    shutil.rmtree("mine")
    after = snapshot(empty_folder.parent)
    assert {p: c for p, (_, c) in before.items()} == {p: c for p, (_, c) in after.items()}
