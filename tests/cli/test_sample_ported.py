"""``jaxformer sample`` and ``inspect`` on whatever can be ported."""

import importlib.util
import json

import numpy as np
import pytest
import torch

from jaxformer.cli.main import main
from jaxformer.data.text_generation import decode_stream
from jaxformer.generation import generate
from jaxformer.porting.api import build
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.text_models import plan_language_model
from tests.support.ported import (
    CONFIG,
    VOCABULARY,
    gpt2_state,
    hugging_face,
    nanogpt,
    port,
    run_rejected,
)
from tests.support.tiers import full_after

tokenizers = pytest.importorskip("tokenizers")


def sample(capsys, *arguments):
    capsys.readouterr()
    assert main(["sample", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err.startswith("first token after ")
    assert len(captured.err.splitlines()) == 1
    return captured.out


def expected(path, ids, count):
    """What the model makes of the ids, greedily."""
    model = build(plan_language_model(open_checkpoint(path)))
    return generate(model, np.array([ids]), count, greedy=True)[0].tolist()


def write_tokenizer(path):
    """Thirty tokens of bytes and pairs of bytes, and the one that ends a text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=30, show_progress=False)
    tokenizer.train_from_iterator(["the cat sat on the mat ü", "that hat, the cat"], trainer)
    assert tokenizer.get_vocab_size() == 30
    assert tokenizer.add_special_tokens(["<end>"]) == 1
    assert tokenizer.token_to_id("<end>") == 30
    tokenizer.save(str(path))
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    path = hugging_face(tmp_path / "hf", gpt2_state())
    write_tokenizer(path / "tokenizer.json")
    return path


@pytest.fixture
def nano(tmp_path):
    return nanogpt(tmp_path / "nano")


def test_a_hugging_face_folder_writes_text(capsys, folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("the cat").ids
    made = expected(folder, ids, 12)
    end = made.index(30) if 30 in made else len(made)
    text = sample(capsys, folder, "--prompt", "the cat", "--greedy", "--tokens", 12)
    whole = tokenizer.decode([*ids, *made[:end]])
    assert whole.startswith("the cat")
    assert text.rstrip("\n") == whole.rstrip("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("target", ["run", "out.safetensors", "out.pt", "hf2"])
def test_the_text_is_the_same_wherever_the_model_goes(capsys, folder, target):
    flags = ["--prompt", "that", "--tokens", 9, "--seed", 5]
    before = sample(capsys, folder, *flags)
    port(folder, target, *(["--to", "hf"] if target == "hf2" else []))
    # A single file leaves the tokenizer where it is.
    meta = ["--meta", folder / "tokenizer.json"] if "." in target else []
    assert sample(capsys, target, *flags, *meta) == before


def test_a_tokenizer_given_by_hand_goes_along(capsys, folder):
    (folder / "tokenizer.json").rename("words.json")
    port(folder, "run", "--meta", "words.json")
    flags = ["--prompt", "that", "--tokens", 5]
    assert sample(capsys, "run", *flags) == sample(capsys, folder, *flags, "--meta", "words.json")


def test_a_text_ends_where_the_model_ends_it(capsys, folder, monkeypatch):
    ids = [3, 4]
    made = expected(folder, ids, 12)
    config = json.loads((folder / "config.json").read_text())
    # The end of a text is whatever the settings say: here the fifth token, or one of several.
    for last in (made[4], [29, made[4]]):
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": last}))
        (folder / "tokenizer.json").unlink(missing_ok=True)
        end = made.index(made[4])
        text = sample(capsys, folder, "--prompt-ids", "3,4", "--greedy", "--tokens", 12)
        assert [int(i) for i in text.split()] == [*ids, *made[:end]]
        port(folder, "run", "--overwrite")
        assert sample(capsys, "run", "--prompt-ids", "3,4", "--greedy", "--tokens", 12) == text
    # The second of the ids stands in generation_config.json alone.
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 29}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [29, made[4]]}))
    assert sample(capsys, folder, "--prompt-ids", "3,4", "--greedy", "--tokens", 12) == text


def test_without_a_tokenizer_ids_go_in_and_out(capsys, folder):
    (folder / "tokenizer.json").unlink()
    code, line = run_rejected("sample", folder, "--prompt", "the")
    assert code == 2
    assert "there is no tokenizer: give --meta FILE" in line
    assert "--prompt-ids 1,2,3" in line
    made = expected(folder, [7, 1, 2], 5)
    text = sample(capsys, folder, "--prompt-ids", "7,1,2", "--greedy", "--tokens", 5)
    assert text == " ".join(map(str, [7, 1, 2, *made])) + "\n"


def test_without_the_package_the_extra_is_named_and_ids_still_work(capsys, folder, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda n, *a: None if n == "tokenizers" else find(n, *a)
    )
    code, line = run_rejected("sample", folder, "--prompt", "the")
    assert code == 2
    assert "[hf]'" in line
    assert sample(capsys, folder, "--prompt-ids", "7", "--tokens", 3).startswith("7 ")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--prompt-ids", "1,x"], 2, "--prompt-ids must be numbers"),
        (["--prompt-ids", "-1"], 2, "--prompt-ids"),
        (["--prompt-ids", "31"], 3, "id 31 of the prompt is outside the model's 31 tokens"),
        (["--prompt-ids", "1", "--prompt", "a"], 2, "exclude each other"),
        (["--step", "1"], 2, "has one checkpoint alone"),
        (["--dialect", "klingon"], 2, "no dialect klingon"),
        (["--meta", "nowhere.pkl"], 4, "nowhere.pkl does not exist"),
    ],
)
def test_what_cannot_be_sampled_is_rejected(folder, flags, code, words):
    found, line = run_rejected("sample", folder, *flags)
    assert (found, words in line) == (code, True), line


def test_a_broken_tokenizer_is_rejected(folder):
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    code, line = run_rejected("sample", folder, "--prompt", "the")
    assert code == 3
    assert "tokenizer.json is no tokenizer" in line


def test_a_nanogpt_checkpoint_writes_its_characters(capsys, nano):
    ids = [VOCABULARY.index(c) for c in "abc"]
    made = expected(nano, ids, 20)
    text = sample(capsys, nano, "--prompt", "abc", "--greedy", "--tokens", 20)
    assert text == "abc" + "".join(VOCABULARY[i] for i in made) + "\n"
    code, line = run_rejected("sample", nano, "--prompt", "abX")
    assert code == 3
    assert "character 'X' (U+0058) at position 2" in line
    assert sample(capsys, nano, "--prompt", "abX", "--unknown", "skip", "--tokens", 3)
    # Nothing to begin with: a new line, which is not shown.
    assert len(sample(capsys, nano, "--tokens", 7)) == 8


def test_a_vocabulary_too_large_for_the_model_is_rejected(nano):
    import pickle

    table = dict(enumerate(VOCABULARY + "xyz"))
    (nano.parent / "meta.pkl").write_bytes(pickle.dumps({"itos": table}))
    code, line = run_rejected("sample", nano)
    assert code == 3
    assert "the vocabulary has 14 characters and the model 11" in line


def test_an_encoder_does_not_write(tmp_path):
    config = {**CONFIG, "architectures": ["GPT2Model"]}
    state = {name.removeprefix("transformer."): t for name, t in gpt2_state().items()}
    path = hugging_face(tmp_path / "body", state, config=config)
    code, line = run_rejected("sample", path, "--prompt-ids", "1")
    assert code == 2
    assert "only a causal model with a head writes text" in line


@pytest.mark.parametrize("dtype", full_after(1, ["bfloat16", "float16", "float64"]))
def test_other_dtypes_write_too(capsys, folder, dtype):
    port(folder, "out", "--dtype", dtype)
    text = sample(capsys, "out", "--prompt", "the", "--greedy", "--tokens", 4)
    assert text.startswith("the")
    if dtype == "float64":
        assert text == sample(capsys, folder, "--prompt", "the", "--greedy", "--tokens", 4)


def test_characters_cut_by_a_token_are_written_whole():
    class Bytes:
        """A token a byte."""

        def vocabulary_size(self):
            return 256

        def decode(self, ids):
            return bytes(map(int, ids)).decode("utf-8", errors="replace")

    data = "für €5, 日本".encode()
    chunks = [np.array([[b]]) for b in data]
    parts = list(decode_stream(Bytes(), np.array(list(b"a ")), iter(chunks), []))
    assert "".join(parts) == "für €5, 日本"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts)
    ended = list(decode_stream(Bytes(), np.array([97]), iter(chunks), [data[4]]))
    assert "".join(ended) == "für"


def test_inspections_take_ported_models(capsys, nano, empty_folder):
    out = ["--out", "maps.json"]
    assert main(["inspect", "attention", str(nano), "--text", "abc", *out]) == 0
    numbers = json.loads((empty_folder / "maps.json").read_text())
    assert np.shape(numbers["weights"]) == (2, 1, 3, 3)
    torch.save({}, "empty.pt")
    code, line = run_rejected("inspect", "positions", "empty.pt")
    assert code == 4
    assert "it is empty" in line
