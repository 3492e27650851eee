"""The examples run offline, and say what they promise."""

import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT
from tests.support.quick_compiling import flags_for_devices
from tests.support.tokens import corpus

EXAMPLES = ROOT / "examples"
# Arguments that make an example quick, and what it must say.
RUNS = {
    "train_tiny_shakespeare.py": ("--data text.txt --steps 3", "report.html"),
    "port_your_nanogpt.py": ("--data text.txt --steps 3", "ckpt.pt"),
    "finetune_lora.py": ("--data text.txt --steps 3", "adapters added to its weights"),
    "port_hugging_face.py": ("", "compared with transformers: rounding"),
    "custom_attention_with_twin.py": ("", "cosine_attention: rounding"),
    "train_classifier.py": ("--steps 3", "scores differ from transformers' by "),
}
# What the examples must also have said, beside the first.
MORE = {
    "train_tiny_shakespeare.py": ("<TrainResult: runs/shakespeare, 3 steps, training loss",),
    "port_your_nanogpt.py": ("<Model: TransformerLM", "back in nanoGPT's form: runs/nanogpt/back"),
    "finetune_lora.py": ("for peft: runs/lora/adapter",),
    "port_hugging_face.py": ("the same greedy text: True", "the same bits back: True"),
    "custom_attention_with_twin.py": ("with_bug: bug", "custom_attention_with_twin.py"),
    "train_classifier.py": ("step 3: loss ", "of 256 lines"),
}


def python(folder, *arguments):
    # A newcomer has one device.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags_for_devices(1)}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_tried():
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(RUNS)
    for path in EXAMPLES.rglob("*.py"):
        assert path.read_text("utf-8").startswith('"""')


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", RUNS)
def test_the_example_runs(empty_folder, name):
    (empty_folder / "text.txt").write_text(corpus()[:60_000], encoding="utf-8")
    arguments, words = RUNS[name]
    out = python(empty_folder, EXAMPLES / name, *arguments.split())
    for expected in (words, *MORE.get(name, ())):
        assert expected in out


@pytest.mark.tier("full")
def test_parity_in_ci_passes_and_finds_a_bug(empty_folder):
    """Copies the example, so that pytest finds no settings of this project."""
    for path in (EXAMPLES / "verify_in_ci").iterdir():
        if path.is_file():
            (empty_folder / path.name).write_bytes(path.read_bytes())
    pytest_ = ("-m", "pytest", "-q", "--rootdir", ".")
    out = python(empty_folder, *pytest_, "--parity-html", "parity", "test_parity.py")
    assert "1 passed" in out
    assert len(list((empty_folder / "parity").glob("*.html"))) == 1
    model = empty_folder / "model.py"
    model.write_text(model.read_text("utf-8").replace("approximate=False", "approximate=True"))
    with pytest.raises(AssertionError):
        python(empty_folder, *pytest_, "test_parity.py")


@pytest.mark.tier("slow")
def test_the_examples_are_typed():
    """mypy is clean on what a user would copy; tests/api tries pyright.

    CI runs the same command.
    """
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*mypy, "--explicit-package-bases", *EXAMPLES.glob("*.py")],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
