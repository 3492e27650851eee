"""Datasets of the Hugging Face hub, from a stand-in on this machine."""

import gzip
import hashlib
import http.server
import json
import threading
import types

import pytest

from jaxformer.cli.main import main
from jaxformer.token_data import TokenFolder
from tests.support.tokens import tokenizer

pyarrow = pytest.importorskip("pyarrow")
from pyarrow import parquet  # noqa: E402

COMMIT = "0123456789abcdef" * 2 + "01234567"
NAME = f"some-one/small.texts@{COMMIT}"
TEXTS = [f"This is text number {n}. " * 20 for n in range(12)]


def blob_name(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def entry(path, data, *, is_large):
    found = {"type": "file", "path": path, "size": len(data), "oid": blob_name(data)}
    if is_large:
        found["oid"] = "f" * 40
        found["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}
    return found


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """This machine lists and serves a dataset, in pages, as the hub does; its files by path."""
    lines = [json.dumps({"text": text}) + "\n" for text in TEXTS]
    files = {"README.md": b"---\nlicense: mit\n---\n"}
    for number in range(2):
        path = tmp_path / "table.parquet"
        parquet.write_table(pyarrow.table({"text": TEXTS[6 * number : 6 * number + 6]}), path)
        files[f"data/train-0000{number}-of-00002.parquet"] = path.read_bytes()
    files["data/test-00000-of-00001.jsonl.gz"] = gzip.compress("".join(lines).encode(), mtime=0)
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            api = f"/api/datasets/some-one/small.texts/tree/{COMMIT}?recursive=true"
            resolve = f"/datasets/some-one/small.texts/resolve/{COMMIT}/"
            if self.path.startswith(api):
                entries = [entry(p, d, is_large="data" in p) for p, d in listed.items()]
                first = self.path == api
                page = [{"type": "directory", "path": "data"}, entries[0]] if first else entries[1:]
                self.send_response(200)
                if first:
                    self.send_header(
                        "Link", f'<http://{self.headers["Host"]}{api}&n=2>; rel="next"'
                    )
                self.end_headers()
                self.wfile.write(json.dumps(page).encode())
            elif self.path.startswith(resolve) and self.path[len(resolve) :] in files:
                # Large files lie elsewhere.
                self.send_response(302)
                self.send_header("Location", "/store/" + self.path[len(resolve) :])
                self.end_headers()
            elif self.path.startswith("/store/"):
                data = files[self.path.removeprefix("/store/")]
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            else:
                self.send_error(404)

        def log_message(self, *_):
            pass

    listed = dict(files)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{running.server_port}")
        yield types.SimpleNamespace(files=files, listed=listed, asked=asked)
        running.shutdown()
        thread.join()


def tokenize(tmp_path, out, *words):
    more = ["--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / out, "--workers", 1]
    return main(["tokenize", *map(str, (*words, *more))])


def test_a_dataset_is_fetched_once_and_tokenized(hub, tmp_path, capsys):
    words = [f"{NAME}/data/train-*.parquet", "--val", f"{NAME}/data/test-00000-of-00001.jsonl.gz"]
    assert tokenize(tmp_path, "out", *words, "--download") == 0
    assert "left out: README.md, data/test-00000" in capsys.readouterr().err
    (tmp_path / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    )
    val = ["--val", tmp_path / "train.jsonl"]
    assert tokenize(tmp_path, "local", tmp_path / "train.jsonl", *val) == 0
    splits = [TokenFolder(tmp_path / name).index["splits"] for name in ("out", "local")]
    for name in ("train", "val"):
        hashes = [[shard["sha256"] for shard in split[name]["shards"]] for split in splits]
        assert hashes[0] == hashes[1]
    # What was fetched is there, and the network is not asked again.
    hub.asked.clear()
    hub.files.clear()
    assert tokenize(tmp_path, "again", *words, "--download") == 0
    assert hub.asked == []


def test_nothing_unknown_is_fetched(hub, tmp_path, capsys):
    name = f"{NAME}/data/train-*.parquet"
    damaged = "data/train-00001-of-00002.parquet"
    hub.files[damaged] = hub.files[damaged][:-1] + b"?"
    cases = [
        ([name], 2, "is fetched with --download, as OWNER/NAME@COMMIT"),
        (["some-one/small.texts"], 2, "is fetched with --download, as OWNER/NAME@COMMIT"),
        (["some-one/small.texts", "--download"], 2, "wants a dataset with its commit"),
        (["some-one/small.texts@main", "--download"], 2, "wants a dataset with its commit"),
        ([f"no/one@{COMMIT}", "--download"], 7, "404"),
        ([NAME, "--download"], 2, "name one, such as"),
        ([f"{NAME}/none", "--download"], 2, "has no text, JSONL or Parquet"),
        ([name, "--download"], 3, "is not the file that the hub has listed"),
    ]
    for words, code, reason in cases:
        capsys.readouterr()
        assert tokenize(tmp_path, "out", *words) == code, words
        error = capsys.readouterr().err.splitlines()
        assert reason in error[-1]
        assert [line for line in error if "MB to fetch" not in line] == error[-1:]
        assert not (tmp_path / "out").exists()
        if "--download" not in words or COMMIT not in words[0]:
            assert hub.asked == []
    kept = {path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    assert kept == {".listing.json", "train-00000-of-00002.parquet"}


@pytest.mark.parametrize("path", ["../../x.txt", "/x.txt", "data/../../x.txt"])
def test_a_path_out_of_the_dataset_is_rejected(hub, tmp_path, capsys, path):
    hub.listed[path] = b"abc"
    assert tokenize(tmp_path, "out", NAME, "--download") == 3
    assert "is no path in a dataset" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()
