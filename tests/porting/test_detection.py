import contextlib
import json
import os
import pickle
import pickletools

import numpy as np
import pytest
import torch

from jaxformer.errors import CheckpointError, JaxformerError, ResourceError
from jaxformer.porting.formats.detection import detect
from jaxformer.porting.formats.safetensors_files import write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor


@pytest.fixture
def here(empty_folder):
    return empty_folder


def refused(path, *words, error=CheckpointError):
    with pytest.raises(error) as caught:
        detect(path)
    text = str(caught.value)
    assert text.isprintable()
    for word in words:
        assert word in text


def save_safetensors(path):
    write_safetensors(path, {"w": StoredTensor.of(np.zeros(3))})


def test_files_under_any_name(here):
    torch.save({"w": torch.ones(2)}, here / "a.safetensors")
    assert detect(here / "a.safetensors") == "torch"
    save_safetensors(here / "a.pt")
    assert detect(here / "a.pt") == "safetensors"
    torch.save({"w": torch.ones(2)}, here / "b.json", _use_new_zipfile_serialization=False)
    assert detect(here / "b.json") == "torch_legacy"
    for protocol in range(2, 6):
        (here / "b.zip").write_bytes(pickle.dumps({"stoi": {"a": 1}}, protocol))
        assert detect(here / "b.zip") == "pickle"
    (here / "b.bin").write_bytes(pickle.dumps(os.system, 0))
    assert detect(str(here / "b.bin")) == "pickle"


def test_a_header_of_123_bytes_is_not_json(here):
    """Its first byte is a brace, as JSON's is: the library before 0.3 did not pad."""
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).ljust(123)
    (here / "x").write_bytes((123).to_bytes(8, "little") + header.encode() + b"\0")
    assert detect(here / "x") == "safetensors"


@pytest.mark.parametrize(("save", "kind"), [("torch", "torch_index"), ("st", "safetensors_index")])
def test_indices(here, save, kind):
    if save == "torch":
        torch.save({"w": torch.ones(2)}, here / "shard")
    else:
        save_safetensors(here / "shard")
    (here / "x").write_text(json.dumps({"metadata": {}, "weight_map": {"w": "shard"}}))
    assert detect(here / "x") == kind


def test_an_index_without_its_shards(here):
    (here / "x").write_text(json.dumps({"weight_map": {"w": "shard"}}))
    assert detect(here / "x") == "safetensors_index"
    (here / "x").write_text(json.dumps({"weight_map": {"w": "../shard"}}))
    assert detect(here / "x") == "safetensors_index"


@pytest.mark.parametrize(
    "weights",
    [
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ],
)
def test_hugging_face(here, weights):
    (here / "config.json").write_text("{}")
    refused(here, "no weights", "model.safetensors")
    (here / weights).write_text("")
    assert detect(here) == "huggingface"


def test_runs(here):
    step = here / "run" / "checkpoints" / "30"
    step.mkdir(parents=True)
    refused(here / "run", "it holds 'checkpoints'")
    (here / "run" / "config.json").write_text("{}")
    (here / "run" / "metrics.jsonl").write_text("")
    refused(here / "run", "a run that has no checkpoint yet")
    (step / "MANIFEST.json").write_text("{}")
    assert detect(here / "run") == "run"
    assert detect(here / "run" / "checkpoints") == "checkpoints"
    assert detect(step) == "checkpoint"


@pytest.mark.parametrize("name", ["030", "x", "٣"])
def test_stray_folders_are_no_run(here, name):
    step = here / "checkpoints" / name
    step.mkdir(parents=True)
    (step / "MANIFEST.json").write_text("{}")
    refused(here, "not a checkpoint")


@pytest.mark.tier("full")
def test_a_real_run(whole):
    assert detect(whole) == "run"
    assert detect(whole / "checkpoints" / "30") == "checkpoint"
    assert detect(whole / "checkpoints" / "30" / "arrays") == "orbax"


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (bytes(100), "empty"),
        (b"hello world, how are you", "b'hello wo'"),
        (b"\x89HDF\r\n\x1a\n", "HDF5"),
        (b"\x1f\x8b\x08", "gzip"),
        (b"GGUF\x03", "GGUF"),
        (b"\x93NUMPY\x01", "numpy"),
        (b"PK\x05\x06" + bytes(18), "empty zip"),
        (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b'{"model_type": "gpt2"}', "no weight_map"),
        (b'{"weight_map": ', "not JSON"),
        (b"cat sat\non a mat\n", "begins with"),
    ],
)
def test_what_is_not_known(here, content, word):
    (here / "x").write_bytes(content)
    refused(here / "x", word, str(here / "x"))


def test_what_is_not_there(here):
    refused(here / "missing", "does not exist")
    refused("", "nothing")
    (here / "empty").mkdir()
    refused(here / "empty", "it holds nothing")


def test_a_pipe_is_not_waited_for(here):
    os.mkfifo(here / "pipe")
    refused(here / "pipe", "not a regular file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read(here):
    (here / "x").write_bytes(b"{}")
    (here / "x").chmod(0)
    refused(here / "x", "permissions", error=ResourceError)


def test_a_path_with_a_zero_byte():
    with pytest.raises(ResourceError, match="cannot be read"):
        detect("a\0b")


def test_random_bytes_give_our_errors_alone(here):
    rng = np.random.default_rng(0)
    codes = np.frombuffer(bytes(ord(opcode.code) for opcode in pickletools.opcodes), np.uint8)
    for seed in range(3000):
        size = rng.integers(0, 80)
        content = rng.choice(codes, size) if seed % 2 else rng.integers(0, 256, size, np.uint8)
        (here / "x").write_bytes(content.tobytes())
        with contextlib.suppress(JaxformerError):
            detect(here / "x")
