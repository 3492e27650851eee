"""The language models of models that see: ported alone, and said so."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.porting.api import from_torch
from tests.support.hugging_face.building import build, randomize
from tests.support.hugging_face.multimodal import CASES, SIGHT
from tests.support.hugging_face.running import tokens
from tests.support.ported import port
from tests.support.tiers import full_except

# What files call the parts, as transformers 4 did, and what they are called in memory.
NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}
FIRST = ("gemma3", "llava", "mistral3 window untied")


def save(name, folder):
    """Saves the model of a case with random weights, and returns it."""
    case = CASES[name]
    source = randomize(build(case.kind, case.settings)).float()
    source.save_pretrained(folder)
    return source


@pytest.mark.parametrize("name", full_except(CASES, lambda name: name == "gemma3"))
def test_a_folder_becomes_that_of_its_language_model(name, tmp_path, capsys):
    source = save(name, tmp_path / "first")
    arguments = ["port", str(tmp_path / "first"), str(tmp_path / "back"), "--to", "hf"]
    capsys.readouterr()
    assert main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"of {CASES[name].dialect} only the language model is ported" in error
    listed = error.partition("(")[2].partition(")")[0].split(", ")
    assert "--ignore" in error
    assert main([*arguments, "--ignore", *listed]) == 0
    assert "left out" in capsys.readouterr().err
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    cls = getattr(transformers, config["architectures"][0])
    back, info = cls.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    ids = torch.as_tensor(tokens())
    assert torch.equal(back.eval()(ids).logits, source(ids).logits)


@pytest.mark.parametrize("name", full_except(FIRST, lambda name: name == "llava"))
def test_names_in_files_and_in_memory_are_read(name, tmp_path):
    source = save(name, tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    in_file = load_file(file)
    in_memory = {
        new + key.removeprefix(old): array
        for key, array in in_file.items()
        for old, new in NAMES.items()
        if key.startswith(old)
    }
    assert in_memory.keys() <= source.state_dict().keys()
    ported = []
    for arrays in (in_file, in_memory):
        save_file(arrays, file, {"format": "pt"})
        target = tmp_path / f"{len(ported)}.safetensors"
        port(tmp_path / "hf", target, "--ignore", "*vision_tower.*", "*multi_modal_projector.*")
        ported.append(load_file(target))
    first, second = ported
    assert first.keys() == second.keys()
    assert all(torch.equal(array, second[key]) for key, array in first.items())


def test_a_setting_of_the_whole_that_is_not_known_is_rejected():
    case = CASES["llava"]
    source = build(case.kind, case.settings)
    settings = {**source.config.to_dict(), "text_gate": 2.0}
    with pytest.raises(UsageError, match=r"text_gate=2\.0"):
        from_torch(source.state_dict(), config=settings, ignore=SIGHT)
    with pytest.raises(UsageError, match="the text_config of llava must be an object: got None"):
        from_torch(source.state_dict(), config={**settings, "text_config": None}, ignore=SIGHT)
