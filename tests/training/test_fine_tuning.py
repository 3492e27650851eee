"""A folder of Hugging Face is fine-tuned and goes back: nothing beside its weights is lost."""

import json

import pytest
import torch
import transformers

from jaxformer.cli.main import main
from jaxformer.porting.checkpoint import open_checkpoint
from tests.support.hugging_face.case import VOCAB
from tests.support.hugging_face.folders import change_config, save_folder
from tests.support.ported import port

tokenizers = pytest.importorskip("tokenizers")

TEXT = "the cat sat on the mat. " * 200
FLAGS = ["--devices", "1", "--batch-size", "2", "--sample-tokens", "0", "--steps", "2"]
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BESIDE = {
    "generation_config.json": json.dumps({"eos_token_id": [2, 5], "temperature": 0.6}),
    "tokenizer_config.json": json.dumps({"chat_template": "{{ messages[0].content }}"}),
    "special_tokens_map.json": json.dumps({"eos_token": "t"}),
    "chat_template.jinja": "{{ messages[0].content }}",
    "preprocessor_config.json": "{}",
    # Not text: as sentencepiece writes it.
    "tokenizer.model": b"\xff\x00\xfe",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Mistral in bfloat16 with all that publishers put beside it."""
    path = save_folder(tmp_path_factory.mktemp("mistral") / "hf", "mistral no window", **IDS)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(path)
    letters = {letter: n for n, letter in enumerate(sorted(set(TEXT)))}
    assert len(letters) < VOCAB
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="."))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    change_config(path, **IDS)
    for name, content in BESIDE.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    text = out / "text.txt"
    text.write_text(TEXT)
    arguments = ["train", "--init-from", folder, "--data", text, "--out", out / "run", *FLAGS]
    assert main([str(argument) for argument in arguments]) == 0
    return out / "run"


def same_files(first, second):
    names = [*BESIDE, "tokenizer.json"]
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.tier("full")
def test_a_fine_tuned_run_goes_back_as_what_it_came(folder, run, tmp_path):
    assert same_files(folder, run)
    port(run, tmp_path / "back", "--to", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "mistral"
    assert config["architectures"] == ["MistralForCausalLM"]
    assert {name: config[name] for name in IDS} == IDS
    assert config["dtype"] == "float32"
    assert same_files(folder, tmp_path / "back")
    # transformers reads the config of generation, and this is not what it is about.
    (tmp_path / "back" / "generation_config.json").unlink()
    _, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "back", output_loading_info=True
    )
    assert not any(info.values())


@pytest.mark.tier("full")
def test_a_resumed_run_and_one_that_starts_from_it_remember_too(run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    again = ["train", "--init-from", run, "--data", text, "--out", tmp_path / "again"]
    more = [*FLAGS[:-1], "4", "--fresh-optimizer"]
    assert main([str(argument) for argument in [*again, *more]]) == 0
    assert main(["train", "--resume", "--out", str(tmp_path / "again"), "--steps", "5"]) == 0
    port(tmp_path / "again", tmp_path / "back", "--to", "hf")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "mistral"
    assert {name: config[name] for name in IDS} == IDS
    assert same_files(run, tmp_path / "back")


@pytest.mark.tier("full")
def test_bfloat16_weights_start_a_run_without_cast(folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    arguments = ["train", "--init-from", folder, "--data", text, "--out", tmp_path / "run", *FLAGS]
    assert main([str(argument) for argument in arguments]) == 0
    said = capsys.readouterr()
    assert "whose bfloat16 is kept as float32, exactly" in said.err + said.out


def test_the_ids_of_generation_config_end_a_text_too(folder):
    assert open_checkpoint(folder).last_ids() == [2, 5]


def test_what_lies_beside_travels_with_a_port_and_its_dtype_too(folder, tmp_path):
    port(folder, tmp_path / "run")
    port(tmp_path / "run", tmp_path / "back", "--to", "hf")
    port(folder, tmp_path / "direct", "--to", "hf")
    for back in (tmp_path / "back", tmp_path / "direct"):
        assert same_files(folder, back)
        config = json.loads((back / "config.json").read_text())
        assert (config["model_type"], config["dtype"]) == ("mistral", "bfloat16")
