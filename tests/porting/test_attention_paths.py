"""Falcon with ALiBi: transformers' two paths of attention differ, and each is ported as it is."""

import dataclasses
import json

import pytest
import torch
import transformers

from jaxformer.porting.api import from_torch, import_plan
from tests.support.hugging_face.building import build_case, build_exact, randomize
from tests.support.hugging_face.case import VOCAB
from tests.support.hugging_face.cases import CASES
from tests.support.hugging_face.folders import change_config, save_folder
from tests.support.hugging_face.precision import in_float64
from tests.support.hugging_face.running import (
    assert_close,
    difference,
    run_source,
    run_target,
    tokens,
)
from tests.support.ported import port
from tests.support.verified import verify

pytestmark = pytest.mark.usefixtures("float64")
ALIBI = "falcon alibi"


def scale_of(settings):
    case = CASES[ALIBI]
    arrays = build_case(case).state_dict()
    config = {**case.settings, "vocab_size": VOCAB, "model_type": "falcon", **settings}
    plan = import_plan(arrays, config=config)
    return plan.module.config.position.alibi_scale


def test_the_config_names_the_path():
    usual = scale_of({})
    assert usual == scale_of({"attn_implementation": "sdpa"})
    assert 2 * usual == scale_of({"attn_implementation": "eager"})
    assert 2 * usual == scale_of({"_attn_implementation": "eager"})


@pytest.mark.tier("full")
def test_each_path_of_a_module_is_ported_as_it_is():
    ids = tokens(5)
    case = CASES["falcon alibi eager"]
    weights = randomize(build_case(case)).state_dict()
    found = {}
    with in_float64():
        for path in ("eager", "sdpa"):
            source = build_exact(dataclasses.replace(case, attention=path), weights)
            found[path] = run_source(source, ids)[0].detach()
            assert_close(run_target(from_torch(source), ids)[0], found[path], 1e-12)
    assert difference(found["eager"], found["sdpa"]) > 1e-3


def test_a_folder_keeps_the_path_that_it_names(tmp_path):
    first, ported, back = tmp_path / "first", tmp_path / "ported.safetensors", tmp_path / "back"
    save_folder(first, "falcon alibi eager")
    change_config(first, attn_implementation="eager")
    port(first, ported)
    port(ported, back, "--as", "falcon", "--to", "hf")
    assert json.loads((back / "config.json").read_text())["attn_implementation"] == "eager"
    models = [transformers.FalconForCausalLM.from_pretrained(path) for path in (first, back)]
    assert {model.config._attn_implementation for model in models} == {"eager"}
    with torch.no_grad():
        outputs = [run_source(model.eval(), tokens(5))[0] for model in models]
    assert torch.equal(*outputs)


@pytest.mark.tier("full")
@pytest.mark.parametrize("path", ["eager", "sdpa"])
def test_verify_runs_the_path_that_the_folder_names(path, tmp_path):
    folder, ported = tmp_path / "folder", tmp_path / "ported.safetensors"
    # Alibi weighs what the weights of a new model hardly do.
    randomize(build_case(CASES["falcon alibi eager"])).float().save_pretrained(folder)
    change_config(folder, attn_implementation=path if path == "eager" else ...)
    port(folder, ported)
    code, lines = verify(folder, ported, "--mode", "forward", "--length", 32)
    assert (code, lines[-1]) == (0, "equal (rounding)"), lines
