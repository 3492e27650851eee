"""Folders as their publishers made them: old names, more heads, variants, what is not supported."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from jaxformer.cli.main import main
from jaxformer.errors import CheckpointError, UsageError
from jaxformer.porting.checkpoint import open_checkpoint
from tests.support.hugging_face.folders import change_config, save_folder
from tests.support.ported import port


def first_bert(folder):
    """The layout of bert-base-uncased: a pooler, a next-sentence head, gamma and beta."""
    save_folder(folder, "bert masked")
    arrays = load_file(folder / "model.safetensors")
    arrays = {k: v for k, v in arrays.items() if "predictions.decoder" not in k}
    arrays |= {
        "bert.pooler.dense.weight": torch.randn(24, 24),
        "bert.pooler.dense.bias": torch.randn(24),
        "cls.seq_relationship.weight": torch.randn(2, 24),
        "cls.seq_relationship.bias": torch.randn(2),
    }
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, name in old.items():
        arrays = {key.replace(new, name): array for key, array in arrays.items()}
    assert any(name.endswith("LayerNorm.gamma") for name in arrays)
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForPreTraining"])
def test_the_first_bert_is_ported_without_its_second_head(tmp_path, architecture):
    first_bert(tmp_path / "hf")
    change_config(tmp_path / "hf", architectures=[architecture])
    said = port(tmp_path / "hf", tmp_path / "back", "--to", "hf")
    assert "left out" in said
    assert "cls.seq_relationship.weight" in said
    before = load_file(tmp_path / "hf" / "model.safetensors")
    after = load_file(tmp_path / "back" / "model.safetensors")
    bias = after["cls.predictions.bias"]
    assert torch.equal(bias, before["cls.predictions.bias"])
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["architectures"] == ["BertForMaskedLM"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("model.safetensors", "model.fp16.safetensors"),
        ("model.safetensors.index.json", "model.safetensors.index.fp16.json"),
    ],
)
def test_the_only_variant_of_the_weights_is_found(tmp_path, before, after):
    folder = save_folder(tmp_path / "hf")
    if "index" in before:
        arrays = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        shard = "model.fp16-00001-of-00001.safetensors"
        save_file(arrays, folder / shard, {"format": "pt"})
        (folder / before).write_text(json.dumps({"weight_map": dict.fromkeys(arrays, shard)}))
    (folder / before).rename(folder / after)
    assert open_checkpoint(folder).plan()
    if "index" not in before:
        (folder / "model.bf16.safetensors").write_bytes(b"")
        with pytest.raises(CheckpointError, match="several variants of the weights: name"):
            open_checkpoint(folder)


@pytest.mark.parametrize("force", [False, True])
def test_a_quantised_folder_is_rejected_by_name(tmp_path, force):
    folder = save_folder(tmp_path / "hf")
    change_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(UsageError, match=r"quantization_config \(gptq\), and quantised weights"):
        open_checkpoint(folder, dialect="llama", force=force).plan()


def test_a_head_for_another_task_is_rejected_by_its_class(tmp_path, capsys):
    folder = save_folder(tmp_path / "hf", "bert")
    arrays = {f"bert.{k}": v for k, v in load_file(folder / "model.safetensors").items()}
    arrays |= {"next_head.weight": torch.randn(2, 24), "next_head.bias": torch.randn(2)}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    change_config(folder, architectures=["BertForNextSentencePrediction"])
    arguments = ["port", str(folder), str(tmp_path / "out.pt")]
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "unsupported: the class BertForNextSentencePrediction; bert has Bert" in error
    assert "leave out its head (next_head.*) with --ignore" in error
    assert len(error.splitlines()) == 1
    assert main([*arguments, "--ignore", "next_head.*"]) == 0
