"""The decoders of encoder-decoders alone: a language model, without an attention nothing uses.

Outputs, gradients and texts are compared in ``test_hugging_face``.
"""

import json
import math

import pytest
import torch
import transformers
from safetensors.torch import load_file

from jaxformer.cli.main import main
from jaxformer.porting.api import from_torch, to_torch
from jaxformer.transformer_lm import TransformerLM
from tests.support.hugging_face.building import build_case, randomize
from tests.support.hugging_face.cases import ALL_CASES
from tests.support.hugging_face.running import bits_of, difference, run_source, run_target, tokens
from tests.support.ported import port
from tests.support.tiers import full_except

NAMES = [name for name in ALL_CASES if name.endswith("decoder")]
UNUSED = "*.encoder_attn*"


def used(arrays):
    return {name: array for name, array in arrays.items() if ".encoder_attn" not in name}


@pytest.mark.parametrize("name", full_except(NAMES, lambda name: name == "bart decoder"))
def test_a_folder_goes_there_and_back_without_what_is_not_used(name, tmp_path, capsys):
    case = ALL_CASES[name]
    source = randomize(build_case(case)).float()
    source.save_pretrained(tmp_path / "first")
    arguments = ["port", str(tmp_path / "first"), str(tmp_path / "run"), "--to", "jax"]
    capsys.readouterr()
    assert main(arguments) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert f"{case.kind} holds an attention to a source, and uses it nowhere" in error
    assert f"leave out '{UNUSED}' with --ignore" in error
    assert main([*arguments, "--ignore", UNUSED]) == 0
    port(tmp_path / "run", tmp_path / "back", "--to", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == [case.kind]
    before, after = (load_file(tmp_path / n / "model.safetensors") for n in ("first", "back"))
    assert bits_of(used(before)) == bits_of(after)
    back, info = getattr(transformers, case.kind).from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    # transformers draws those that it does not use.
    assert all(".encoder_attn" in key for key in info.pop("missing_keys"))
    assert not any(info.values()), info
    ids = torch.as_tensor(tokens())
    with torch.no_grad():
        assert torch.equal(back.eval()(ids).logits, source.eval()(ids).logits)


@pytest.mark.tier("full")
@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "changed",
    [
        {"scale_embedding": True},
        {"activation_function": "relu"},
        {"decoder_attention_heads": 2},
    ],
    ids=str,
)
def test_a_wrong_setting_is_seen(name, changed):
    case = ALL_CASES[name]
    if case.dialect == "whisper" and "scale_embedding" in changed:
        pytest.skip("the class computes this factor, and does not use it")
    source = randomize(build_case(case))
    config = {**source.config.to_dict(), "class": case.kind}
    target = from_torch(source, config=config, ignore=[UNUSED])
    assert type(target) is TransformerLM
    ids = tokens(3, (2, 41))
    expected = run_source(source, ids)[0].detach()
    assert difference(run_target(target, ids)[0], expected) < 1e-5
    assert bits_of(to_torch(target)) == bits_of(used(source.state_dict()))
    wrong = from_torch(source.state_dict(), config={**config, **changed}, ignore=[UNUSED])
    found = difference(run_target(wrong, ids)[0], expected)
    assert math.isfinite(found)
    assert found > 1e-4
