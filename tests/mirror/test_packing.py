"""Documents in rows: every target once, each row full, each document by itself."""

import json

import numpy as np
import pytest

from jaxformer.errors import TextError
from jaxformer.packing import PackedRows, pack_lengths
from jaxformer.sampling import batch_of, draw_rows
from jaxformer.token_data import IGNORED, TokenFolder
from tests.support.folders_of_tokens import write_folder

T, COUNT = 16, 3000


def open_rows(path, starts, *, limit=None, **more):
    # Every id is another, so that a target tells where it stands.
    splits = {"train": np.arange(COUNT), "val": np.arange(COUNT)}
    documents = dict.fromkeys(splits, starts)
    write_folder(path, splits, vocab_size=COUNT, shard=70, documents=documents, **more)
    return PackedRows(TokenFolder(path).train, T, limit)


def random_starts():
    random = np.random.default_rng(1)
    ends = np.cumsum(random.choice([1, 2, 3, 9, 17, 18, 50], COUNT))
    return np.array([0, *ends[ends < COUNT]])


@pytest.mark.parametrize("limit", [None, 1000])
def test_every_target_stands_in_one_row(tmp_path, limit):
    """But for the first token of a document, which follows none."""
    starts = random_starts()
    rows = open_rows(tmp_path, starts, limit=limit)
    inputs, targets, segments = batch_of(rows, np.arange(len(rows)))
    counts = targets >= 0
    expected = np.setdiff1d(np.arange(limit or COUNT), starts)
    np.testing.assert_array_equal(np.sort(targets[counts]), expected)
    np.testing.assert_array_equal(inputs[counts] + 1, targets[counts])
    np.testing.assert_array_equal(counts, segments > 0)
    assert (targets[~counts] == IGNORED).all()
    # Tokens of one segment are of one document, and stand one after the other.
    document = np.searchsorted(starts, inputs, side="right")
    for row in range(len(rows)):
        for segment in range(1, segments[row].max() + 1):
            inside = segments[row] == segment
            assert len(set(document[row][inside])) == 1
            assert (np.diff(inputs[row][inside]) == 1).all()
    assert rows.fill == pytest.approx(counts.mean())
    assert rows.fill > 0.98


def test_a_document_of_many_rows_is_cut(tmp_path):
    rows = open_rows(tmp_path, [0])
    assert len(rows) == -(-(COUNT - 1) // T)
    inputs, targets, segments = rows[3]
    assert inputs.tolist() == list(range(3 * T, 4 * T))
    assert targets.tolist() == list(range(3 * T + 1, 4 * T + 1))
    assert set(segments) == {1}


def test_an_epoch_has_every_row_once(tmp_path):
    rows = open_rows(tmp_path, random_starts())
    batch = 7
    steps = -(-len(rows) // batch)
    drawn = np.concatenate([draw_rows(rows, "epoch", 3, step, batch) for step in range(steps)])
    assert sorted(drawn[: len(rows)]) == list(range(len(rows)))
    assert list(drawn[: len(rows)]) != list(range(len(rows)))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_rows_hold_what_fits(size):
    lengths = np.random.default_rng(size).integers(1, size + 1, 500)
    filled = np.bincount(pack_lengths(lengths, size), lengths)
    assert filled.max() <= size
    # Of two rows that are half empty, one could be spared.
    assert (filled <= size / 2).sum() <= 1


@pytest.mark.parametrize("starts", [[], [1, 5], [0, 5, 5], [0, 9, 4]])
def test_damaged_documents_are_rejected(tmp_path, starts):
    with pytest.raises(TextError, match="damaged"):
        open_rows(tmp_path, starts)


def test_documents_of_one_token_are_nothing_to_train_on(tmp_path):
    with pytest.raises(TextError, match="two tokens or more"):
        open_rows(tmp_path, np.arange(COUNT))


@pytest.mark.parametrize("name", ["train-00002.bin.answers", "train-00002.bin.documents"])
def test_a_file_beside_a_shard_that_is_cut_short_is_named(tmp_path, name):
    open_rows(tmp_path, [0, 160, 170], answers={"train": np.ones(COUNT), "val": np.ones(COUNT)})
    file = tmp_path / name
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TextError, match=f"{name} has .* bytes, and .* numbers"):
        TokenFolder(tmp_path)
    file.unlink()
    with pytest.raises(TextError, match=f"{name} is missing"):
        TokenFolder(tmp_path)


def test_answers_of_some_shards_alone_are_rejected(tmp_path):
    open_rows(tmp_path, [0], answers={"train": np.ones(COUNT), "val": np.ones(COUNT)})
    index = json.loads((tmp_path / "index.json").read_text())
    del index["splits"]["train"]["shards"][3]["answers"]
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(TextError, match="some shards have answers, and some have none"):
        TokenFolder(tmp_path)
