import argparse
import collections
import pickle
import pickletools
import zipfile

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxformer.errors import CheckpointError, JaxformerError, UnsafeFileError
from jaxformer.porting.plain_pickle import PlainUnpickler
from jaxformer.porting.tensors import StoredTensor
from jaxformer.porting.torch_files import read_plain_pickle, read_torch_file, write_torch_file
from jaxformer.porting.torch_unpickler import DTYPES
from jaxformer.porting.trees import walk
from tests.malicious_files import archive
from tests.memory import run_python
from tests.test_safetensors_files import arrays, damaged_copies, one_line, same

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
    theirs = {
        "a": value,
        "transposed": value.T,
        "row": value[1],
        "column": value[:, 1],
        "one": value[0, 0],
        "none": value[:0],
        "parameter": torch.nn.Parameter(value, requires_grad=False),
    }
    torch.save(theirs, "a.pt", pickle_protocol=protocol)
    found = read_torch_file("a.pt")
    for name, tensor in theirs.items():
        agree(found[name], tensor)
    write_torch_file("b.pt", found)
    for mapped in (False, True):
        back = torch.load("b.pt", weights_only=True, mmap=mapped)
        for name, tensor in theirs.items():
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


def leaves(draw_arrays):
    plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False)
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    return plain | text | draw_arrays


trees = st.recursive(
    leaves(arrays().filter(lambda a: a.dtype in DTYPES.values())),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text("abé/", max_size=3) | st.integers(-9, 2**70), inner, max_size=4)
    ),
    max_leaves=12,
)


def equal(found, made):
    if isinstance(made, np.ndarray):
        return same(found.read(), made)
    if isinstance(made, dict):
        return list(found) == list(made) and all(equal(found[k], made[k]) for k in made)
    if isinstance(made, list | tuple):
        return (
            type(found) is type(made) and all(map(equal, found, made)) and len(found) == len(made)
        )
    return type(found) is type(made) and found == made


@QUICK
@given(trees)
def test_round_trip(tree):
    if any(key >= 2**63 for key in integer_keys(tree)):
        with pytest.raises(ValueError, match="key"):
            write_torch_file("a.pt", tree)
        return
    digests = write_torch_file("a.pt", tree)
    found = read_torch_file("a.pt")
    assert equal(found, tree)
    assert set(digests) == {place for place, _ in walk(found, "")}
    torch.load("a.pt", weights_only=True)
    with open("a.pt", "rb") as file:
        first = file.read()
    write_torch_file("a.pt", tree)
    with open("a.pt", "rb") as file:
        assert file.read() == first


def integer_keys(tree):
    if isinstance(tree, dict):
        yield from (key for key in tree if isinstance(key, int))
    if isinstance(tree, dict | list | tuple):
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from integer_keys(value)


def test_the_data_is_aligned_as_torch_aligns_it():
    write_torch_file("a.pt", {str(i): np.zeros(i) for i in range(9)})
    with zipfile.ZipFile("a.pt") as file:
        for info in file.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            start = info.header_offset + 30 + len(info.filename) + len(info.extra)
            assert start % 64 == 0


@pytest.mark.parametrize(
    ("tree", "word"),
    [
        ({"a": np.float64(1)}, "a is a float64"),
        ({"a": {1}}, "a is a set"),
        ({(1, 2): 1}, "key"),
        ({True: 1}, "key"),
        ({"a": [np.array(["x"])]}, "a/0 has dtype <U1"),
        ({"a": "\ud800"}, "surrogates"),
        ({"a": object()}, "a is a object"),
        ({"a": 2**5000}, "a is a int"),
    ],
)
def test_what_cannot_be_written(empty_folder, tree, word):
    with pytest.raises(ValueError, match=word):
        write_torch_file("a.pt", tree)
    assert list(empty_folder.iterdir()) == []


def test_a_tree_without_end_cannot_be_written(empty_folder):
    tree = []
    tree.append(tree)
    with pytest.raises(ValueError, match="100 deep"):
        write_torch_file("a.pt", tree)
    assert list(empty_folder.iterdir()) == []


def test_progress_counts_a_shared_storage_once():
    counts = []
    tied = StoredTensor.of(np.zeros(4, np.float32), "tied")
    write_torch_file("a.pt", [tied, tied, np.zeros(3, np.int8)], counts.append)
    assert counts == [16, 3]


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


STREAM = """
import numpy as np
from jaxformer.porting.torch_files import read_torch_file, write_torch_file
from jaxformer.porting.tensors import StoredTensor
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
from jaxformer.porting.torch_files import read_torch_file
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
from jaxformer.porting import tensors, torch_files, safetensors_files, detection
tree = torch_files.read_torch_file("theirs.pt")
torch_files.write_torch_file("ours.pt", tree)
safetensors_files.write_safetensors("ours.safetensors", tree)
found = safetensors_files.read_safetensors("ours.safetensors")[0]
kinds = [detection.detect(p) for p in ("theirs.pt", "ours.pt", "ours.safetensors")]
print(json.dumps([found["w"].read().tolist(), *kinds]))
"""


def test_all_of_it_works_without_torch():
    torch.save({"w": torch.arange(3.0)}, "theirs.pt")
    assert run_python(WITHOUT) == [[0, 1, 2], "torch", "torch", "safetensors"]
    assert torch.load("ours.pt", weights_only=True)["w"].tolist() == [0, 1, 2]


def test_bfloat16_is_not_rounded():
    value = np.arange(256, dtype=np.uint16).view(ml_dtypes.bfloat16)
    write_torch_file("a.pt", [value])
    back = torch.load("a.pt", weights_only=True)[0]
    assert back.view(torch.int16).tolist() == list(range(256))
