"""Folders of ids: reading across shards, epochs without repetition, and what is damaged."""

import json

import numpy as np
import pytest

from jaxformer.errors import TextError
from jaxformer.sampling import epoch_starts, permute
from jaxformer.token_data import TokenFolder, TokenWindows
from tests.support.folders_of_tokens import write_folder, write_nanogpt

V = 300


@pytest.fixture
def ids():
    return np.random.default_rng(1).integers(0, V, 1000)


@pytest.fixture
def folder(tmp_path, ids):
    return write_folder(tmp_path / "f", {"train": ids, "val": ids[:50]}, vocab_size=V, shard=37)


def change(folder, **settings):
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | settings))


@pytest.mark.parametrize(("start", "count"), [(0, 1000), (36, 2), (37, 37), (5, 200), (999, 1)])
def test_ids_are_read_across_shards(folder, ids, start, count):
    split = TokenFolder(folder).train
    np.testing.assert_array_equal(split.read(start, count), ids[start : start + count])
    assert split.read(start, count).dtype == np.int32


@pytest.mark.parametrize(("start", "count"), [(-1, 2), (999, 2), (1001, 1)])
def test_there_is_nothing_outside(folder, start, count):
    with pytest.raises(IndexError):
        TokenFolder(folder).train.read(start, count)


def test_large_ids_are_kept(tmp_path):
    ids = np.array([0, 70_000, 65_536, 99_999])
    path = write_folder(tmp_path, {"train": ids, "val": ids}, vocab_size=100_000, dtype="uint32")
    np.testing.assert_array_equal(TokenFolder(path).train.read(0, 4), ids)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65, 1000])
def test_a_permutation_has_every_number_once(count):
    orders = [permute(np.arange(count), count, 7, epoch) for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(count))
    if count > 60:
        assert abs(np.corrcoef(np.arange(count), orders[0])[0, 1]) < 0.4
        assert (orders[0] != orders[1]).mean() > 0.9


def test_an_epoch_has_every_window_once():
    steps = [epoch_starts(3, step, 4, 101, 10) for step in range(5)]
    starts = np.concatenate(steps)
    assert sorted(starts[:10]) == sorted(starts[10:]) == list(range(0, 100, 10))
    # A step may end one epoch and begin the next.
    assert list(starts[:10]) != list(starts[10:])


def test_more_ids_than_32_bits_count():
    starts = epoch_starts(3, 10**6, 64, 5 * 10**9, 1024)
    assert starts.max() > 2**32
    assert len(set(starts.tolist())) == 64


def test_a_shard_that_is_cut_short_or_missing_is_named(folder):
    shard = folder / "train-00003.bin"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(TextError, match=r"train-00003.bin has 72 bytes, and 37 ids .* have 74"):
        TokenFolder(folder)
    shard.unlink()
    with pytest.raises(TextError, match=r"train-00003.bin is missing"):
        TokenFolder(folder)


def test_a_shard_that_is_cut_short_while_it_is_read_is_named(folder):
    split = TokenFolder(folder).train
    (folder / "train-00003.bin").write_bytes(b"")
    with pytest.raises(TextError, match=r"train-00003.bin was cut short"):
        split.read(0, 200)


def test_another_dtype_is_noticed(folder):
    change(folder, dtype="uint32")
    with pytest.raises(TextError, match="ids of uint32 have 148"):
        TokenFolder(folder)


def test_an_id_outside_of_the_vocabulary_is_named(folder):
    change(folder, vocab_size=290)
    split = TokenFolder(folder).train
    with pytest.raises(TextError, match=r"at position \d+, outside of 290 tokens"):
        split.read(0, 1000)


@pytest.mark.parametrize(
    "settings",
    [
        {"format": "parquet"},
        {"version": 2},
        {"dtype": "int8"},
        {"vocab_size": 0},
        {"vocab_size": 70_000},
        {"vocab_size": True},
        {"splits": {}},
        {"splits": []},
        {"splits": {"train": {"shards": [{"file": "../a", "tokens": 1}]}, "val": {"shards": []}}},
        {"splits": {"train": {"shards": [{"file": "a", "tokens": -1}]}, "val": {"shards": []}}},
    ],
)
def test_an_index_that_is_none_is_rejected(folder, settings):
    change(folder, **settings)
    with pytest.raises(TextError, match=r"index.json is no index of tokens: "):
        TokenFolder(folder)


def test_an_index_that_is_cut_short_is_rejected(folder):
    text = (folder / "index.json").read_text()
    (folder / "index.json").write_text(text[:50])
    with pytest.raises(TextError, match="no index of tokens"):
        TokenFolder(folder)


def test_a_folder_without_ids_is_none(tmp_path):
    with pytest.raises(TextError, match="holds no tokens"):
        TokenFolder(tmp_path)


def test_a_file_of_nanogpt_is_whole(tmp_path, ids):
    path = write_nanogpt(tmp_path, {"train": ids, "val": ids})
    assert TokenFolder(path).vocab_size == 50257
    (path / "val.bin").write_bytes(b"abc")
    with pytest.raises(TextError, match=r"val.bin has 3 bytes, which are no ids"):
        TokenFolder(path)
    (path / "val.bin").unlink()
    with pytest.raises(TextError, match=r"has no val.bin"):
        TokenFolder(path)


def test_the_fingerprint_of_a_folder_changes_with_its_ids(tmp_path, ids):
    path = write_nanogpt(tmp_path, {"train": ids, "val": ids})
    before = TokenFolder(path).fingerprint()
    ids[500] += 1
    write_nanogpt(tmp_path, {"train": ids, "val": ids})
    assert TokenFolder(path).fingerprint() != before


def test_a_split_without_a_window_is_rejected(folder):
    with pytest.raises(TextError, match="need 51: got 50"):
        TokenWindows(TokenFolder(folder).val, 50)
