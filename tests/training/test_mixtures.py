"""Training on several folders at once: their shares, validation, resuming, what is rejected."""

import json

import numpy as np
import pytest

from jaxformer.cli.main import main
from tests.support.folders_of_tokens import write_folder
from tests.support.several import fresh, run
from tests.support.tiny import TINY, losses, manifest, records, resume
from tests.support.tokens import SIZE, tokenizer

V = 40


def write_source(path, first, *, length=600, **more):
    """Ids that follow each other, from a part of the vocabulary."""
    ids = first + np.arange(length) % 17
    documents = {"train": range(0, length, 13), "val": range(0, 60, 13)}
    splits = {"train": ids, "val": ids[:60]}
    settings = {"vocab_size": V, "documents": documents, **more}
    return write_folder(path, splits, **settings)


@pytest.fixture
def sources(tmp_path):
    paths = [write_source(tmp_path / name, first) for name, first in (("a", 0), ("b", 20))]
    return ["--data", f"{paths[0]}:0.75", f"--data={paths[1]}:0.25"]


def arguments(sources, out, *more):
    return ["train", *sources, "--out", str(out), *TINY, *map(str, more)]


@pytest.mark.parametrize("flags", [["--sampling", "epoch", "--packing"], []])
@pytest.mark.tier("full")
def test_a_mixture_is_cut_and_resumed(sources, tmp_path, flags, capsys):
    flags = [*flags, "--decay-steps", 20, "--sample-tokens", 0]
    assert main(arguments(sources, tmp_path / "whole", "--steps", 20, *flags)) == 0
    shown = capsys.readouterr().out
    assert main(arguments(sources, tmp_path / "cut", "--steps", 7, *flags)) == 0
    assert resume(tmp_path / "cut", "--steps", 20) == 0
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    states = [manifest(tmp_path / name, 20)["state_sha256"] for name in ("cut", "whole")]
    assert states[0] == states[1]
    found = next(r for r in records(tmp_path / "whole") if "val_loss" in r)
    names = [str(tmp_path / name) for name in "ab"]
    parts = [found[f"val_loss/{name}"] for name in names]
    assert not any("bits_per_byte" in key for key in found)
    assert found["val_loss"] == pytest.approx(0.75 * parts[0] + 0.25 * parts[1], rel=1e-12)
    assert all(
        f"{name}: {part:.4f} nats/token" in shown for name, part in zip(names, parts, strict=True)
    )
    # Three of four rows are of the first source, which is learned sooner.
    assert parts[0] < parts[1]


@pytest.mark.tier("slow")
def test_processes_read_the_mixture_of_one(sources, tmp_path):
    flags = ["--sample-tokens", 0, "--eval-batch-size", 64, "--steps", 5]
    assert main(arguments(sources, tmp_path / "one", *flags, "--devices", 4)) == 0
    several = fresh("unused", tmp_path / "several", *flags)
    at = several.index("--data")
    run(2, 2, "train", *sources, *several[1:at], *several[at + 2 :])
    expected, found = losses(tmp_path / "one"), losses(tmp_path / "several")
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.tier("full")
def test_each_source_is_scored_in_bits_per_byte(tmp_path):
    """And the mixture by the bytes and nats of a token of it, on average."""
    scales = {"a": 2.0, "b": 5.0}
    for name, scale in scales.items():
        path = write_source(tmp_path / name, 0)
        index = json.loads((path / "index.json").read_text())
        index["splits"]["val"]["bytes"] = round(60 * scale)
        (path / "index.json").write_text(json.dumps(index))
    sources = [w for name in scales for w in ("--data", f"{tmp_path / name}:{ord(name) - 96}")]
    assert main(arguments(sources, tmp_path / "run", "--steps", 2)) == 0
    found = records(tmp_path / "run")[-1]
    for name, scale in scales.items():
        path = tmp_path / name
        expected = found[f"val_loss/{path}"] / np.log(2) / scale
        assert found[f"val_bits_per_byte/{path}"] == pytest.approx(expected)
    assert found["val_bits_per_byte"] == pytest.approx(found["val_loss"] / np.log(2) / 4)


def test_folders_of_other_tokenizers_are_rejected(refuse, tmp_path):
    paths = []
    for name, kind in (("a", "gpt2"), ("b", "llama")):
        paths.append(write_source(tmp_path / name, 0, vocab_size=SIZE))
        tokenizer(kind).save(str(paths[-1] / "tokenizer.json"))
    sources = [word for path in paths for word in ("--data", f"{path}:1")]
    refuse(arguments(sources, "out"), 3, "cannot be mixed", "made by different tokenizers")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (["a:0.5", "b"], "--data b has no share"),
        (["a", "b"], "--data a has no share"),
        (["a:0.5", "b:0"], "shares of data must be positive"),
        (["a:1", "b:1e-9"], "--data b:1e-9 has no share that is a plain number"),
        (["a:1", "b:0.000001"], "a share must be at least"),
    ],
)
def test_shares_that_are_none_are_rejected(refuse, tmp_path, monkeypatch, data, reason):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        write_source(tmp_path / name, 0)
    refuse(arguments([word for one in data for word in ("--data", one)], "out"), 2, reason)
