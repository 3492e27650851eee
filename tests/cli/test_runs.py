"""``jaxformer runs``: which runs there are, in what state, and where two of them differ."""

import dataclasses
import fcntl
import json
import pathlib
import re
import shlex

import pytest

from jaxformer.cli.main import main
from jaxformer.training.presets import PRESETS
from tests.support.tiny import ROOT

CONFIG = dataclasses.replace(PRESETS["nano"](), steps=4)


def make_run(folder, losses=(), saved=None, **settings):
    """The folder of a run with an evaluation after every step; without ``saved``, no checkpoint."""
    folder.mkdir(parents=True)
    config = dataclasses.replace(CONFIG, **settings)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    with (folder / "metrics.jsonl").open("w") as file:
        for step, loss in enumerate(losses, 1):
            record = {"step": step, "train_loss": loss, "tokens_per_second": 1000.0 * step}
            file.write(f"{json.dumps(record)}\n{json.dumps({'step': step, 'val_loss': loss})}\n")
    if saved is not None:
        checkpoint = folder / "checkpoints" / str(saved)
        checkpoint.mkdir(parents=True)
        (checkpoint / "MANIFEST.json").write_text("{}")
    return folder


def run_json(capsys, *arguments):
    assert main(["runs", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_real_run_is_done(whole, capsys):
    (run,) = run_json(capsys, whole.parent)["runs"]
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    losses = [record["val_loss"] for record in records if "val_loss" in record]
    assert run["run"] == str(whole)
    assert (run["state"], run["step"], run["steps"], run["saved_step"]) == ("done", 30, 30, 30)
    assert run["train_loss"] == [r["train_loss"] for r in records if "train_loss" in r][-1]
    assert (run["val_loss"], run["best_val_loss"]) == (losses[-1], min(losses))
    assert main(["runs", str(whole)]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert "done" in line
    assert "30/30" in line
    assert f"{losses[-1]:.4f}" in line


def test_states(tmp_path, capsys):
    runs = tmp_path / "runs"
    make_run(runs / "a" / "done", [3, 1, 1.5, 2], saved=4)
    make_run(runs / "a" / "new")
    diverged = make_run(runs / "diverged", [3, None])
    (diverged / "divergence-2.json").write_text("{}")
    make_run(runs / "stopped", [3, 2])
    # Its last step could not be saved.
    make_run(runs / "unsaved", [3, 2, 1, 1], saved=3)
    make_run(runs / "without checkpoints", [3, 2, 1, 1])
    training = make_run(runs / "training", [3])
    (runs / "no run").mkdir()
    with (training / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = run_json(capsys, runs)["runs"]
    assert {run["run"].removeprefix(f"{runs}/"): run["state"] for run in found} == {
        "a/done": "done",
        "a/new": "stopped",
        "diverged": "diverged",
        "stopped": "stopped",
        "training": "training",
        "unsaved": "stopped",
        "without checkpoints": "stopped",
    }
    assert (found[0]["best_step"], found[0]["best_val_loss"]) == (2, 1)
    assert found[0]["tokens_per_second"] == 2500
    assert (found[1]["step"], found[1]["val_loss"], found[1]["saved_step"]) == (0, None, None)


def test_a_ported_model_is_no_run(tmp_path, capsys):
    run = make_run(tmp_path / "trained", [3])
    (tmp_path / "ported" / "checkpoints" / "0").mkdir(parents=True)
    assert [each["run"] for each in run_json(capsys, tmp_path)["runs"]] == [str(run)]
    (tmp_path / "ported" / "metrics.jsonl").touch()
    assert main(["runs", str(tmp_path)]) == 4


DAMAGES = {
    "garbage": b"\0\xff",
    "no object": b"[3]",
    "an unknown setting": b'{"modle": {}}',
    "a number for the model": b'{"model": 3}',
}


@pytest.mark.parametrize("damage", [*DAMAGES, "no permission", "a folder without permission"])
def test_a_run_that_cannot_be_read_is_named_beside_the_others(
    empty_folder, capsys, monkeypatch, damage
):
    runs = [make_run(empty_folder / "runs" / name, [3]) for name in ("a", "b", "c")]
    config = runs[1] / "config.json"
    if damage in DAMAGES:
        config.write_bytes(DAMAGES[damage])
    else:
        # For root too, who may read everything.
        method = "read_text" if damage == "no permission" else "exists"
        forbid(monkeypatch, method, "runs/b/config.json")
    assert main(["runs", "--json"]) == 4
    printed = capsys.readouterr()
    assert [run["run"] for run in json.loads(printed.out)["runs"]] == ["runs/a", "runs/c"]
    (line,) = printed.err.splitlines()
    assert line.startswith("jaxformer: runs/b/config.json cannot be read: ")
    assert line.count("config.json") == 1
    assert "Errno" not in line
    assert main(["runs"]) == 4
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["runs", "runs/a", "runs/b"]) == 4
    assert capsys.readouterr().out == ""


def forbid(monkeypatch, method, name):
    """Lets a method of paths fail for one file, as it does where that may not be read."""
    real = getattr(pathlib.Path, method)

    def forbidden(path, *arguments, **options):
        if str(path) == name:
            raise PermissionError(13, "Permission denied", name)
        return real(path, *arguments, **options)

    monkeypatch.setattr(pathlib.Path, method, forbidden)


def test_two_runs_are_compared(tmp_path, capsys):
    model = CONFIG.model.replace(num_layers=CONFIG.model.num_layers + 1)
    first = make_run(tmp_path / "first", [3, 2])
    second = make_run(tmp_path / "second", [2, 1], seed=CONFIG.seed + 1, model=model)
    found = run_json(capsys, first, second)
    assert found["different_settings"] == {
        "seed": [CONFIG.seed, CONFIG.seed + 1],
        "num_layers": [CONFIG.model.num_layers, model.num_layers],
    }
    assert main(["runs", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "num_layers" in printed
    assert "d_model" not in printed
    assert main(["runs", str(first), str(make_run(tmp_path / "third"))]) == 0
    assert "all settings are equal" in capsys.readouterr().out


def test_losses_are_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    first, second = make_run(tmp_path / "a", [3, 2]), make_run(tmp_path / "b")
    out = tmp_path / "pictures" / "losses.svg"
    assert main(["runs", str(first), str(second), "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"{out}\n")
    assert "optimizer step" in out.read_text() or out.stat().st_size > 5000


def test_the_commands_of_the_page_run(empty_folder):
    pytest.importorskip("matplotlib")
    page = (ROOT / "docs" / "guides" / "training.md").read_text(encoding="utf-8")
    commands = re.search(r"## Runs side by side\n\n```sh\n(.*?)```", page, re.DOTALL)[1]
    for name in ("nano", "novel"):
        make_run(empty_folder / "runs" / name, [2, 1])
    for command in commands.splitlines():
        assert main(shlex.split(command, comments=True)[1:]) == 0
    assert (empty_folder / "losses.svg").exists()


def test_what_is_no_run_is_rejected(tmp_path, refuse):
    (tmp_path / "empty").mkdir()
    refuse(["runs"], 2, "runs is no folder")
    refuse(["runs", tmp_path / "empty"], 2, "there is no run in it")
    refuse(["runs", tmp_path / "empty", "--out", "a.txt"], 2, "--out must end in .png")
    damaged = make_run(tmp_path / "damaged")
    (damaged / "config.json").write_text("{")
    refuse(["runs", damaged], 4, "config.json cannot be read")
