"""The language models of models that see: ported alone, and said so."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from jaxformer.cli.main import main
from jaxformer.errors import UsageError
from jaxformer.porting.api import from_torch
from tests.support.hugging_face.folders import change_config
from tests.support.hugging_face.multimodal import CASES, SIGHT
from tests.support.hugging_face.running import build, randomize, tokens
from tests.support.ported import port
from tests.support.tiers import full_except

# What transformers 4 called the parts.
OLD_NAMES = {
    "model.language_model.": "language_model.model.",
    "lm_head.": "language_model.lm_head.",
    "model.vision_tower.": "vision_tower.",
    "model.multi_modal_projector.": "multi_modal_projector.",
}


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


@pytest.mark.parametrize("name", ["gemma3", "llava", "mistral3 window untied"])
def test_names_of_transformers_4_are_read(name, tmp_path):
    save(name, tmp_path / "new")
    ignored = [pattern.removeprefix("model.") for pattern in SIGHT]
    port(tmp_path / "new", tmp_path / "new.safetensors", "--ignore", *SIGHT)
    arrays = load_file(tmp_path / "new" / "model.safetensors")
    for new, old in OLD_NAMES.items():
        arrays = {
            old + key.removeprefix(new) if key.startswith(new) else key: array
            for key, array in arrays.items()
        }
    save_file(arrays, tmp_path / "new" / "model.safetensors", {"format": "pt"})
    change_config(tmp_path / "new", transformers_version="4.50.0")
    port(tmp_path / "new", tmp_path / "old.safetensors", "--ignore", *ignored)
    old, new = (load_file(tmp_path / f"{age}.safetensors") for age in ("old", "new"))
    assert old.keys() == new.keys()
    assert all(torch.equal(array, new[key]) for key, array in old.items())


def test_a_setting_of_the_whole_that_is_not_known_is_rejected():
    case = CASES["llava"]
    source = build(case.kind, case.settings)
    settings = {**source.config.to_dict(), "text_gate": 2.0}
    with pytest.raises(UsageError, match=r"text_gate=2\.0"):
        from_torch(source.state_dict(), config=settings, ignore=SIGHT)
    with pytest.raises(UsageError, match="the text_config of llava must be an object: got None"):
        from_torch(source.state_dict(), config={**settings, "text_config": None}, ignore=SIGHT)
