"""``train.py --init-from``: a run that starts from a ported model, and from its optimizer."""

import dataclasses
import json
import shutil
import types

import numpy as np
import pytest
import torch

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.config import TransformerLMConfig
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import fine_tuning
from jaxformer.training.run_folder import stored_config
from parity_tests.families import nanogpt
from tests.support.memory import run_python

TEXT = "the quick brown fox jumps over the lazy dog. " * 40
VOCABULARY = sorted(set(TEXT) | {"Z"})
SETTINGS = {
    "n_layer": 2, "n_head": 3, "n_embd": 24, "block_size": 16, "bias": True,
    "vocab_size": len(VOCABULARY), "dropout": 0.0,
}  # fmt: skip
FLAGS = [
    "--devices", "1", "--batch-size", "4", "--sample-tokens", "5", "--eval-interval", "50",
    "--seed", "3",
]  # fmt: skip


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.fixture
def checkpoint(tmp_path):
    """nanoGPT's ckpt.pt after three steps, its vocabulary beside it."""
    import pickle

    torch.manual_seed(0)
    model = nanogpt.GPT(types.SimpleNamespace(**SETTINGS))
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    ids = torch.tensor([[VOCABULARY.index(c) for c in TEXT[n : n + 17]] for n in range(4)])
    for _ in range(3):
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    folder = tmp_path / "nanogpt"
    folder.mkdir()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": SETTINGS,
        "iter_num": 3,
        "config": {"learning_rate": 1e-3},
    }
    torch.save(state, folder / "ckpt.pt")
    meta = {
        "vocab_size": len(VOCABULARY),
        "itos": dict(enumerate(VOCABULARY)),
        "stoi": {c: i for i, c in enumerate(VOCABULARY)},
    }
    (folder / "meta.pkl").write_bytes(pickle.dumps(meta))
    return folder / "ckpt.pt"


def run(*arguments):
    return main(["train", *map(str, arguments)])


def newest(out):
    folder = CheckpointFolder(out / "checkpoints")
    return folder.restore(folder.steps()[-1])


def first_saved(out):
    folder = CheckpointFolder(out / "checkpoints")
    return folder.restore(folder.steps()[0])


@pytest.mark.tier("full")
def test_a_run_continues_with_the_weights_moments_and_step_of_a_checkpoint(
    checkpoint, text, tmp_path
):
    out = tmp_path / "run"
    assert run("--init-from", checkpoint, "--data", text, "--steps", 6, "--out", out, *FLAGS) == 0
    arrays, manifest = first_saved(out)
    assert int(arrays["step"]) == 3
    assert manifest["vocabulary"] == "".join(VOCABULARY)
    assert manifest["init_from"] == str(checkpoint)
    saved = torch.load(checkpoint, weights_only=True)
    source = saved["model"]["transformer.h.1.mlp.c_fc.weight"].numpy()
    np.testing.assert_array_equal(
        arrays["parameters"]["blocks.1.feed_forward.up_proj.kernel"], source.T
    )
    assert max(float(np.abs(m).max()) for m in arrays["mu"].values()) > 0
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").open()]
    assert steps[0] == 3
    assert max(steps) == 6


@pytest.mark.tier("full")
def test_weights_alone_begin_at_step_0(checkpoint, text, tmp_path):
    out = tmp_path / "run"
    flags = ["--fresh-optimizer", "--steps", 2, *FLAGS]
    assert run("--init-from", checkpoint, "--data", text, "--out", out, *flags) == 0
    arrays, _ = first_saved(out)
    assert int(arrays["step"]) == 0
    assert all(not np.any(m) for m in arrays["mu"].values())


@pytest.mark.tier("full")
def test_cut_and_resumed_it_is_the_run_uncut(checkpoint, text, tmp_path):
    for name, counts in (("whole", [8]), ("cut", [5, 8])):
        for n, steps in enumerate(counts):
            start = ["--resume"] if n else ["--init-from", checkpoint, "--data", text]
            flags = FLAGS if not n else []
            decay = ["--decay-steps", 8]
            assert run(*start, "--steps", steps, "--out", tmp_path / name, *flags, *decay) == 0
    whole, cut = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert whole[1]["state_sha256"] == cut[1]["state_sha256"]
    assert cut[1]["init_from"] == str(checkpoint)


@pytest.mark.tier("full")
def test_sampling_and_starting_again_from_the_run(checkpoint, text, tmp_path, capsys):
    out = tmp_path / "run"
    assert run("--init-from", checkpoint, "--data", text, "--steps", 4, "--out", out, *FLAGS) == 0
    capsys.readouterr()
    assert main(["sample", str(out), "--prompt", "Z", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("Z")
    again = tmp_path / "again"
    assert run("--init-from", out, "--data", text, "--steps", 6, "--out", again, *FLAGS) == 0
    assert int(first_saved(again)[0]["step"]) == 4


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--steps", "3"], 2, "3 steps behind it"),
        (["--resume"], 2, "leave out --init-from"),
        (["--d-model", "48"], 2, "--d-model 48 contradicts the model in "),
        (["--num-layers", "3"], 2, ", which has num_layers 2: leave it out"),
    ],
)
def test_what_cannot_work_is_rejected(checkpoint, text, tmp_path, capsys, flags, code, words):
    out = tmp_path / "run"
    arguments = ["--init-from", checkpoint, "--data", text, "--out", out, *FLAGS, *flags]
    assert run(*arguments) == code
    assert words in capsys.readouterr().err
    assert not out.exists()


def test_what_only_a_port_takes_is_left_to_it(text, tmp_path, capsys):
    torch.save({"a.weight": torch.zeros(3, 5)}, tmp_path / "other.pt")
    out = tmp_path / "run"
    assert run("--init-from", tmp_path / "other.pt", "--data", text, "--out", out, *FLAGS) == 2
    said = capsys.readouterr().err
    expected = f"port {tmp_path / 'other.pt'} DIR --dialect D --config config.json"
    assert "These are flags of jaxformer port: run " in said
    assert f"{expected} first, and start from DIR" in said
    assert not out.exists()


def test_a_text_with_other_characters_is_rejected(checkpoint, tmp_path, capsys):
    other = tmp_path / "other.txt"
    other.write_text(TEXT + "é")
    flags = ["--steps", 6, "--out", tmp_path / "run", *FLAGS]
    assert run("--init-from", checkpoint, "--data", other, *flags) == 3
    said = capsys.readouterr().err
    assert said.endswith("not among the 29 of the model: 'é' (U+00E9)\n")


@pytest.mark.tier("full")
def test_a_run_is_not_resumed_from_drawn_weights(checkpoint, text, tmp_path, capsys):
    """Before its first save it holds nothing of the weights that it started from."""
    out = tmp_path / "run"
    flags = ["--data", text, "--out", out, *FLAGS, "--fresh-optimizer", "--sample-tokens", 0]
    assert run("--init-from", checkpoint, *flags, "--num-heads", 2, "--steps", 1) == 0
    shown = capsys.readouterr().out
    assert f"num_heads 3 -> 2: the model is not that of {checkpoint}" in shown
    assert run("--resume", "--out", out, "--steps", 2) == 0
    shutil.rmtree(out / "checkpoints")
    capsys.readouterr()
    before = (out / "metrics.jsonl").read_bytes()
    assert run("--resume", "--out", out, "--steps", 3) == 4
    said = capsys.readouterr().err
    assert said.endswith(f"start a new run with --init-from {checkpoint}\n")
    assert (out / "metrics.jsonl").read_bytes() == before


@pytest.mark.tier("full")
def test_meta_names_the_vocabulary_and_weights_alone_are_trained_gently(
    checkpoint, text, tmp_path, capsys
):
    """nanoGPT keeps meta.pkl in its data folder, beside no checkpoint."""
    meta = checkpoint.with_name("meta.pkl").rename(tmp_path / "meta.pkl")
    flags = ["--fresh-optimizer", "--steps", 1, "--out", tmp_path / "run", *FLAGS]
    arguments = ["--init-from", checkpoint, "--data", text, *flags]
    assert run(*arguments) == 2
    assert "--meta" in capsys.readouterr().err
    assert run(*arguments, "--meta", meta) == 0
    config = stored_config(tmp_path / "run")
    assert config.optimizer.learning_rate == 5e-5
    assert config.window == SETTINGS["block_size"]


def test_a_window_of_fine_tuning_is_bounded():
    model = TransformerLMConfig(d_model=8, num_heads=2, num_layers=1, context_length=131_072)
    assert fine_tuning(TrainConfig(model=model)).window == 1024
    # One that has all of a model's context follows it where the user shortens it.
    short = fine_tuning(TrainConfig(model=model.replace(context_length=96)))
    assert dataclasses.replace(short, model=short.model.replace(context_length=16)).window == 16


def test_a_port_without_a_vocabulary_says_so(checkpoint, tmp_path, capsys):
    checkpoint.with_name("meta.pkl").unlink()
    assert main(["port", str(checkpoint), str(tmp_path / "model")]) == 0
    assert "vocabulary   unknown: name a meta.pkl" in capsys.readouterr().err


DEVICES = """
import contextlib, io, os
from jaxformer.cli.main import main
os.cpu_count = lambda: 2
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main(["plan", "--json", *sys.argv[1:]]) == 0
print(json.loads(out.getvalue())["devices"])
"""


@pytest.mark.parametrize(("flags", "devices"), [([], 2), (["--devices", 1], 1)])
def test_a_run_that_starts_from_another_is_spread_over_the_cores_as_any_other(
    whole, whole_text, monkeypatch, flags, devices
):
    """Its weights are read before it is known how many devices it wants."""
    monkeypatch.delenv("XLA_FLAGS")
    arguments = ["--init-from", whole, "--fresh-optimizer", "--data", whole_text, *flags]
    assert run_python(DEVICES, *arguments) == devices
