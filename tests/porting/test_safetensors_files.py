import errno
import json
import os
import shutil
import struct
from typing import ClassVar

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxformer.errors import CheckpointError, JaxformerError, ResourceError
from jaxformer.porting.formats.safetensors_files import (
    DTYPES,
    read_safetensors,
    read_sharded,
    write_safetensors,
)
from jaxformer.porting.formats.tensors import StoredTensor, digest
from tests.support.memory import run_python

QUICK = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def same(a, b):
    return (a.shape, a.dtype, a.tobytes()) == (b.shape, b.dtype, b.tobytes())


@st.composite
def arrays(draw):
    """Any dtype, 0-d, empty, transposed, sliced, backwards."""
    dtype = draw(st.sampled_from(list(DTYPES.values())))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
    seed = draw(st.integers(0, 2**32))
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "b" else 256, count, np.uint8)
    array = data.view(dtype).reshape(shape)
    how = draw(st.sampled_from(["as it is", "transposed", "Fortran", "sliced", "backwards"]))
    if how == "transposed":
        return array.T
    if how == "Fortran":
        return np.asfortranarray(array)
    if how == "sliced":
        return array[..., ::2] if array.ndim else array
    return array[::-1] if how == "backwards" and array.ndim else array


names = st.text(st.characters(exclude_categories=["Cs"]), min_size=0, max_size=12).filter(
    lambda name: name != "__metadata__"
)


@QUICK
@given(st.dictionaries(names, arrays(), max_size=5), st.dictionaries(names, names, max_size=1))
def test_round_trip_and_the_same_bytes_as_the_library(made, metadata):
    tensors = {name: StoredTensor.of(array) for name, array in made.items()}
    digests = write_safetensors("written.safetensors", tensors, metadata).digests
    found, found_metadata = read_safetensors("written.safetensors")
    assert found_metadata == metadata
    assert found.keys() == made.keys() == digests.keys()
    for name, array in made.items():
        read = found[name].read()
        assert same(read, array)
        assert read.flags.c_contiguous
        assert read.flags.writeable
        assert digests[name] == digest(read)
        assert (found[name].shape, found[name].dtype, found[name].nbytes) == (
            array.shape,
            array.dtype,
            array.nbytes,
        )
    held = {name: np.array(array, order="C") for name, array in made.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=str(array.dtype),
            shape=list(array.shape),
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for name, array in held.items()
    }
    content = safetensors.serialize(specs, metadata or None)
    with open("written.safetensors", "rb") as file:
        assert file.read() == content


@pytest.mark.parametrize(
    "dtype",
    [
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
        *("bool", "complex64"),
    ],
)
def test_both_ways_with_torch(dtype):
    value = torch.arange(6.0).reshape(2, 3).to(getattr(torch, dtype))
    source = {"a": value, "b": value[0, 1].clone(), "c": value[:0].clone()}
    safetensors.torch.save_file(source, "reference.safetensors", {"format": "pt"})
    found, metadata = read_safetensors("reference.safetensors")
    assert metadata == {"format": "pt"}
    for name, tensor in source.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].read().astype(np.complex128).tolist() == (
            tensor.to(torch.complex128).tolist()
        )
    write_safetensors("written.safetensors", found, metadata)
    back = safetensors.torch.load_file("written.safetensors")
    for name, tensor in source.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name].to(torch.complex128), tensor.to(torch.complex128))


def test_big_endian_and_transposed_arrays_come_out_right():
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    write_safetensors("a.safetensors", {"a": StoredTensor.of(array), "t": StoredTensor.of(array.T)})
    found = safetensors.numpy.load_file("a.safetensors")
    np.testing.assert_array_equal(found["a"], array)
    np.testing.assert_array_equal(found["t"], array.T)


def test_the_data_begins_at_a_multiple_of_eight():
    for size in range(9):
        write_safetensors("a.safetensors", {"a" * size: StoredTensor.of(np.zeros(3))})
        with open("a.safetensors", "rb") as file:
            assert struct.unpack("<Q", file.read(8))[0] % 8 == 0


def test_progress_counts_every_byte():
    counts = []
    tensors = {name: StoredTensor.of(np.zeros(5, np.int16)) for name in "abc"}
    write_safetensors("a.safetensors", tensors, progress=counts.append)
    assert counts == [10, 10, 10]


@pytest.mark.parametrize(
    ("tensors", "metadata", "word"),
    [
        ({"a": np.zeros(2, np.complex128)}, {}, "complex128"),
        ({"a": np.array(["x"])}, {}, "U1"),
        ({"__metadata__": np.zeros(2)}, {}, "__metadata__"),
        ({"a": np.zeros(2)}, {"a": 1}, "metadata"),
    ],
)
def test_what_the_format_cannot_hold(empty_folder, tensors, metadata, word):
    stored = {name: StoredTensor.of(array) for name, array in tensors.items()}
    with pytest.raises(ValueError, match=word):
        write_safetensors("a.safetensors", stored, metadata)
    assert list(empty_folder.iterdir()) == []


def test_a_tensor_that_is_not_what_it_says(empty_folder):
    liar = StoredTensor((2,), np.dtype(np.float32), lambda: np.zeros(3, np.float32))
    with pytest.raises(ValueError, match=r"w must be .* shape \(2,\): got float32 of shape \(3,\)"):
        write_safetensors("a.safetensors", {"w": liar})
    assert list(empty_folder.iterdir()) == []


class TestDurability:
    tensors: ClassVar = {"w": StoredTensor.of(np.arange(5.0))}

    def refused(self, folder, words, error=ResourceError):
        """The write fails, in one line, and changes nothing."""
        old = folder / "old.safetensors"
        old.write_bytes(b"old")
        with pytest.raises(error) as caught:
            write_safetensors(old, self.tensors)
        assert "\n" not in str(caught.value)
        for word in words:
            assert word in str(caught.value)
        assert [path.name for path in folder.iterdir()] == ["old.safetensors"]
        assert old.read_bytes() == b"old"

    def test_disk_without_space(self, empty_folder, monkeypatch):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 9, 1 << 19))
        self.refused(empty_folder, ["needs 0.0 MiB and 1.0 MiB to spare", "0.5 MiB are free"])

    def test_disk_full_while_writing(self, empty_folder, monkeypatch):
        def full(_):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        self.refused(empty_folder, ["No space left on device"])

    def test_a_disk_that_forgets(self, empty_folder, monkeypatch):
        fsync = os.fsync

        def forget(descriptor):
            fsync(descriptor)
            os.pwrite(descriptor, b"\x01", os.fstat(descriptor).st_size - 1)

        monkeypatch.setattr(os, "fsync", forget)
        self.refused(empty_folder, ["did not give back"])

    def test_a_source_that_is_damaged(self, empty_folder, monkeypatch):
        def broken():
            raise CheckpointError("the source is damaged")

        tensor = StoredTensor((5,), np.dtype(np.float64), broken)
        monkeypatch.setattr(self, "tensors", {"w": tensor})
        self.refused(empty_folder, ["the source is damaged"], CheckpointError)

    def test_an_interrupt(self, empty_folder, monkeypatch):
        def stop():
            raise KeyboardInterrupt

        tensor = StoredTensor((5,), np.dtype(np.float64), stop)
        monkeypatch.setattr(self, "tensors", {"w": tensor})
        with pytest.raises(KeyboardInterrupt):
            write_safetensors("new.safetensors", self.tensors)
        assert list(empty_folder.iterdir()) == []

    def test_memory_that_does_not_suffice(self, empty_folder, monkeypatch):
        def large():
            raise MemoryError

        tensor = StoredTensor((5,), np.dtype(np.float64), large)
        monkeypatch.setattr(self, "tensors", {"w": tensor})
        self.refused(empty_folder, ["memory"])

    @pytest.mark.parametrize("place", [".", "missing/a.safetensors"])
    def test_a_place_that_cannot_be_written(self, empty_folder, place):
        with pytest.raises(ResourceError):
            write_safetensors(place, self.tensors)
        assert list(empty_folder.iterdir()) == []

    def test_a_file_is_replaced(self, empty_folder):
        (empty_folder / "a.safetensors").write_bytes(b"old")
        write_safetensors("a.safetensors", self.tensors)
        assert read_safetensors("a.safetensors")[0]["w"].read().tolist() == [0, 1, 2, 3, 4]


def test_a_file_that_changes_after_it_was_opened(empty_folder):
    write_safetensors("a.safetensors", {"w": StoredTensor.of(np.arange(5.0))})
    tensor = read_safetensors("a.safetensors")[0]["w"]
    write_safetensors("a.safetensors", {"w": StoredTensor.of(np.arange(5.0) + 1)})
    with pytest.raises(CheckpointError, match="changed while it was being read"):
        tensor.read()
    (empty_folder / "a.safetensors").unlink()
    with pytest.raises(JaxformerError, match=r"a\.safetensors"):
        tensor.read()


def test_shards(empty_folder):
    safetensors.torch.save_file(
        {"a": torch.ones(2), "b": torch.zeros(3)}, "x.safetensors", {"format": "pt", "n": "1"}
    )
    safetensors.torch.save_file({"c": torch.full((4,), 2.0)}, "y.safetensors", {"format": "pt"})
    weight_map = {"c": "y.safetensors", "a": "x.safetensors", "b": "x.safetensors"}
    (empty_folder / "i.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    tensors, metadata = read_sharded("i.json")
    assert list(tensors) == ["c", "a", "b"]
    assert metadata == {"format": "pt"}
    assert [tensors[n].read().tolist() for n in "abc"] == [[1, 1], [0, 0, 0], [2, 2, 2, 2]]


def test_missing_files_are_all_named(empty_folder):
    weight_map = {"a": "1.safetensors", "b": "2.safetensors"}
    (empty_folder / "i.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"1\.safetensors, 2\.safetensors"):
        read_sharded("i.json")


def one_line(error):
    assert "\n" not in str(error)
    return error.exit_code


def damaged_copies(data, header_end, seed, count):
    """Copies with a byte changed, most of them in the header, and copies cut short."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        copy = bytearray(data)
        for _ in range(rng.integers(1, 4)):
            end = header_end if rng.random() < 0.8 else len(data)
            copy[rng.integers(0, end)] = rng.integers(0, 256)
        yield bytes(copy)
    for place in range(0, len(data), max(1, len(data) // 300)):
        yield data[:place]


def test_damage_gives_our_errors_alone(empty_folder):
    tensors = {"w": StoredTensor.of(np.ones((3, 2))), "é": StoredTensor.of(np.ones(2, bool))}
    tensors["b"] = StoredTensor.of(np.ones((), ml_dtypes.bfloat16))
    write_safetensors("a.safetensors", tensors, {"format": "pt"})
    data = (empty_folder / "a.safetensors").read_bytes()
    codes = {0: 0, 4: 0, 5: 0}
    for copy in damaged_copies(data, len(data) - 52, 0, 600):
        (empty_folder / "b.safetensors").write_bytes(copy)
        try:
            for tensor in read_safetensors("b.safetensors")[0].values():
                tensor.read()
            codes[0] += 1
        except JaxformerError as error:
            codes[one_line(error)] += 1
    assert codes[4] > 300
    assert codes[5] > 0


STREAM = """
import numpy as np
from jaxformer.porting.formats.safetensors_files import read_safetensors, write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
size = 1 << 23
def tensor(i):
    return StoredTensor((size,), np.dtype(np.float32), lambda: np.full(size, i, np.float32))
before = reset()
write_safetensors("a.safetensors", {str(i): tensor(i) for i in range(6)})
written = status("VmHWM") - before
before = reset()
for name, stored in read_safetensors("a.safetensors")[0].items():
    assert stored.read()[-1] == int(name)
print(json.dumps([written / 2**20, (status("VmHWM") - before) / 2**20]))
"""


def test_memory_stays_at_one_tensor(empty_folder):
    written, read = run_python(STREAM)
    assert written < 32 + 16
    assert read < 32 + 16
    assert (empty_folder / "a.safetensors").stat().st_size > 6 * 2**25
