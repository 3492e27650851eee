"""What ``jaxformer port`` rejects: damaged, wrong or malicious files, settings and records."""

import json
import os

import numpy as np
import pytest
import torch
from flax import nnx

from jaxformer.checkpoints import CheckpointFolder, serialize_manifest
from jaxformer.config import TransformerLMConfig
from jaxformer.config_tree import flatten
from tests.support.malicious_files import corpus
from tests.support.malicious_pickles import TRACE
from tests.support.ported import CONFIG, gpt2_state, hugging_face, nanogpt, port, run_rejected, same
from tests.support.tiers import full_after
from tests.support.tiny import snapshot

LARGE = 1_000_000
MODEL_CONFIG = flatten(TransformerLMConfig(
    d_model=24, num_heads=4, context_length=19, num_layers=2, vocab_size=31, d_ff=35,
    activation="gelu_tanh",
))  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def keys():
    """The first key compiles something, and what is rejected must compile nothing."""
    nnx.Rngs(0).params()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("source") / "hf", gpt2_state())


@pytest.mark.tier("full")
def test_every_bad_file_is_refused_in_one_line(tmp_path, empty_folder):
    """None is opened further than it takes to know it, and nothing is written."""
    wrong = []
    (tmp_path / "bad").mkdir()
    files = [b for b in corpus(tmp_path / "bad") if b.path.stat().st_size < LARGE]
    source = nanogpt(tmp_path / "nano")
    assert len(files) > 100
    before = snapshot(tmp_path)
    for bad in files:
        arguments = [bad.path] if bad.kind != "pickle" else [source, "--meta", bad.path]
        code, line = run_rejected("port", *arguments, "out.pt")
        # Wrong numbers show only once an array is read, and whose it is comes first.
        unknown = code == 2 and "no dialect has these arrays" in line
        expected = bad.name == "boolean of two" if unknown else code == bad.exit_code
        if not expected or not line.isprintable() or os.listdir():
            wrong.append(f"{bad.kind} {bad.name}: {code}, not {bad.exit_code}: {line}")
    assert wrong == []
    assert snapshot(tmp_path) == before
    assert not (empty_folder / TRACE).exists()


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"model_type": "mamba"}, 2, ["model_type 'mamba' is not known", "gpt2"]),
        ({"auto_map": {"AutoModel": "evil.Model"}}, 2, ["there is no such feature"]),
        ({"n_layer": 3}, 4, ["missing transformer.h.2.ln_1.weight", "h.2.mlp.c_proj.bias"]),
        ({"n_layer": 1}, 4, ["unexpected transformer.h.1.attn.c_attn.weight"]),
        ({"n_embd": 48}, 4, ["(31, 24), not (31, 48)", "c_attn.weight has shape (24, 72)"]),
        ({"vocab_size": 30}, 4, ["wte.weight has shape (31, 24), not (30, 24)"]),
        ({"vocab_size": 2**31 - 1}, 4, ["(31, 24), not (2147483647, 24)"]),
        (
            {"n_layer": 10**9},
            2,
            ["n_layer must be at most the number of arrays, 28: got 1000000000"],
        ),
        ({"n_layer": 10**30}, 2, ["'n_layer' must be at most 2147483647"]),
        ({"n_embd": 10**12}, 2, ["'n_embd' must be at most"]),
        ({"n_positions": 2**30}, 2, ["context_length must be at most 16777216"]),
        ({"n_layer": -1}, 2, ["num_layers must be positive: got -1"]),
        ({"n_head": 0}, 2, ["n_head must be positive: got 0"]),
        ({"n_head": 5}, 2, ["d_model=24, num_heads=5"]),
        ({"n_embd": "24"}, 2, []),
        ({"n_layer": "2"}, 2, []),
        ({"n_layer": 2.0}, 2, []),
        ({"n_layer": True}, 2, ["n_layer must be an integer"]),
        ({"n_layer": [2]}, 2, []),
        ({"n_layer": {"a": 2}}, 2, []),
        ({"layer_norm_epsilon": float("nan")}, 2, ["'layer_norm_epsilon' must be finite"]),
        ({"layer_norm_epsilon": float("inf")}, 2, ["must be finite: got inf"]),
        ({"layer_norm_epsilon": -1e-5}, 2, ["norm_eps must be positive"]),
        ({"layer_norm_epsilon": "1e-5"}, 2, []),
        ({"embd_pdrop": 1.5}, 2, ["embedding_dropout must be in [0, 1): got 1.5"]),
        ({"activation_function": "evil"}, 2, ["activation_function", "'evil'"]),
        ({"activation_function": ["gelu"]}, 2, []),
    ],
    ids=lambda x: json.dumps(x) if isinstance(x, dict) else None,
)
def test_hostile_settings_are_refused_before_anything_is_built(
    refuse, tmp_path, changes, code, words
):
    path = hugging_face(tmp_path / "hf", gpt2_state(), config={**CONFIG, **changes})
    refuse(["port", path, "out"], code, *words)


@pytest.mark.parametrize(
    ("text", "code", "words"),
    [
        ("", 4, ["config.json is not JSON"]),
        ("{", 4, ["config.json is not JSON"]),
        ("[]", 4, ["not a JSON object"]),
        ('{"a": 1, "a": 2}', 5, ["names 'a' more than once"]),
        ('{"a":' * 100_000, 5, ["nested too deeply"]),
        ("{}", 2, []),
    ],
)
def test_damaged_settings_are_rejected(refuse, tmp_path, text, code, words):
    path = hugging_face(tmp_path / "hf", gpt2_state())
    (path / "config.json").write_text(text)
    refuse(["port", path, "out"], code, *words)


def test_all_that_does_not_fit_is_listed_at_once(refuse, tmp_path):
    state = gpt2_state()
    state["transformer.h.0.ln_one.weight"] = state.pop("transformer.h.0.ln_1.weight")
    state["transformer.h.1.mlp.c_fc.bias"] = state["transformer.h.1.mlp.c_fc.bias"][:-1]
    state["extra"] = torch.ones(3)
    state["transformer.ln_f.bias"] = torch.ones(24, dtype=torch.int64)
    refuse(
        ["port", hugging_face(tmp_path / "hf", state), "out"],
        4,
        "missing transformer.h.0.ln_1.weight",
        "is it transformer.h.0.ln_one.weight?",
        "c_fc.bias has shape (34,), not (35,)",
        "unexpected extra",
        "dtype int64 is not a float",
    )
    assert "extra" not in gpt2_state()


def test_numbers_beyond_a_dtype_are_rejected(tmp_path, empty_folder):
    state = gpt2_state()
    state["transformer.wpe.weight"][3, 5] = 1e6
    path = hugging_face(tmp_path / "hf", state)
    for target in ("out.safetensors", "out.pt", "run"):
        code, line = run_rejected("port", path, target, "--dtype", "float16")
        assert code == 4
        assert "position_embedding.embedding holds 1e+06, more than float16 can hold" in line
        assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        ({"dialect": "klingon"}, 2, "no dialect klingon"),
        ({"dialect": "llama"}, 4, "no source name for position_embedding"),
        ({"config": {**MODEL_CONFIG, "d_model": "24"}}, 2, ""),
        ({"config": {**MODEL_CONFIG, "num_layers": 10**9}}, 2, "num_layers must be at most 10000"),
        ({"config": {**MODEL_CONFIG, "norm_eps": float("nan")}}, 2, "norm_eps must be finite"),
        ({"config": {**MODEL_CONFIG, "vocab_size": None}}, 2, "vocab_size must be set"),
        ({"config": {**MODEL_CONFIG, "num_heads": 2.0}}, 2, ""),
        ({"config": {**MODEL_CONFIG, "d_ff": 36}}, 4, "(35, 24), not (36, 24)"),
        ({"step": 2**40}, 4, "it claims to be of step 1099511627776"),
        ({"step": -1}, 4, "it claims to be of step -1"),
        ({"optimizer": {"foo": 1}}, 2, "not a torch optimizer's state dict"),
        ({"optimizer": {"state": {}, "param_groups": [5]}}, 4, "--weights-only"),
        ({"optimizer": {"state": {}, "param_groups": [{}]}}, 2, "not AdamW"),
        ({"model": 5}, 4, "holds no state dict at its top: 'model'"),
        ({"model": {}}, 4, "holds no state dict in model: it is empty"),
        ({"model": {"a": {"b": torch.ones(2)}}}, 4, "'a' are no arrays"),
        ({"model": {3: torch.ones(2)}}, 4, "an array called 3"),
    ],
)
def test_hostile_records_are_rejected(refuse, folder, more, code, words):
    saved = _twin(folder)
    torch.save({**saved, **more}, "hostile.pt")
    refuse(["port", "hostile.pt", "out"], code, words)


@pytest.mark.parametrize(
    "more",
    full_after(
        2, [{"vocabulary": 5}, {"class": "Evil"}, {"class": 5}, {"token_ids": [1]}, {"step": "7"}]
    ),
)
def test_records_of_the_wrong_type_are_passed_over(folder, more):
    torch.save({**_twin(folder), **more}, "odd.pt")
    port("odd.pt", "run")
    port("run", "back", "--to", "hf", "--as", "gpt2")
    same("back", gpt2_state())


def _twin(folder):
    port(folder, "twin.pt", "--as", "torch_ref")
    return torch.load("twin.pt", weights_only=True)


def test_a_run_that_others_wrote_is_rejected(refuse, empty_folder):
    checkpoints = CheckpointFolder(empty_folder / "run" / "checkpoints")
    arrays = {"parameters": {"w": np.ones(3, np.float32)}, "step": np.int32(0)}
    checkpoints.save(0, arrays, {})
    checkpoints.wait()
    refuse(["port", "run", "out"], 2, "these settings make no TransformerLM")
    path = empty_folder / "run" / "checkpoints" / "0" / "MANIFEST.json"
    manifest = json.loads(path.read_text())
    del manifest["files"]
    path.write_text(serialize_manifest(manifest))
    refuse(["port", "run", "out"], 4, "it lacks files")
