import collections
import pickle
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from jaxformer.errors import CheckpointError, UnsafeFileError
from jaxformer.porting.formats.plain_pickle import read_plain_pickle
from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.formats.torch_dtypes import DTYPES
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.torch_writer import write_torch_file
from tests.support.memory import run_python

QUICK = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def numbers(tensor):
    """A torch tensor's values, whatever its dtype."""
    return tensor.detach().to(torch.complex128).numpy()


def agree(stored, tensor):
    """Whether a stored tensor is what torch has."""
    array = stored.read()
    assert array.flags.c_contiguous
    assert array.flags.writeable
    assert (array.shape, array.dtype) == (stored.shape, stored.dtype)
    assert array.dtype == DTYPES[str(tensor.dtype).removeprefix("torch.")]
    np.testing.assert_array_equal(array.astype(np.complex128), numbers(tensor))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_dtype_both_ways(dtype, protocol):
    value = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype))
    source = {
        "a": value,
        "transposed": value.T,
        "row": value[1],
        "column": value[:, 1],
        "one": value[0, 0],
        "none": value[:0],
        "parameter": torch.nn.Parameter(value, requires_grad=False),
    }
    torch.save(source, "a.pt", pickle_protocol=protocol)
    found = read_torch_file("a.pt")
    for name, tensor in source.items():
        agree(found[name], tensor)
    write_torch_file("b.pt", found)
    for mapped in (False, True):
        back = torch.load("b.pt", weights_only=True, mmap=mapped)
        for name, tensor in source.items():
            assert back[name].dtype == tensor.dtype
            assert back[name].is_contiguous()
            np.testing.assert_array_equal(numbers(back[name]), numbers(tensor))


def test_a_training_checkpoint():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3])
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    saved = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "milestones": schedule.state_dict()["milestones"],
        "iter_num": 7,
        "best_val_loss": torch.tensor(1.5),
        "config": {"dropout": 0.1, "bias": False, "name": "é", "sizes": [1, (2, None)]},
    }
    torch.save(saved, "ckpt.pt")
    found = read_torch_file("ckpt.pt")
    assert list(found) == list(saved)
    for name, tensor in saved["model"].items():
        agree(found["model"][name], tensor)
    for number, state in saved["optimizer"]["state"].items():
        for name, tensor in state.items():
            agree(found["optimizer"]["state"][number][name], tensor)
    assert found["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    assert found["config"] == saved["config"]
    assert found["milestones"] == {2: 1, 3: 2}
    assert found["iter_num"] == 7
    write_torch_file("back.pt", found)
    back = torch.load("back.pt", weights_only=True)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])


def test_what_is_not_a_tensor():
    saved = {
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": [torch.device("cuda", 1), torch.device("cpu")],
        "set": {1, "a"},
        "bytes": [b"ab\xff\x00", b""],
        "ordered": collections.OrderedDict(a=1),
        "numbers": [2**70, -1, -(2**31), 255, 65536, 1e-300, float("inf"), True, None],
        1: {2: 3},
    }
    torch.save(saved, "a.pt")
    found = read_torch_file("a.pt")
    assert found == {
        **saved,
        "size": (1, 2),
        "dtype": "bfloat16",
        "device": ["cuda:1", "cpu"],
    }
    assert type(found["ordered"]) is dict
    assert type(found["size"]) is tuple


def test_parameters_with_attributes_and_gradients():
    parameter = torch.nn.Parameter(torch.arange(3.0))
    parameter.decay = False
    torch.save([parameter], "a.pt")
    agree(read_torch_file("a.pt")[0], parameter)


def test_ties():
    weight = torch.arange(6.0).reshape(2, 3)
    saved = {"a": weight, "b": weight.detach(), "t": weight.T, "part": weight[1:], "c": [weight]}
    torch.save({**saved, "other": weight.clone()}, "a.pt")
    found = read_torch_file("a.pt")
    assert found["a"].storage == found["b"].storage == found["c"][0].storage
    assert len({found[n].storage for n in ("a", "t", "part", "other")}) == 4
    write_torch_file("b.pt", found)
    back = torch.load("b.pt", weights_only=True)
    assert back["a"].data_ptr() == back["b"].data_ptr() == back["c"][0].data_ptr()
    assert back["a"].data_ptr() != back["t"].data_ptr()
    with zipfile.ZipFile("b.pt") as file:
        assert sum("/data/" in name for name in file.namelist()) == 4
        assert file.testzip() is None


def test_tensors_with_one_storage_must_be_the_same(empty_folder):
    tensors = [StoredTensor.of(np.zeros(n), "tied") for n in (2, 3)]
    with pytest.raises(ValueError, match="same storage"):
        write_torch_file("a.pt", tensors)
    assert list(empty_folder.iterdir()) == []


def test_broad_views_of_a_large_storage():
    big = torch.arange(3_000_000)
    saved = [big[::1000], big[5:900_005].reshape(300, 3000)[:, ::7], big.view(3, 1000, 1000)[:, :2]]
    saved += [big[::1_500_000, None][:, :1], big.as_strided((3, 2), (1, 1), 10)]
    torch.save(saved, "a.pt")
    for stored, tensor in zip(read_torch_file("a.pt"), saved, strict=True):
        agree(stored, tensor)


def test_without_checksums():
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3.0)}, "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert read_torch_file("a.pt")["a"].read().tolist() == [0, 1, 2]


@pytest.mark.parametrize("view", [slice(None), slice(1, 2)])
def test_a_flipped_bit_in_the_data_is_found(empty_folder, view):
    path = empty_folder / "a.pt"
    torch.save({"a": torch.arange(5000.0)[view]}, path)
    stored = read_torch_file(path)["a"]
    data = bytearray(path.read_bytes())
    data[data.index(np.arange(5000, dtype=np.float32)[100:120].tobytes())] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="changed"):
        stored.read()
    with pytest.raises(CheckpointError, match="checksum"):
        read_torch_file(path)["a"].read()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_vocabulary_of_nanogpt(protocol):
    meta = {
        "vocab_size": 3,
        "itos": dict(enumerate("ab\n")),
        "stoi": {c: i for i, c in enumerate("ab\n")},
        "more": [1.5, True, None, (1, 2), b"x", "é" * 300, {1, 2}],
    }
    with open("meta.pkl", "wb") as file:
        pickle.dump(meta, file, protocol)
    if protocol < 3:
        # Bytes and sets are calls there.
        with pytest.raises(UnsafeFileError):
            read_plain_pickle("meta.pkl")
        meta["more"] = meta["more"][:4]
        with open("meta.pkl", "wb") as file:
            pickle.dump(meta, file, protocol)
    elif protocol < 4:
        with pytest.raises(UnsafeFileError, match="set"):
            read_plain_pickle("meta.pkl")
        meta["more"].pop()
        with open("meta.pkl", "wb") as file:
            pickle.dump(meta, file, protocol)
    assert read_plain_pickle("meta.pkl") == meta


STREAM = """
import numpy as np
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.torch_writer import write_torch_file
from jaxformer.porting.formats.tensors import StoredTensor
size = 1 << 23
def tensor(i):
    return StoredTensor((size,), np.dtype(np.float32), lambda: np.full(size, i, np.float32))
before = reset()
write_torch_file("a.pt", [tensor(i) for i in range(6)])
written = status("VmHWM") - before
before = reset()
for i, stored in enumerate(read_torch_file("a.pt")):
    assert stored.read()[-1] == i
print(json.dumps([written / 2**20, (status("VmHWM") - before) / 2**20]))
"""


def test_memory_stays_at_one_tensor(empty_folder):
    written, read = run_python(STREAM)
    assert written < 32 + 16
    assert read < 32 + 16
    assert (empty_folder / "a.pt").stat().st_size > 6 * 2**25


VIEWS = """
from jaxformer.porting.formats.torch_files import read_torch_file
before = reset()
for stored in read_torch_file("views.pt"):
    stored.read()
print(json.dumps((status("VmHWM") - before) / 2**20))
"""


def test_a_part_of_a_large_storage_is_read_alone():
    big = torch.zeros(1 << 26, dtype=torch.int8)
    torch.save([big[5:50], big[-7:]], "views.pt")
    assert run_python(VIEWS) < 16


WITHOUT = """
sys.modules["torch"] = None
import numpy as np
from jaxformer.porting.formats import (
    detection, safetensors_files, tensors, torch_files, torch_writer
)
tree = torch_files.read_torch_file("reference.pt")
torch_writer.write_torch_file("written.pt", tree)
safetensors_files.write_safetensors("written.safetensors", tree)
found = safetensors_files.read_safetensors("written.safetensors")[0]
kinds = [detection.detect(p) for p in ("reference.pt", "written.pt", "written.safetensors")]
print(json.dumps([found["w"].read().tolist(), *kinds]))
"""


def test_all_of_it_works_without_torch():
    torch.save({"w": torch.arange(3.0)}, "reference.pt")
    assert run_python(WITHOUT) == [[0, 1, 2], "torch", "torch", "safetensors"]
    assert torch.load("written.pt", weights_only=True)["w"].tolist() == [0, 1, 2]


def test_bfloat16_is_not_rounded():
    value = np.arange(256, dtype=np.uint16).view(ml_dtypes.bfloat16)
    write_torch_file("a.pt", [value])
    back = torch.load("a.pt", weights_only=True)[0]
    assert back.view(torch.int16).tolist() == list(range(256))
