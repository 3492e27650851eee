"""Damaged PyTorch files, and unsupported content: one error of jaxformer for each."""

import argparse
import collections
import pickletools
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxformer.errors import CheckpointError, JaxformerError, UnsafeFileError
from jaxformer.porting.formats.plain_pickle import PlainUnpickler
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.trees import walk
from tests.porting.test_safetensors_files import damaged_copies, one_line
from tests.support.malicious_torch import archive


def test_damage_gives_our_errors_alone(empty_folder):
    model = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    torch.save({"model": model.state_dict(), "n": [1, 2.0, "x"]}, "a.pt")
    data = (empty_folder / "a.pt").read_bytes()
    codes = {0: 0, 4: 0, 5: 0}
    for copy in damaged_copies(data, len(data), 0, 800):
        codes[outcome(empty_folder / "b.pt", copy)] += 1
    assert codes[4] > 300


def test_no_pickle_gives_anything_but_our_errors(empty_folder):
    """The checksum is set right again, so that every change reaches the machine."""
    saved = {
        "model": torch.nn.Linear(3, 2).state_dict(),
        "p": torch.nn.Parameter(torch.ones(2)),
        "u": torch.ones(2, dtype=torch.uint16),
        "n": [1, 2.0, "x", (1,), {1}, b"x", 2**70, torch.Size([1]), torch.device("cpu")],
    }
    torch.save(saved, "a.pt")
    with zipfile.ZipFile("a.pt") as file:
        names = {name.partition("/")[2]: file.read(name) for name in file.namelist()}
    data = names.pop("data.pkl")
    entries = {name: content for name, content in names.items() if name.startswith("data/")}
    codes = {0: 0, 4: 0, 5: 0}
    instructions = np.frombuffer(
        bytes(ord(opcode.code) for opcode in pickletools.opcodes), np.uint8
    )
    for seed, copy in enumerate(damaged_copies(data, len(data), 1, 1500)):
        rng = np.random.default_rng(seed)
        if seed % 2 and copy:
            copy = bytearray(copy)
            copy[rng.integers(0, len(copy))] = rng.choice(instructions)
        content = archive(empty_folder / "scratch.zip", bytes(copy), entries)
        codes[outcome(empty_folder / "b.pt", content)] += 1
    assert min(codes.values()) > 50


def outcome(path, content):
    path.write_bytes(content)
    try:
        for _, tensor in walk(read_torch_file(path), ""):
            tensor.read()
    except JaxformerError as error:
        return one_line(error)
    return 0


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=200))
def test_random_bytes_are_no_pickle(data):
    with pytest.raises((CheckpointError, UnsafeFileError)):
        PlainUnpickler(data + b"\x00", "it").load()


def test_the_bytes_that_torch_would_read_are_not_executed(empty_folder):
    class Attack:
        def __reduce__(self):
            return eval, ("open('pwned', 'w')",)

    torch.save({"w": torch.ones(2), "x": Attack()}, "a.pt")
    with pytest.raises(UnsafeFileError, match=r"builtins__?\.eval|builtin__\.eval"):
        read_torch_file("a.pt")
    assert [path.name for path in empty_folder.iterdir()] == ["a.pt"]


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (np.float64(1.5), "numpy"),
        (np.zeros(2), "numpy"),
        (torch.nn.Linear(2, 2), "torch.nn.modules.linear.Linear"),
        (argparse.Namespace(lr=1), "argparse.Namespace"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (torch.zeros(2).untyped_storage(), "storage"),
        (collections.defaultdict(list), "defaultdict"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_real_checkpoints_hold_and_we_do_not_read(value, word):
    torch.save({"x": value}, "a.pt")
    with pytest.raises((UnsafeFileError, CheckpointError), match=word) as caught:
        read_torch_file("a.pt")
    assert "\n" not in str(caught.value)
    assert "weights_only" not in str(caught.value)
    assert "safe_globals" not in str(caught.value)


def test_files_of_old_and_of_scripts():
    torch.save({"w": torch.ones(2)}, "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeFileError, match=r"before 1\.6"):
        read_torch_file("old.pt")
