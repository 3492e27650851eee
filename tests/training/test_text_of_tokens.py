"""Training on a text with a tokenizer, and what is rejected because it is no text."""

import json

import numpy as np
import pytest

from jaxformer.cli.main import main
from jaxformer.data.corpora import load_corpus
from jaxformer.training.run_folder import stored_config
from tests.support.tiny import losses, records, resume, same_run, train, train_arguments
from tests.support.tokens import SIZE, corpus, tokenizer


@pytest.fixture
def docs(tmp_path):
    path = tmp_path / "docs.txt"
    path.write_text(corpus()[:30_000])
    return path


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "tokenizer"
    path.mkdir()
    tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.tier("full")
def test_a_text_becomes_tokens_of_the_named_tokenizer(docs, folder, tmp_path, capsys):
    flags = ["--tokenizer", folder, "--steps", 10]
    assert train(docs, tmp_path / "run", *flags) == 0
    shown = capsys.readouterr().out
    assert f"tokens of {SIZE}" in shown
    assert "nats/token · perplexity" in shown
    assert "bits/byte" in shown
    assert "char" not in shown.replace("characters", "")
    assert stored_config(tmp_path / "run").model.vocab_size == SIZE
    assert main(["sample", str(tmp_path / "run"), "--prompt", "import", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("import")


@pytest.mark.tier("full")
def test_bytes_are_the_tokens_of_any_text(docs, tmp_path, capsys):
    docs.write_text(docs.read_text()[:9000] + "é🙂 naïve\n" * 200)
    flags = ["--tokenizer", "bytes", "--decay-steps", 20]
    assert train(docs, tmp_path / "whole", *flags, "--steps", 20) == 0
    assert "tokens of 257" in " ".join(capsys.readouterr().out.split())
    assert train(docs, tmp_path / "cut", *flags, "--steps", 10) == 0
    assert resume(tmp_path / "cut", "--steps", 20) == 0
    same_run(tmp_path / "cut", tmp_path / "whole", 20)
    # A token is a byte, so that bits per byte are those of the loss.
    final = records(tmp_path / "whole")[-1]
    assert final["val_bits_per_byte"] == pytest.approx(final["val_loss"] / np.log(2), rel=1e-12)
    assert main(["sample", str(tmp_path / "whole"), "--prompt", "é", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("é")


@pytest.mark.tier("full")
def test_it_resumes_without_the_tokenizers_file(docs, folder, tmp_path):
    flags = ["--tokenizer", folder, "--decay-steps", 20]
    assert train(docs, tmp_path / "whole", *flags, "--steps", 20) == 0
    assert train(docs, tmp_path / "cut", *flags, "--steps", 10) == 0
    (folder / "tokenizer.json").unlink()
    assert resume(tmp_path / "cut", "--steps", 20) == 0
    same_run(tmp_path / "cut", tmp_path / "whole", 20)


@pytest.mark.tier("full")
def test_a_window_may_be_shorter_than_the_context(docs, tmp_path):
    assert train(docs, tmp_path / "a", "--steps", 3, "--block-size", 5, "--positions", "none") == 0
    flags = ["--steps", 3, "--context-length", 5, "--positions", "none"]
    assert train(docs, tmp_path / "b", *flags) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")


def test_a_window_longer_than_the_context_is_rejected(refuse, docs):
    refuse(train_arguments(docs, "out", "--block-size", 9), 2, "block_size=9, context_length=8")


@pytest.mark.parametrize("preset", ["gpt2-small", "llama-7b"])
def test_a_preset_of_tokens_wants_a_tokenizer(refuse, docs, preset):
    arguments = ["train", "--preset", preset, "--data", docs]
    refuse(arguments, 2, "is a model of tokens", "--tokenizer", "--init-from")


def test_a_file_of_ids_is_no_text(refuse, docs, tmp_path):
    ids = np.arange(500, dtype=np.uint16)
    ids.tofile(tmp_path / "train.bin")
    refuse(train_arguments(tmp_path / "train.bin", "out"), 3, f"--data {tmp_path}")
    (tmp_path / "ids").write_bytes(np.arange(500, dtype=np.uint32).astype(">u2").tobytes()[:200])
    refuse(train_arguments(tmp_path / "ids", "out"), 3, "NUL at position 0", "is no text")


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt.gz", "a.parquet", "a.JSONL"])
def test_records_are_no_plain_text(refuse, tmp_path, name):
    (tmp_path / name).write_text(json.dumps({"text": "a" * 999}))
    refuse(train_arguments(tmp_path / name, "out"), 3, "jaxformer tokenize", name)


@pytest.mark.parametrize(
    "record", [{"text": "a"}, {"prompt": "a", "answer": "b"}, {"messages": []}]
)
def test_records_are_found_whatever_the_file_is_called(refuse, tmp_path, record):
    (tmp_path / "a.txt").write_text((json.dumps(record) + "\n") * 200)
    refuse(train_arguments(tmp_path / "a.txt", "out"), 3, "a.txt holds records of JSON", ".jsonl")


@pytest.mark.parametrize("line", ['{"level": 3}', '{"text": "a"', "{1: 2}"])
def test_other_lines_with_braces_are_text(tmp_path, line):
    (tmp_path / "a.txt").write_text((line + "\n") * 200)
    assert load_corpus(str(tmp_path / "a.txt")).text.startswith(line)


def test_a_missing_tokenizer_is_named(refuse, docs):
    refuse(train_arguments(docs, "out", "--tokenizer", "none"), 2, "--tokenizer none")


def test_meta_goes_with_init_from(refuse, docs):
    refuse(train_arguments(docs, "out", "--meta", "meta.pkl"), 2, "--meta goes with --init-from")
