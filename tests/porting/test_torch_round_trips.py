"""What is written as PyTorch writes, and read again."""

import zipfile

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxformer.porting.formats.tensors import StoredTensor
from jaxformer.porting.formats.torch_dtypes import DTYPES
from jaxformer.porting.formats.torch_files import read_torch_file
from jaxformer.porting.formats.torch_writer import write_torch_file
from jaxformer.porting.formats.trees import walk
from tests.porting.test_safetensors_files import arrays, same

QUICK = settings(
    deadline=None,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


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
    digests = write_torch_file("a.pt", tree).digests
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
