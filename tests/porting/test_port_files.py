"""Every format to every format, bit-exact, and what makes a file one."""

import json
import pickle
from hashlib import sha256

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.text_models import load_model
from tests.support.ported import (
    CONFIG,
    VOCABULARY,
    bits,
    gpt2_state,
    hugging_face,
    nanogpt,
    numbers,
    port,
    same,
)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
TARGETS = {"file": "out.safetensors", "torch": "out.pt", "run": "out", "hf": "out"}


@pytest.fixture(scope="module")
def state():
    return gpt2_state()


@pytest.fixture(scope="module")
def sources(tmp_path_factory, state):
    """The same model in every form that is read, with the flags that it needs."""
    folder = tmp_path_factory.mktemp("sources")
    made = {
        form: (hugging_face(folder / form, state, form), [])
        for form in ("safetensors", "safetensors-sharded", "bin", "bin-sharded")
    }
    made["file in its folder"] = folder / "safetensors" / "model.safetensors", []
    config = folder / "config.json"
    config.write_text(json.dumps(CONFIG))
    tied = {**state, "lm_head.weight": state["transformer.wte.weight"]}
    for name, tree in {
        "bare": tied,
        "model": {"model": tied, "epoch": 3},
        "state_dict": {"state_dict": state, "note": "text", "loss": 1.5},
        "model_state_dict": {"model_state_dict": {f"module.{k}": v for k, v in tied.items()}},
    }.items():
        (folder / name).mkdir()
        torch.save(tree, folder / name / "it.pt")
        made[name] = folder / name / "it.pt", ["--config", config]
    torch.save({"model": tied, "config": CONFIG}, folder / "with config.pt")
    made["with config"] = folder / "with config.pt", []
    save_file(state, folder / "loose.safetensors")
    made["loose"] = folder / "loose.safetensors", ["--config", config, "--dialect", "gpt2"]
    made |= {
        name: (folder / f"{name}.{suffix}", [])
        for name, suffix in {"ported": "safetensors", "torch": "pt", "twin": "pt"}.items()
    }
    made["run"] = folder / "run", []
    for name in ("ported", "torch", "twin", "run"):
        flags = ["--as", "torch_ref"] if name == "twin" else []
        port(folder / "safetensors", made[name][0], *flags)
    return made


SOURCES = (
    "safetensors", "safetensors-sharded", "bin", "bin-sharded", "file in its folder", "bare",
    "model", "state_dict", "model_state_dict", "with config", "loose", "ported", "torch", "twin",
    "run",
)  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_form_is_read(sources, state, source):
    assert sources.keys() == set(SOURCES)
    path, flags = sources[source]
    port(path, "out", *flags, "--to", "hf", "--as", "gpt2")
    same("out", state)


@pytest.mark.parametrize("source", ["safetensors", "bin-sharded", "ported", "twin", "run"])
def test_every_format_becomes_every_other_and_comes_back(sources, state, empty_folder, source):
    for to, name in TARGETS.items():
        folder = empty_folder / to
        port(sources[source][0], folder / name, *(["--to", "hf"] if to == "hf" else []))
        port(folder / name, folder / "back", "--to", "hf", "--as", "gpt2")
        same(folder / "back", state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("to", TARGETS)
def test_every_dtype_keeps_its_bits(empty_folder, to, dtype):
    state = gpt2_state(DTYPES[dtype], seed=2)
    # What is no number, or hardly one, is carried too.
    state["transformer.ln_f.bias"][:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-7])
    hugging_face(empty_folder / "hf", state)
    port("hf", TARGETS[to], *(["--to", "hf"] if to == "hf" else []))
    port(TARGETS[to], "back", "--to", "hf", "--as", "gpt2")
    same("back", state)
    assert json.loads((empty_folder / "back" / "config.json").read_text())["dtype"] == dtype


def test_a_hugging_face_file_comes_back_as_the_same_file(sources, empty_folder):
    """Not only its arrays: the header too, if jaxformer has nothing to add to it."""
    path, _ = sources["safetensors"]
    port(path, "run")
    port("run", "back", "--to", "hf")
    before, after = (folder / "model.safetensors" for folder in (path, empty_folder / "back"))
    assert _metadata(before) == _metadata(after) == {"format": "pt"}
    config = json.loads((empty_folder / "back" / "config.json").read_text())
    assert {name: config[name] for name in CONFIG} == CONFIG


def _metadata(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def test_transformers_loads_what_was_written_with_the_same_logits(sources, empty_folder):
    transformers = pytest.importorskip("transformers")
    path, _ = sources["safetensors"]
    port(path, "run")
    port("run", "back", "--to", "hf")
    ids = torch.arange(2 * 17).reshape(2, 17) % 31
    logits = []
    for folder in (path, empty_folder / "back"):
        model, report = transformers.GPT2LMHeadModel.from_pretrained(
            folder, output_loading_info=True
        )
        assert not any(report.values()), report
        with torch.no_grad():
            logits.append(model.eval()(ids).logits)
    assert torch.equal(*logits)


def test_torch_loads_what_was_written_into_the_twin(sources, empty_folder):
    from torch_ref.config import TransformerLMConfig as TwinConfig
    from torch_ref.transformer_lm import TransformerLM

    port(sources["run"][0], "out.pt", "--as", "torch_ref")
    saved = torch.load("out.pt", weights_only=True)
    assert saved["dialect"] == "torch_ref"
    model = TransformerLM(TwinConfig(**saved["config"]))
    model.load_state_dict(saved["model"], strict=True)
    assert list(saved["model"]) == list(model.state_dict())
    mapped = torch.load("out.pt", weights_only=True, mmap=True)
    assert bits(mapped["model"]["token_embedding.weight"]) == bits(
        model.token_embedding.weight.data
    )


@pytest.mark.parametrize("bias", [False, True])
def test_nanogpt_goes_to_a_run_and_back_with_its_optimizer(empty_folder, bias):
    path = nanogpt(empty_folder / "nano", bias=bias)
    assert "AdamW after 3 steps" in port(path, "run")
    port("run", "back.pt")
    before, after = torch.load(path), torch.load("back.pt", weights_only=True)
    assert after["model_args"] == before["model_args"]
    assert after["iter_num"] == 3
    assert after["vocabulary"] == VOCABULARY
    names = [name.removeprefix("_orig_mod.") for name in before["model"]]
    assert list(after["model"]) == names
    for name in names:
        assert bits(after["model"][name]) == bits(before["model"][f"_orig_mod.{name}"]), name
    old, new = before["optimizer"], after["optimizer"]
    assert old["state"].keys() == new["state"].keys()
    for place, entry in old["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, new["state"][place][name]), (place, name)
    for group, again in zip(old["param_groups"], new["param_groups"], strict=True):
        assert {name: again[name] for name in group} == group


def test_the_twins_optimizer_counts_as_its_parameters_do(empty_folder):
    from torch_ref.config import TransformerLMConfig as TwinConfig
    from torch_ref.transformer_lm import TransformerLM

    path = nanogpt(empty_folder / "nano")
    port(path, "twin.pt", "--as", "torch_ref")
    saved = torch.load("twin.pt", weights_only=True)
    model = TransformerLM(TwinConfig(**saved["config"]))
    named = list(model.named_parameters())
    ordered = [n for n, p in named if p.dim() >= 2] + [n for n, p in named if p.dim() < 2]
    assert [n for g in saved["optimizer"]["param_groups"] for n in g["param_names"]] == ordered
    port("twin.pt", "run")
    port("run", "back.pt", "--as", "nanogpt")
    # The order of another dialect is not known: the groups name their parameters.
    port("back.pt", "again.pt", "--as", "torch_ref")
    again = torch.load("again.pt", weights_only=True)
    for place, entry in saved["optimizer"]["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, again["optimizer"]["state"][place][name]), (place, name)


def test_the_optimizer_is_left_out_where_it_must_be_or_shall_be(empty_folder):
    path = nanogpt(empty_folder / "nano")
    assert "left out: safetensors files hold none" in port(path, "out.safetensors")
    assert "left out\n" in port(path, "out.pt", "--weights-only")
    assert "optimizer" not in torch.load("out.pt", weights_only=True)
    assert open_checkpoint("out.pt").raw.optimizer is None


def test_a_model_is_loaded_by_our_names(sources, state, empty_folder):
    config, arrays, vocabulary = load_model(sources["safetensors"][0])
    assert isinstance(config, TransformerLMConfig)
    assert (config.d_model, config.feed_forward.d_ff, config.num_layers) == (24, 35, 2)
    assert vocabulary is None
    fused = state["transformer.h.1.attn.c_attn.weight"].numpy()
    assert np.array_equal(arrays["blocks.1.attention.k_proj.kernel"], fused[:, 24:48])
    assert load_model(nanogpt(empty_folder / "nano"))[2] == VOCABULARY


@pytest.mark.tier("full")
def test_the_vocabulary_goes_wherever_the_model_goes(empty_folder):
    path = nanogpt(empty_folder / "nano")
    for to, name in TARGETS.items():
        flags = ["--to", "hf", "--as", "gpt2"] if to == "hf" else []
        if to == "hf":
            # GPT-2 has biases, and nothing of Hugging Face has none.
            path = nanogpt(empty_folder / "biased", bias=True)
            flags = ["--config", _gelu_tanh(path, empty_folder / "config.json"), *flags]
        port(path, empty_folder / to / name, *flags)
        assert load_model(empty_folder / to / name)[2] == VOCABULARY


def _gelu_tanh(path, config):
    """Settings of a jaxformer model that gpt2 can hold: GPT-2's own activation."""
    opened = open_checkpoint(path).plan().module.config
    config.write_text(json.dumps({**opened.settings(), "activation": "gelu_tanh"}))
    return config


def test_rounding_is_reported_and_only_on_request(sources, state, empty_folder):
    shown = port(sources["safetensors"][0], "half", "--to", "hf", "--dtype", "bfloat16")
    worst = max(float((t - t.bfloat16().float()).abs().max()) for t in state.values())
    assert f"at most {worst:.3g} (" in shown
    assert "float32 to bfloat16" in shown
    certificate = json.loads((empty_folder / "half" / "certificate.json").read_text())
    assert certificate["largest_rounding_error"] == worst
    same("half", {name: t.bfloat16() for name, t in state.items()})
    assert "none: every number is exact" in port("half", "wide.safetensors", "--cast", "float64")
    assert numbers("wide.safetensors").keys() == state.keys() | {"lm_head.weight"}


def test_the_certificate_says_what_became_of_every_array(sources, state, empty_folder):
    path, _ = sources["safetensors"]
    port(path, "out.pt", "--as", "torch_ref", "--certificate", "proof.json")
    assert not (empty_folder / "out.pt.certificate.json").exists()
    proof = json.loads((empty_folder / "proof.json").read_text())
    source, target = proof["source"], proof["target"]
    assert (source["dialect"], source["class"]) == ("gpt2", "GPT2LMHeadModel")
    assert (target["dialect"], target["class"]) == ("torch_ref", "TransformerLM")
    for side, folder in ((source, path), (target, empty_folder)):
        for file in side["files"]:
            data = (folder / file["path"]).read_bytes()
            assert file == {
                "path": file["path"], "bytes": len(data), "sha256": sha256(data).hexdigest()
            }  # fmt: skip
    assert [file["path"] for file in source["files"]] == ["model.safetensors", "config.json"]
    assert proof["parameters"] == sum(t.numel() for t in state.values())
    assert proof["largest_rounding_error"] == 0.0
    assert proof["command"].startswith("jaxformer port ")
    assert proof["versions"]["jax"]
    saved = torch.load("out.pt", weights_only=True)["model"]
    entries = {entry["name"]: entry for entry in proof["tensors"]}
    assert entries.keys() == saved.keys()
    for name, tensor in saved.items():
        assert entries[name]["sha256"] == sha256(bits(tensor)).hexdigest(), name
        assert entries[name]["shape"] == list(tensor.shape)
        assert entries[name]["dtype"] == "float32"
    assert entries["blocks.1.attention.v_proj.weight"] == {
        "name": "blocks.1.attention.v_proj.weight",
        "shape": [24, 24],
        "dtype": "float32",
        "sha256": entries["blocks.1.attention.v_proj.weight"]["sha256"],
        "ours": [{"name": "blocks.1.attention.v_proj.kernel", "shape": [24, 24]}],
        "source": [{"name": "transformer.h.1.attn.c_attn.weight", "shape": [24, 72]}],
        "to_ours": ["fused"],
        "to_target": "transpose",
    }


def test_a_meta_file_may_lie_elsewhere_and_may_be_wrong(refuse, empty_folder):
    path = nanogpt(empty_folder / "nano")
    (path.parent / "meta.pkl").rename(empty_folder / "letters.pkl")
    assert "unknown: name a meta.pkl" in port(path, "none")
    assert "11 characters" in port(path, "out", "--meta", "letters.pkl")
    (empty_folder / "bad.pkl").write_bytes(pickle.dumps({"itos": {0: "ab"}}))
    refuse(["port", path, "x", "--meta", "bad.pkl"], 4, "bad.pkl holds no vocabulary")
    refuse(["port", path, "x", "--meta", "gone.pkl"], 4, "gone.pkl does not exist")
