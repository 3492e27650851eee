"""Folders of tokens: the ids of one call, from every kind of file, and killed at any moment."""

import contextlib
import gzip
import itertools
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxformer.cli.main import main
from jaxformer.data import encoding, sources, tokenization
from jaxformer.data.shards import PROGRESS
from jaxformer.token_data import INDEX, TokenFolder
from tests.support.ported import CONFIG, gpt2_state, hugging_face
from tests.support.tiers import full_after
from tests.support.tiny import ROOT, snapshot, train
from tests.support.tokens import SIZE, corpus, tokenizer

pyarrow = pytest.importorskip("pyarrow")
zstandard = pytest.importorskip("zstandard")

DOCUMENTS = [corpus()[begin : begin + 700] for begin in range(0, 42_000, 700)]
END = "<|endoftext|>"
RECORDS = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()


@pytest.fixture
def made(tmp_path):
    """A tokenizer in a folder as Hugging Face saves it."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}}))
    return folder


@pytest.fixture
def small_pieces(monkeypatch):
    """A text of a few thousand characters has many pieces."""
    for module in (encoding, sources, tokenization):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 1500, raising=False)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 999)


def tokenize(*arguments, workers=1):
    return main(["tokenize", *map(str, arguments), "--workers", str(workers)])


def expected(texts):
    ids = []
    for text in texts:
        ids += tokenizer().encode(text, add_special_tokens=False).ids
        ids.append(tokenizer().token_to_id(END))
    return ids


def ids_of(split):
    return split.read(0, len(split)).tolist()


@pytest.mark.parametrize("form", ["Hugging Face", "run"])
@pytest.mark.parametrize("config", [{"eos_token_id": 7}, {"eos_token_id": [7, 9]}])
def test_the_model_in_the_folder_says_what_ends_a_text_where_the_tokenizer_does_not(
    made, tmp_path, form, config
):
    (made / "tokenizer_config.json").unlink()
    folder = hugging_face(tmp_path / "model", gpt2_state(), config={**CONFIG, **config})
    shutil.copy(made / "tokenizer.json", folder)
    if form == "run":
        assert main(["port", str(folder), str(tmp_path / "run")]) == 0
        folder = tmp_path / "run"
    (tmp_path / "a.jsonl").write_bytes(RECORDS)
    assert tokenize(tmp_path / "a.jsonl", "--tokenizer", folder, "--out", tmp_path / "out") == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert index["end_of_text"] == 7
    # What the tokenizer's own settings name comes first, and a flag before that.
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    for flags, end in (([], END), (["--end-of-text", "a"], "a")):
        out = tmp_path / end[-1]
        assert tokenize(tmp_path / "a.jsonl", "--tokenizer", folder, "--out", out, *flags) == 0
        index = json.loads((out / "index.json").read_text())
        assert index["end_of_text"] == tokenizer().token_to_id(end)


def test_a_text_gives_the_ids_of_one_call(made, tmp_path, small_pieces, capsys):
    text = corpus()[:30_000].replace(".", ". é🙂")
    (tmp_path / "a.txt").write_bytes(text.replace("\n", "\r\n").encode("utf-8-sig"))
    flags = ["--tokenizer", made, "--val-fraction", 0.2, "--shard-tokens", 1000]
    assert tokenize(tmp_path / "a.txt", *flags, "--out", tmp_path / "out") == 0
    folder = TokenFolder(tmp_path / "out")
    train_ids, val_ids = ids_of(folder.train), ids_of(folder.val)
    cut = len(tokenizer().decode(train_ids[:-1]))
    assert train_ids == expected([text[:cut]])
    assert val_ids == expected([text[cut:]])
    assert 0.78 < cut / len(text) < 0.84
    assert folder.index["splits"]["val"]["bytes"] == len(text[cut:].encode())
    assert [shard["tokens"] for shard in folder.index["splits"]["train"]["shards"]][:2] == [
        1000
    ] * 2
    assert f"{SIZE:,} different tokens, uint16" in capsys.readouterr().out
    assert tokenize("--check", "--out", tmp_path / "out") == 0


def write_records(path):
    """Writes the documents as records, in a file or folder of the kind that its name says."""
    lines = "".join(json.dumps({"body": text}) + "\n" for text in DOCUMENTS).encode()
    table = pyarrow.table({"body": DOCUMENTS, "n": list(range(len(DOCUMENTS)))})
    if path.suffix == ".parquet":
        from pyarrow import parquet

        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines[:5000]) + gzip.compress(lines[5000:]))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(lines[:5000]) + zstandard.compress(lines[5000:]))
    elif path.suffix == ".jsonl":
        path.write_bytes(lines)
    else:
        # As datasets.save_to_disk leaves it.
        path.mkdir()
        with (
            pyarrow.OSFile(str(path / "data-00000-of-00001.arrow"), "wb") as file,
            pyarrow.ipc.new_stream(file, table.schema) as stream,
        ):
            stream.write_table(table, max_chunksize=7)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (path / "state.json").write_text(json.dumps(state))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "dataset"])
def test_records_are_documents_whatever_holds_them(made, tmp_path, name):
    source = write_records(tmp_path / name)
    flags = ["--tokenizer", made, "--field", "body", "--val-fraction", 0.1, "--shard-tokens", 999]
    assert tokenize(source, *flags, "--out", tmp_path / "out") == 0
    folder = TokenFolder(tmp_path / "out")
    assert ids_of(folder.val) == expected(DOCUMENTS[::10])
    assert ids_of(folder.train) == expected(d for i, d in enumerate(DOCUMENTS) if i % 10)
    # Where documents begin, over all shards.
    begins, before = [], 0
    for shard in folder.index["splits"]["train"]["shards"]:
        places = np.fromfile(tmp_path / "out" / shard["documents"]["file"], "<u8")
        begins += (places + before).tolist()
        before += shard["tokens"]
    ids = np.array(ids_of(folder.train))
    ends = np.flatnonzero(ids == tokenizer().token_to_id(END))
    assert begins == [0, *(ends[:-1] + 1)]


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", ["a.txt.gz", "a.txt.zst"])
def test_a_compressed_text_is_that_text(made, tmp_path, name):
    text = corpus()[:20_000]
    (tmp_path / "a.txt").write_text(text)
    packed = gzip.compress if name.endswith("gz") else zstandard.compress
    (tmp_path / name).write_bytes(packed(text.encode()))
    for source, out in (("a.txt", "one"), (name, "two")):
        flags = ["--tokenizer", made, "--val-fraction", 0.1, "--out", tmp_path / out]
        assert tokenize(tmp_path / source, *flags) == 0
    one, two = (TokenFolder(tmp_path / out) for out in ("one", "two"))
    assert one.index == two.index


def test_several_workers_make_the_same_files(made, tmp_path, monkeypatch):
    # A file of the user's with the name of a module of Python is none of the workers'.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "types.py").write_text("raise RuntimeError('of the user')")
    source = write_records(tmp_path / "a.jsonl")
    for workers in (1, 2):
        flags = ["--tokenizer", made, "--field", "body", "--val-fraction", 0.1]
        assert tokenize(source, *flags, "--out", tmp_path / f"{workers}", workers=workers) == 0
    same_files(tmp_path / "1", tmp_path / "2")


def same_files(first, second):
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_ended_at_any_moment_it_goes_on(made, tmp_path, monkeypatch, small_pieces):
    source = write_records(tmp_path / "a.jsonl")
    flags = [source, "--tokenizer", made, "--field", "body", "--shard-tokens", 500]
    flags += ["--val-fraction", 0.1, "--out"]
    assert tokenize(*flags, tmp_path / "whole") == 0
    generator = random.Random(3)
    encode, attempts = tokenization.encode_parts, 0
    # Half of the time what was done is stored, half of the time it is lost.
    monkeypatch.setattr(tokenization, "SECONDS_PER_COMMIT", 0.0)

    def fail_at_random(*arguments):
        if generator.random() < 0.15:
            raise OSError(28, "No space left on device")
        return encode(*arguments)

    monkeypatch.setattr(tokenization, "encode_parts", fail_at_random)
    while (code := tokenize(*flags, tmp_path / "cut")) != 0:
        assert code == 7
        attempts += 1
        for part in (tmp_path / "cut").glob(".*.part"):
            with part.open("ab") as file:
                file.write(b"written, and not yet known to be on the disk")
    assert attempts > 3
    same_files(tmp_path / "whole", tmp_path / "cut")


class Killed(BaseException):
    """Stands for a signal that nothing can catch."""


def test_killed_before_any_rename_or_removal_it_goes_on(made, tmp_path, monkeypatch):
    source = write_records(tmp_path / "a.jsonl")
    flags = [source, "--tokenizer", made, "--field", "body", "--shard-tokens", 2000]
    flags += ["--val-fraction", 0.1, "--out"]
    assert tokenize(*flags, tmp_path / "whole") == 0
    monkeypatch.setattr(tokenization, "SECONDS_PER_COMMIT", 0.0)

    changes = [(name, getattr(Path, name)) for name in ("replace", "unlink", "rmdir")]

    def die_after(patch, allowed):
        calls = itertools.count()
        for name, change in changes:

            def replaced(*arguments, change=change, **named):
                if next(calls) >= allowed:
                    raise Killed
                return change(*arguments, **named)

            patch.setattr(Path, name, replaced)

    for allowed in range(100):
        cut, code = tmp_path / f"cut{allowed}", None
        with monkeypatch.context() as patch, contextlib.suppress(Killed):
            die_after(patch, allowed)
            code = tokenize(*flags, cut)
        if code == 0:
            break
        assert tokenize(*flags, cut) == 0, allowed
        same_files(tmp_path / "whole", cut)
    assert 10 < allowed < 99


@pytest.mark.tier("full")
def test_killed_at_random_it_goes_on(made, tmp_path):
    (tmp_path / "a.txt").write_text(corpus() * 12)
    flags = [tmp_path / "a.txt", "--tokenizer", made, "--shard-tokens", 300_000, "--out"]
    assert tokenize(*flags, tmp_path / "whole") == 0
    script = (
        "import sys; from jaxformer.data import tokenization; "
        "tokenization.SECONDS_PER_COMMIT = 0.05; "
        "from jaxformer.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", script, "tokenize", *flags, tmp_path / "cut", "--workers", "2"]
    generator, kills = random.Random(1), 0
    # A process that is killed after it has removed what it needed has made all of it.
    cut = tmp_path / "cut"
    while not (cut / INDEX).exists() or (cut / PROGRESS).exists():
        process = subprocess.Popen([str(part) for part in command], cwd=ROOT)
        try:
            assert process.wait(0.5 + 2 * generator.random() if kills < 10 else 300) == 0
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            kills += 1
    assert kills
    same_files(tmp_path / "whole", tmp_path / "cut")


def test_a_tokenizer_is_trained_on_the_texts(tmp_path, capsys):
    (tmp_path / "a.txt").write_text(corpus()[:50_000])
    flags = ["--train-bpe", 400, "--val-fraction", 0.1, "--out", tmp_path / "out"]
    assert tokenize(tmp_path / "a.txt", *flags) == 0
    assert TokenFolder(tmp_path / "out").vocab_size == 400
    assert train(tmp_path / "out", tmp_path / "run", "--steps", 10) == 0
    assert "bits/byte" in capsys.readouterr().out
    assert main(["sample", str(tmp_path / "run"), "--prompt", "the", "--tokens", "3"]) == 0


@pytest.mark.parametrize("kind", full_after(1, ["chars", "bytes"]))
@pytest.mark.tier("full")
def test_characters_and_bytes_are_tokens_too(tmp_path, kind, capsys):
    text = "naïve café. " * 300
    (tmp_path / "a.txt").write_text(text)
    flags = ["--tokenizer", kind, "--val-fraction", 0.1, "--out", tmp_path / "out"]
    assert tokenize(tmp_path / "a.txt", *flags) == 0
    folder = TokenFolder(tmp_path / "out")
    ids = ids_of(folder.train)
    if kind == "bytes":
        assert (bytes(ids[:-1]).decode() + "x").startswith("naïve")
        assert ids[-1] == 256
    else:
        assert "".join(folder.index["vocabulary"][i] for i in ids) in text
    assert train(tmp_path / "out", tmp_path / "run", "--steps", 2) == 0
    assert main(["sample", str(tmp_path / "run"), "--prompt", "naï", "--tokens", "3"]) == 0
    assert "naï" in capsys.readouterr().out


def refused(tmp_path, capsys, arguments, code, *words):
    """The command ends with one line, and leaves what was there as it was."""
    before = snapshot(tmp_path)
    assert tokenize(*arguments) == code
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1, error
    for word in words:
        assert word in error[0]
    return snapshot(tmp_path) == before


def test_a_table_without_the_column_is_told_from_a_damaged_one(made, tmp_path, capsys):
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"body": ["text"]}), path)
    flags = [path, "--tokenizer", made, "--out", tmp_path / "out"]
    refused(tmp_path, capsys, flags, 3, "has no 'text': name the field of the text")
    path.write_bytes(path.read_bytes()[:-5])
    refused(tmp_path, capsys, flags, 3, "a.parquet cannot be read: ")


def test_what_cannot_work_is_rejected(made, tmp_path, capsys):
    text = tmp_path / "a.txt"
    text.write_text(corpus()[:3000])
    out = ["--out", tmp_path / "out"]
    use = ["--tokenizer", made, *out]
    cases = [
        ([text, *out], 2, ["--train-bpe"]),
        ([text, "--tokenizer", made], 2, ["--out"]),
        ([*use], 2, ["name a file"]),
        ([tmp_path / "none", *use], 2, ["does not exist"]),
        ([text, "--tokenizer", tmp_path / "none", *out], 2, ["there is no"]),
        ([text, *use, "--val-fraction", 1], 2, ["must be in [0, 1)"]),
        ([text, "--train-bpe", 100, *out], 2, ["at least 257"]),
        ([text, *use, "--end-of-text", "nothing"], 2, ["nothing is no token"]),
        (
            [text, "--tokenizer", "bytes", "--end-of-text", "nothing", *out],
            2,
            ["nothing is no token"],
        ),
        ([text, "--train-bpe", 300, "--end-of-text", "nothing", *out], 2, ["nothing is no token"]),
        ([text, "--tokenizer", "chars", "--end-of-text", "no", *out], 2, ["have no such token"]),
    ]
    for arguments, code, words in cases:
        assert refused(tmp_path, capsys, arguments, code, *words), arguments


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"good \xff bad", ["is not utf-8: byte 0xff near offset 5"]),
        ("a.txt", b"good \0 bad", ["NUL near offset 5"]),
        ("a.jsonl", b'{"text": "a"}\nno json\n', ["line 2", "no JSON"]),
        ("a.jsonl", b'{"body": "a"}\n', ["line 1", "has no 'text'", "--field"]),
        ("a.jsonl", b'{"text": 3}\n', ["line 1", "no text"]),
        (
            "a.jsonl",
            b'{"text": "\\ud83d\\ude00"}\n{"text": "\\ud83d half"}\n',
            ["line 2", "has half a surrogate pair"],
        ),
        ("a.jsonl", b'{"text": "\xed\xa0\xbd half"}\n', ["line 1", "has half a surrogate pair"]),
        ("a.jsonl.gz", b"no gzip", ["is damaged"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-20], ["cut short"]),
        ("a.jsonl.zst", zstandard.compress(RECORDS)[:-9], ["cut short"]),
        ("a.parquet", b"no parquet", ["cannot be read"]),
    ],
)
def test_damaged_sources_are_named(made, tmp_path, capsys, name, content, words):
    (tmp_path / name).write_bytes(content)
    arguments = [tmp_path / name, "--tokenizer", made, "--out", tmp_path / "out"]
    refused(tmp_path, capsys, arguments, 3, name, *words)


def test_other_settings_do_not_go_on(made, tmp_path, capsys, monkeypatch):
    sources = [write_records(tmp_path / f"{name}.jsonl") for name in "ab"]
    flags = [*sources, "--tokenizer", made, "--field", "body", "--out", tmp_path / "out"]
    flags += ["--workers", 1]
    encode, calls = tokenization.encode_parts, []

    def encode_once(*arguments):
        calls.append(None)
        if len(calls) > 1:
            raise KeyError
        return encode(*arguments)

    monkeypatch.setattr(tokenization, "encode_parts", encode_once)
    assert tokenize(*flags) == 1
    monkeypatch.undo()
    capsys.readouterr()
    other = [*flags, "--val-fraction", 0.3]
    assert refused(tmp_path, capsys, other, 2, "other settings (val_fraction)")
    assert tokenize(*flags) == 0
    capsys.readouterr()
    assert refused(tmp_path, capsys, flags, 2, "holds tokens already")


def test_an_empty_split_is_named(made, tmp_path, capsys):
    source = write_records(tmp_path / "a.jsonl")
    flags = [source, "--tokenizer", made, "--field", "body", "--out", tmp_path / "out"]
    refused(tmp_path, capsys, [*flags, "--val-fraction", 0], 3, "val split is empty")
    # Nothing was made, so that other settings may be tried.
    assert tokenize(*flags, "--val-fraction", 0.3) == 0
    (tmp_path / "empty.txt").write_text("")
    flags = [tmp_path / "empty.txt", "--tokenizer", made, "--out", tmp_path / "none"]
    refused(tmp_path, capsys, flags, 3, "the train split is empty: give more text")


@pytest.mark.parametrize("kind", [("--tokenizer", "bytes"), ("--train-bpe", 300)])
def test_no_token_ends_a_text_where_none_is_asked_for(kind, tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 50)
    flags = [tmp_path / "a.txt", *kind, "--val-fraction", 0.2]
    assert tokenize(*flags, "--out", tmp_path / "with") == 0
    assert tokenize(*flags, "--end-of-text", "none", "--out", tmp_path / "without") == 0
    with_end, without = (TokenFolder(tmp_path / name) for name in ("with", "without"))
    end = with_end.index["end_of_text"]
    assert without.index["end_of_text"] is None
    last = [int(f.val.read(len(f.val) - 1, 1)[0]) for f in (with_end, without)]
    assert last[0] == end != last[1]


def test_a_folder_with_other_files_is_left_alone(made, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "novel.txt").write_text("text")
    (tmp_path / "a.txt").write_text("text")
    flags = [tmp_path / "a.txt", "--tokenizer", made, "--out", tmp_path / "out"]
    assert refused(tmp_path, capsys, flags, 2, "is not empty (novel.txt)")


def test_check_finds_one_flipped_bit(made, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(corpus()[:5000])
    flags = ["--tokenizer", made, "--val-fraction", 0.1, "--out", tmp_path / "out"]
    assert tokenize(tmp_path / "a.txt", *flags) == 0
    capsys.readouterr()
    damaged = "is damaged: its SHA-256 is another"
    for name, words in (
        ("train-00000.bin", damaged),
        ("val-00000.documents", damaged),
        ("tokenizer.json", "is not the tokenizer that made the ids"),
    ):
        path = tmp_path / "out" / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        assert tokenize("--check", "--out", tmp_path / "out") == 3
        assert f"{name} {words}" in capsys.readouterr().err
        path.write_bytes(whole)


def test_check_reads_ids_and_an_empty_split(made, tmp_path, capsys):
    (tmp_path / "a.txt").write_text(corpus()[:5000])
    flags = ["--tokenizer", made, "--val-fraction", 0.1, "--out", tmp_path / "out"]
    assert tokenize(tmp_path / "a.txt", *flags) == 0
    file = tmp_path / "out" / "index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(index | {"vocab_size": 300}))
    assert tokenize("--check", "--out", tmp_path / "out") == 3
    assert "outside of 300 tokens" in capsys.readouterr().err
    index["splits"]["val"] = {"tokens": 0, "documents": 0, "bytes": 0, "shards": []}
    file.write_text(json.dumps(index))
    assert tokenize("--check", "--out", tmp_path / "out") == 0
    assert "val: 0 tokens" in capsys.readouterr().out


def test_separate_texts_to_validate_with(made, tmp_path):
    (tmp_path / "texts").mkdir()
    for n in range(3):
        (tmp_path / "texts" / f"{n}.txt").write_text(DOCUMENTS[n])
    (tmp_path / "val.txt").write_text(DOCUMENTS[5])
    flags = ["--val", tmp_path / "val.txt", "--tokenizer", made, "--out", tmp_path / "out"]
    assert tokenize(tmp_path / "texts", *flags) == 0
    folder = TokenFolder(tmp_path / "out")
    assert ids_of(folder.train) == expected(DOCUMENTS[:3])
    assert ids_of(folder.val) == expected(DOCUMENTS[5:6])
