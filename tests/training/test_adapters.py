"""Adapters in whole runs: trained, resumed, merged, and carried to PEFT's folder and back."""

import json

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

import jaxformer
from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.planning.step_model import estimate_step
from jaxformer.training.config import TrainConfig
from jaxformer.training.memory import least_bytes
from tests.support import meshes
from tests.support.hugging_face.case import VOCAB
from tests.support.hugging_face.folders import change_config, save_folder
from tests.support.tiers import FULL
from tests.support.tiny import losses, manifest, resume

peft = pytest.importorskip("peft")
tokenizers = pytest.importorskip("tokenizers")
# PEFT asks transformers by a name that is going away.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

TEXT = "the cat sat on the mat. " * 200
LORA = ["--lora-rank", "3", "--lora-alpha", "6", "--lora-targets", "q_proj,v_proj,down_proj"]
FLAGS = [
    "--devices", "1", "--batch-size", "2", "--sample-tokens", "0", "--learning-rate", "1e-2",
    "--warmup-steps", "2", "--decay-steps", "8", "--block-size", "8",
]  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A Mistral with a tokenizer of letters."""
    path = save_folder(tmp_path_factory.mktemp("mistral") / "hf", "mistral no window")
    letters = {letter: n for n, letter in enumerate(sorted(set(TEXT)))}
    assert len(letters) < VOCAB
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="."))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    (path.parent / "text.txt").write_text(TEXT)
    change_config(path, bos_token_id=None, eos_token_id=None)
    return path


def fine_tune(base, out, *more):
    text = base.parent / "text.txt"
    arguments = ["train", "--init-from", base, "--data", text, "--out", out, *FLAGS, *LORA, *more]
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "run"
    assert fine_tune(base, out, "--steps", 8) == 0
    return out


def restore(out, step):
    return CheckpointFolder(out / "checkpoints").restore(step)[0]


@pytest.mark.tier("full")
def test_adapters_alone_are_trained_and_resumed(base, run, tmp_path):
    first, last = restore(run, 0), restore(run, 8)
    adapters = {name for name in last["parameters"] if ".lora_" in name}
    assert adapters
    assert last["mu"].keys() == last["nu"].keys() == adapters
    for name, value in last["parameters"].items():
        assert np.array_equal(value, first["parameters"][name]) is (name not in adapters), name
    assert fine_tune(base, tmp_path / "cut", "--steps", 3) == 0
    assert resume(tmp_path / "cut", "--steps", 8) == 0
    assert losses(tmp_path / "cut") == losses(run)
    whole, cut = (manifest(out, 8)["state_sha256"] for out in (run, tmp_path / "cut"))
    assert cut == whole


@pytest.mark.tier("full")
def test_a_run_of_all_weights_is_continued_with_adapters_from_step_0(base, tmp_path, capsys):
    text = base.parent / "text.txt"
    start = ["train", "--data", text, *FLAGS, "--out"]
    begin = [*start, tmp_path / "all", "--init-from", base, "--steps", "1"]
    assert main([str(a) for a in begin]) == 0
    more = [*start, tmp_path / "next", "--init-from", tmp_path / "all", "--steps", "3", *LORA]
    assert main([str(a) for a in more]) == 2
    assert "not of new adapters" in capsys.readouterr().err
    assert main([*map(str, more), "--fresh-optimizer"]) == 0


def logits_of(model, ids):
    with torch.no_grad():
        return model(torch.from_numpy(ids)).logits.numpy()


@pytest.mark.tier("full")
def test_peft_reads_what_is_written_and_writes_what_is_read(base, run, tmp_path):
    adapter, merged, again = tmp_path / "adapter", tmp_path / "merged", tmp_path / "again"
    assert main(["port", str(run), str(adapter), "--to", "peft"]) == 0
    settings = json.loads((adapter / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(base)
    assert settings["r"] == 3
    assert {file.name for file in adapter.iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "certificate.json"
    }  # fmt: skip

    ids = np.random.default_rng(0).integers(0, 9, (2, 7))
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    before = logits_of(plain, ids)
    model = peft.PeftModel.from_pretrained(plain, adapter)
    expected = logits_of(model, ids)
    assert np.abs(expected - before).max() > 1e-2
    own = jaxformer.load(run).module
    own.eval()
    np.testing.assert_allclose(own(ids), expected, rtol=0, atol=2e-5)

    # Merged into a folder of Hugging Face, by itself.
    assert main(["port", str(run), str(merged), "--to", "hf"]) == 0
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    np.testing.assert_allclose(logits_of(whole, ids), expected, rtol=0, atol=2e-5)

    # There and back, every bit.
    model.save_pretrained(again)
    assert main(["port", str(again), str(tmp_path / "back"), "--base", str(base)]) == 0
    first, last = restore(run, 8)["parameters"], restore(tmp_path / "back", 0)["parameters"]
    assert first.keys() == last.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, last[name], err_msg=name)
    assert main(["port", str(tmp_path / "back"), str(tmp_path / "third"), "--to", "peft"]) == 0
    one, two = (load_file(p / "adapter_model.safetensors") for p in (adapter, tmp_path / "third"))
    assert one.keys() == two.keys()
    assert all(np.array_equal(value, two[name]) for name, value in one.items())


@pytest.mark.tier("full")
def test_adapters_go_to_torch_ref_as_they_are_with_their_optimizer(run, tmp_path, capsys):
    file = tmp_path / "out.pt"
    assert main(["port", str(run), str(file), "--as", "torch_ref"]) == 0
    assert "AdamW after 8 steps" in capsys.readouterr().err
    saved = torch.load(file, weights_only=True)
    assert "blocks.0.attention.q_proj.lora_a.weight" in saved["model"]
    named = [n for group in saved["optimizer"]["param_groups"] for n in group["param_names"]]
    assert all(".lora_" in name for name in named)
    assert main(["port", str(file), str(tmp_path / "back")]) == 0
    before, after = restore(run, 8), restore(tmp_path / "back", 8)
    for group in ("parameters", "mu", "nu"):
        assert before[group].keys() == after[group].keys()
        for name, value in before[group].items():
            np.testing.assert_array_equal(value, after[group][name], err_msg=name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"use_dora": True}, "is not a plain LoRA: use_dora=True is unsupported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is unsupported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4} is unsupported"),
        ({"setting_of_tomorrow": 3}, "setting_of_tomorrow=3 is unsupported"),
        ({"bias": "all"}, "bias='all' is unsupported"),
        ({"r": 4}, "does not fit its model: "),
        ({"r": None}, "adapter_config.json: r is null, and must be the rank"),
        ({"base_model_name_or_path": "some/model"}, "name its base model with --base"),
    ],
)
def test_other_adapters_are_rejected(run, tmp_path, capsys, change, words):
    adapter = tmp_path / "adapter"
    assert main(["port", str(run), str(adapter), "--to", "peft"]) == 0
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    capsys.readouterr()
    assert main(["port", str(adapter), str(tmp_path / "out")]) in (2, 4)
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_an_adapter_without_a_rank_is_not_left_out(run, tmp_path, capsys, refuse):
    """It has PEFT's default, which is not that of these arrays."""
    adapter = tmp_path / "adapter"
    assert main(["port", str(run), str(adapter), "--to", "peft"]) == 0
    file = adapter / "adapter_config.json"
    settings = json.loads(file.read_text())
    del settings["r"]
    file.write_text(json.dumps(settings))
    capsys.readouterr()
    refuse(["port", adapter, tmp_path / "out"], 4, "does not fit its model with PEFT's default r=8")


def test_what_has_no_adapters_makes_no_folder_of_peft(base, tmp_path, capsys):
    assert main(["port", str(base), str(tmp_path / "out"), "--to", "peft"]) == 2
    assert "this model has none" in capsys.readouterr().err
    assert main(["port", str(base), str(tmp_path / "out"), "--base", str(base)]) == 2
    assert "--base goes with PEFT's folder" in capsys.readouterr().err


def test_a_plan_knows_that_adapters_alone_have_moments():
    model = meshes.LLAMA.replace(num_layers=3)
    whole, small = (TrainConfig(model=m, batch_size=8) for m in (model, model.replace(lora_rank=2)))
    mesh = {"data": 1, "fsdp": 1, "tensor": 1}
    assert estimate_step(small, mesh).moments < estimate_step(whole, mesh).moments / 8
    assert estimate_step(small, mesh).gradients < estimate_step(whole, mesh).gradients / 8
    assert least_bytes(small, 1)["state"] < least_bytes(whole, 1)["state"]


@pytest.mark.parametrize("mesh", ["data 2 x fsdp 2 x tensor 2", pytest.param("pmap 8", marks=FULL)])
@pytest.mark.tier("full")
def test_many_devices_are_one(mesh):
    import jax

    config = meshes.LLAMA.replace(lora_rank=3, lora_targets="q_proj,o_proj,down_proj")
    with jax.enable_x64(True):
        one, many = meshes.fetch(config, (1, None, None)), meshes.fetch(config, mesh)
    np.testing.assert_allclose(many[0], one[0], rtol=0, atol=1e-10)
    for name, value in one[1].items():
        np.testing.assert_allclose(many[1][name], value, rtol=0, atol=1e-10, err_msg=name)
