"""The dialects of Hugging Face: folders go through ``jaxformer port`` and come back the same."""

import json

import pytest
import torch

from jaxformer.porting.dialects import HUGGING_FACE
from jaxformer.porting.formats.safetensors_files import read_safetensors
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.folders import different_settings, load, round_trip
from tests.support.hugging_face.proof import Proof
from tests.support.hugging_face.running import bits_of, run_source, tokens
from tests.support.tiers import SLOW, full_except
from tests.support.verified import changed, verify

# The default tier has a folder of each way to pack arrays, the full tier one of each file of
# dialects. Arrays and settings of each type go there and back in test_hugging_face_arrays.py.
FEW = ("gpt2", "llama", "gpt_neox", "bert masked")
FIRST_OF_FILE = {
    HUGGING_FACE[case.dialect]: name for name, case in reversed(CASES.items())
}.values()
NAMES = full_except(
    full_except(CASES, lambda name: name in FEW or name in FIRST_OF_FILE, SLOW),
    lambda name: name in FEW,
)
# Classes of CLIP's and SigLIP's halves whose names begin otherwise in transformers 4.
WITHOUT_START = ("CLIPVisionModel", "CLIPTextModel", "SiglipTextModel", "SiglipVisionModel")
# Of each type the first case, in any order of names.
PLAINEST = list({case.dialect: name for name, case in reversed(CASES.items())}.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_comes_back_the_same(name, tmp_path):
    case, trip = CASES[name], round_trip(Proof(name), tmp_path)
    back = load(case, trip.back)
    assert bits_of(back.state_dict()) == bits_of(trip.source.state_dict())
    assert different_settings(trip.source.config, back.config, case.without_effect) == {}
    assert torch.equal(run_source(back, tokens())[0], run_source(trip.source, tokens())[0])
    back.save_pretrained(tmp_path / "again")
    first, again = (
        (f / "model.safetensors").read_bytes() for f in (trip.folder, tmp_path / "again")
    )
    # transformers 5 writes other starts of names than 4, and those of what it has read.
    assert again == first or case.kind in WITHOUT_START


# Of squared ReLUs of large random weights verify says, rightly, that they amplify rounding: about
# tenfold in Nemotron's first block, where it calls eight times amplified. The scores of T5, not
# scaled, do so too, DINOv2's few classes and
# SigLIP's one vector. No other model does.
AMPLIFYING = ("nemotron", "t5", "mt5", "umt5", "dinov2", "siglip vision", "siglip")


# One type of each kind of model stands in full, the others in slow.
KINDS = ("gpt2", "llama", "olmoe", "deberta-v2", "umt5", "dinov2", "siglip")


@pytest.mark.parametrize(
    "name",
    full_except(
        full_except(PLAINEST, lambda name: name in KINDS, SLOW), lambda name: name == "gpt2"
    ),
)
def test_verify_sees_no_difference_and_one_wrong_setting(name, tmp_path):
    trip = round_trip(Proof(name), tmp_path)
    few = ("--mode", "forward", "--length", 16)
    code, lines = verify(trip.folder, trip.file, *few)
    equal = ["equal (rounding)", *(["equal (amplified)"] if name in AMPLIFYING else [])]
    assert code == 0, lines
    assert lines[-1] in equal, lines
    record = json.loads(read_safetensors(trip.file)[1]["jaxformer"])
    # Of a pair that of either model.
    known = {n: v for n, v in record["config"].items() if n.rpartition(".")[2] == "norm_eps"}
    # BERT's is 1e-12, of which three times as much changes nothing.
    eps = {name: max(3 * value, 1e-6) for name, value in known.items()}
    wrong = changed(trip.file, tmp_path / "wrong.safetensors", config=eps)
    code, lines = verify(trip.folder, wrong, *few)
    assert code == 1
    assert lines[-1].startswith("bug: ")
    assert "its eps is" in lines[-1]
