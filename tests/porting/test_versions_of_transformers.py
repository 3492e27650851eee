"""Exported folders load strictly in the newest transformers 4 and 5, and compute the same there.

transformers 4 lives in an environment of its own: ``TRANSFORMERS_4`` names its Python, or uv makes
one.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from jaxformer.porting.dialects import HUGGING_FACE
from tests.support.hugging_face import load_folder
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.running import pair_images, read_by, run_source, target_part, tokens
from tests.support.ported import port
from tests.support.tiers import FULL, SLOW

SCRIPT = Path(load_folder.__file__)
ISOLATED = [
    "uv",
    "run",
    "--isolated",
    "--no-project",
    "--with",
    "transformers<5",
    "--with",
    "torch",
]


def export(name, folder):
    """Ports the model of a case to a folder, by way of jaxformer's own names."""
    case = CASES[name]
    source = randomize(build_case(case), copies=case.copies).float()
    first, ported, back = folder / "first", folder / "ported.safetensors", folder / "back"
    source.save_pretrained(first)
    port(first, ported)
    port(ported, back, "--as", case.dialect, "--to", "hf")
    ids = tokens(8)
    np.save(back / "ids.npy", read_by(source, ids))
    if case.hears:
        np.save(back / "target.npy", target_part(ids))
    if case.is_pair:
        np.save(back / "images.npy", pair_images(source.config.vision_config, ids))
    (back / "attention.txt").write_text(case.attention)
    with torch.no_grad():
        return back, run_source(source, ids, is_masked=False)[0].double().numpy()


def names_in(folder):
    with safe_open(folder / "model.safetensors", "np") as file:
        return set(file.keys())


def check(command, folders, expected, version, rounded=None):
    """Runs the script on folders, and compares what they compute."""
    run = subprocess.run([*command, SCRIPT, *folders], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.strip().startswith(version)
    compare_outputs(folders, expected, rounded)


def compare_outputs(folders, expected, rounded=None):
    """Compares all folders; those that are ``rounded`` have another tolerance, by their names."""
    wrong = {}
    for folder, outputs in zip(folders, expected, strict=True):
        difference = np.abs(np.load(folder / "outputs.npy") - outputs).max() / np.abs(outputs).max()
        # Other versions order float32 sums otherwise.
        if not difference < (rounded or {}).get(folder.parent.name, 2e-4):
            wrong[folder.parent.name] = float(difference)
    assert not wrong, wrong


@FULL
def test_names_are_those_that_every_version_reads(tmp_path):
    first, outputs_of_first = export("gpt_neox", tmp_path / "gpt_neox")
    assert "embed_out.weight" in names_in(first)
    assert "lm_head.weight" not in names_in(first)
    second, outputs_of_second = export("bert masked untied", tmp_path / "bert")
    assert {"cls.predictions.bias", "cls.predictions.decoder.bias"} <= names_in(second)
    check([sys.executable], [first, second], [outputs_of_first, outputs_of_second], "5.")


# test_hugging_face_folders.py loads the folders of all cases by the class of the case; here it is
# the class that config.json names. The first case of each file of dialects runs in the full tier.
FIRST = {HUGGING_FACE[case.dialect]: name for name, case in reversed(CASES.items())}.values()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=FULL if name in FIRST else SLOW) for name in CASES]
)
def test_a_folder_loads_strictly_in_transformers_5(name, tmp_path):
    if name.endswith("no pooler"):
        pytest.skip("transformers always makes a pooler unless the caller says otherwise")
    folder, expected = export(name, tmp_path)
    load_folder.run(folder)
    compare_outputs([folder], [expected])


# What transformers 4 does not have: OLMo 2's llama3, proportional, two bases in OLMo 3, windows in
# some layers of Qwen 2 with experts, and other limits in gpt-oss.
NOT_IN_4 = (
    "olmo2 biases tied head_dim", "llama proportional", "olmo3 bases biases tied head_dim",
    "qwen2_moe windows normalised tied", "gpt_oss body limits",
    # Its loop counts other layers than there are, and its rotary positions are never scaled.
    "albert groups untied relu", "modernbert biases untied scaled",
    # It gives experts of other groups a 0 for the choice, which is more than a negative score.
    "deepseek_v3 plain queries halves biases tied",
)  # fmt: skip
# transformers 4 keeps xIELU's two numbers in bfloat16, and rounds what it makes of them once more:
# up to 2^-8 of what each of the two layers adds.
ROUNDED_IN_4 = {name: 2 * 2.0**-8 for name, case in CASES.items() if case.dialect == "apertus"}


@pytest.mark.tier("slow")
def test_all_folders_load_strictly_in_transformers_4(tmp_path):
    command = [os.environ["TRANSFORMERS_4"]] if "TRANSFORMERS_4" in os.environ else ISOLATED
    if command is ISOLATED and shutil.which("uv") is None:
        pytest.skip("there is no uv to make an environment with transformers 4")
    names = [n for n in CASES if not n.endswith("no pooler") and n not in NOT_IN_4]
    made = [export(name, tmp_path / name.replace(" ", "_")) for name in names]
    folders, expected = [folder for folder, _ in made], [outputs for _, outputs in made]
    rounded = {name.replace(" ", "_"): tolerance for name, tolerance in ROUNDED_IN_4.items()}
    check(command, folders, expected, "4.", rounded)
