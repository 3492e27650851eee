"""``config.toml`` of a run, and ``train.py --config``."""

import dataclasses
import json

import pytest

from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.training.config_files import read_toml, to_toml
from jaxformer.training.presets import PRESETS, nano
from tests.support.tiny import DROPOUT, losses, manifest, train


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_written_is_read_back_over_any_preset(tmp_path, name):
    config = PRESETS[name]()
    optimizer = dataclasses.replace(config.optimizer, clip_norm=None)
    config = dataclasses.replace(config, optimizer=optimizer, data='a "text"\n.txt', remat="none")
    (tmp_path / "x.toml").write_text(to_toml(config), encoding="utf-8")
    assert read_toml(tmp_path / "x.toml", nano()) == config
    assert read_toml(tmp_path / "x.toml", PRESETS["llama-70b"]()) == config


def test_a_file_by_hand_changes_what_it_names(tmp_path):
    (tmp_path / "x.toml").write_text(
        'steps = 7\n[model]\npositions = "none"\n[model.attention]\nnum_heads = 2\n'
        "[optimizer]\nlearning_rate = 1\n",
        encoding="utf-8-sig",
    )
    found, base = read_toml(tmp_path / "x.toml", nano()), nano()
    assert found.steps == 7
    assert found.model == base.model.replace(positions="none", num_heads=2)
    assert found.optimizer == dataclasses.replace(base.optimizer, learning_rate=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps = ", "is no TOML"),
        ("stepz = 7", "unknown TrainConfig settings: stepz"),
        ("[model]\nheads = 7", "unknown TransformerLMConfig settings: heads"),
        ('steps = "7"', "steps must be int: got '7'"),
        ("model = 7", "must be an object: got int"),
        (None, "No such file"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "x.toml").write_text(text)
    with pytest.raises(UsageError, match=words):
        read_toml(tmp_path / "x.toml", nano())


@pytest.mark.tier("full")
def test_a_runs_own_file_makes_the_same_run(whole, whole_text):
    del whole_text
    assert main(["train", "--config", str(whole / "config.toml"), "--out", "again"]) == 0
    assert losses("again") == losses(whole)
    assert manifest("again", 30)["state_sha256"] == manifest(whole, 30)["state_sha256"]
    text = json.loads((whole / "config.json").read_text())["data"]
    assert train(text, "shorter", *DROPOUT, "--config", whole / "config.toml", "--steps", 5) == 0
    assert max(losses("shorter")) == 5


def test_a_resumed_run_has_its_settings(refuse, whole):
    file = whole / "config.toml"
    refuse(["train", "--out", whole, "--resume", "--config", file], 2, "leave out --config")
