"""``train.py --init-from`` with an encoder and decoder: a small T5 learns answers to prompts."""

import json
import re

import numpy as np
import pytest
import tokenizers
import torch
import transformers

import jaxformer
from jaxformer.cli.main import main
from jaxformer.encoder_decoder import EncoderDecoder
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.training.config import PairTrainConfig
from jaxformer.training.run_folder import stored_config
from tests.support.tiers import SLOW
from tests.support.tiny import losses, manifest, records, resume
from tests.support.tokens import END, SIZE, tokenizer, write_t5

FLAGS = [
    "--devices", 1, "--batch-size", 4, "--steps-per-call", 3, "--learning-rate", 1e-2,
    "--eval-interval", 5, "--checkpoint-interval", 5, "--sampling", "epoch",
]  # fmt: skip
WORDS = ["module", "function", "class", "value", "list"]


def write_answers(path, count=40):
    """Records whose answer is in their prompt."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(count):
        words = random.choice(WORDS, random.integers(1, 5)).tolist()
        lines.append(json.dumps({"prompt": " ".join(words), "answer": words[-1]}))
    path.write_text("\n".join(lines))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A T5, and a folder of tokens of prompts and answers."""
    path = tmp_path_factory.mktemp("pairs")
    torch.manual_seed(0)
    write_t5(path / "t5")
    write_answers(path / "answers.jsonl")
    command = ["tokenize", path / "answers.jsonl", "--tokenizer", path / "t5"]
    run(*command, "--val-fraction", 0.2, "--out", path / "tokens")
    return path


def run(*arguments, code=0):
    assert main([str(argument) for argument in arguments]) == code


def train(folder, out, *more, code=0):
    data = [] if "--data" in more else ["--data", folder / "tokens"]
    run("train", "--init-from", folder / "t5", *data, "--out", out, *FLAGS, *more, code=code)


@pytest.fixture(scope="module")
def whole(folder):
    """A run of ten steps."""
    train(folder, folder / "whole", "--steps", 10, "--sample-tokens", 6)
    return folder / "whole"


def test_a_run_learns_and_goes_back_to_transformers(folder, whole, tmp_path, capsys):
    found = losses(whole, "val_loss")
    assert found[10] < found[0]
    assert isinstance(stored_config(whole), PairTrainConfig)
    assert len((whole / "samples.jsonl").read_text().splitlines()) == 3
    capsys.readouterr()
    run("sample", whole, "--prompt", "list value", "--greedy", "--tokens", 9)
    written = capsys.readouterr().out
    run("port", whole, tmp_path / "back", "--to", "hf")
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "back")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert model.config.decoder_start_token_id == 0
    ids = tokenizer("list value", return_tensors="pt").input_ids
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0]
    assert written == tokenizer.decode(expected, skip_special_tokens=True) + "\n"


def test_the_losses_are_those_of_transformers(folder, whole):
    """The validation loss before the first step, of texts that transformers' tokenizer reads."""
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder / "t5").double()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "t5")
    texts = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()][::5]
    total = count = 0
    for text in texts:
        labels = tokenizer(text_target=text["answer"], return_tensors="pt").input_ids
        ids = tokenizer(text["prompt"], return_tensors="pt").input_ids
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * labels.numel()
        count += labels.numel()
    np.testing.assert_allclose(losses(whole, "val_loss")[0], total / count, rtol=1e-5)


@pytest.mark.tier("full")
def test_cut_and_resumed_it_is_the_run_uncut(folder, whole, tmp_path, capsys):
    flags = ["--decay-steps", 10, "--sample-tokens", 6]
    train(folder, tmp_path / "cut", "--steps", 4, *flags)
    assert resume(tmp_path / "cut", "--steps", 10) == 0
    assert losses(tmp_path / "cut") == losses(whole)
    states = [manifest(path, 10)["state_sha256"] for path in (tmp_path / "cut", whole)]
    assert states[0] == states[1]
    for flags, changed in (
        (["--truncate"], "truncate"),
        (["--source-length", 30], "source_length"),
        (["--target-begin", 3], "target_begin"),
        (["--num-decoder-layers", 1], "num_decoder_layers"),
    ):
        capsys.readouterr()
        assert resume(tmp_path / "cut", "--steps", 12, *flags) == 2
        assert changed in capsys.readouterr().err


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--devices", 4], marks=SLOW),
        ["--devices", 4, "--strategy", "mesh", "--fsdp", 2],
        pytest.param(["--accumulation", 2], marks=SLOW),
        ["--remat", "full", "--scan-layers"],
    ],
    ids=lambda flags: " ".join(map(str, flags)),
)
def test_devices_micro_batches_and_recomputing_change_nothing(folder, tmp_path, flags):
    """In float32, where sums come in another order; parity_tests/test_pairs.py is in float64."""
    # A large rate would let the difference grow from step to step.
    more = ["--steps", 6, "--sample-tokens", 0, "--learning-rate", 1e-4]
    if not (folder / "one").exists():
        train(folder, folder / "one", *more)
    train(folder, tmp_path / "run", *more, *flags)
    expected, found = losses(folder / "one"), losses(tmp_path / "run")
    assert max(abs(found[step] - expected[step]) for step in expected) < 1e-5


@pytest.mark.tier("full")
def test_all_that_an_update_may_have(folder, tmp_path):
    more = ["--ema", 0.9, "--label-smoothing", 0.1, "--z-loss", 1e-3, "--residual-dropout", 0.1]
    more += ["--dtype", "bfloat16", "--optimizer", "muon", "--steps", 5]
    mixed = ["--data", f"{folder / 'tokens'}:1", "--data", f"{folder / 'tokens'}:2"]
    start = ["train", "--init-from", folder / "t5", "--out", tmp_path / "run"]
    run(*start, *FLAGS, *mixed, *more)
    found = records(tmp_path / "run")
    assert [r["step"] for r in found if "train_loss" in r] == [1, 2, 3, 4, 5]
    assert all(np.isfinite(value) for record in found for value in record.values())


@pytest.mark.tier("full")
def test_in_python(folder, whole, tmp_path):
    result = jaxformer.train(
        out=tmp_path / "run", init_from=folder / "t5", data=str(folder / "tokens"), steps=10,
        batch_size=4, learning_rate=1e-2, devices=1, sampling="epoch", eval_interval=5,
        sample_tokens=6, checkpoint_interval=5, steps_per_call=3,
    )  # fmt: skip
    np.testing.assert_allclose(result.train_loss, losses(whole)[10], rtol=1e-6)
    assert isinstance(result.model.module, EncoderDecoder)
    written = result.model.generate("list value", 5, greedy=True)
    assert written == jaxformer.load(whole).generate("list value", 5, greedy=True)
    result.model.save(tmp_path / "hf", format="hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["decoder_start_token_id"] == 0


@pytest.mark.tier("full")
def test_a_run_says_what_it_is_in_its_files(folder, whole, tmp_path):
    config = stored_config(whole)
    assert (config.source_length, config.block_size, config.target_begin) == (5, 2, (0,))
    again = ["--config", whole / "config.toml", "--steps", 10]
    train(folder, tmp_path / "again", *again, "--sample-tokens", 0)
    assert losses(tmp_path / "again") == losses(whole)


@pytest.mark.tier("full")
def test_a_run_starts_from_another_with_its_optimizer(folder, whole, tmp_path):
    start = ["train", "--init-from", whole, "--data", folder / "tokens", "--out", tmp_path / "run"]
    run(*start, *FLAGS, "--steps", 12, "--sample-tokens", 0)
    assert set(losses(tmp_path / "run")) == {11, 12}
    expected = losses(whole, "val_loss")[10]
    np.testing.assert_allclose(losses(tmp_path / "run", "val_loss")[10], expected, rtol=1e-6)


@pytest.mark.tier("full")
def test_what_is_too_long_is_cut_if_the_user_says_so(folder, tmp_path, capsys):
    short = ["--steps", 1, "--source-length", 4, "--block-size", 1]
    train(folder, tmp_path / "run", *short, code=3)
    said = capsys.readouterr().err
    assert "8 of 32 sources" in said
    assert "have more than 4 tokens, the longest 5" in said
    assert "--truncate" in said
    train(folder, tmp_path / "run", *short, "--truncate", "--sample-tokens", 3)


@pytest.mark.tier("full")
@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--packing"], 2, "packing is of language models"),
        (["--data", "python-docs"], 2, "is one text: make a folder of prompts and answers"),
        (["--data", "plain"], 3, "does not say which tokens are answers"),
        (["--data", "other"], 3, "another tokenizer"),
        (["--data", "unended"], 3, "the model ends its targets with"),
        (["--source-length", 65], 2, "source_length must be at most the model's context_length"),
        (["--target-begin", 500], 2, r"target_begin must be ids in \[0, 500\): got 500"),
        (["--target-begin", 1, 2, 3], 2, "target_begin must be one id or two"),
        (["--devices", 3, "--strategy", "mesh", "--tensor", 3], 2, "divisible by tensor"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_rejected_in_one_line(folder, tmp_path, capsys, flags, code, message):
    name = flags[1] if flags[0] == "--data" else ""
    if name in ("plain", "other", "unended"):
        source, tokenizer, more = folder / "answers.jsonl", folder / "t5", []
        if name == "plain":
            source = tmp_path / "plain.txt"
            source.write_text("a module is a file\n" * 40)
        if name == "other":
            tokenizer = "bytes"
        if name == "unended":
            more = ["--end-of-text", "none"]
        more += ["--val-fraction", 0.2]
        run("tokenize", source, "--tokenizer", tokenizer, "--out", tmp_path / name, *more)
        flags = ["--data", tmp_path / name]
    capsys.readouterr()
    train(folder, tmp_path / "run", "--steps", 1, *flags, code=code)
    said = capsys.readouterr().err.strip()
    assert len(said.splitlines()) == 1
    assert re.search(message, said), said
    assert not (tmp_path / "run").exists()


@pytest.mark.tier("full")
def test_a_new_one_and_a_plan_are_rejected(whole, folder, tmp_path, capsys):
    arguments = ["--config", whole / "config.toml", "--data", folder / "tokens"]
    run("train", *arguments, "--out", tmp_path / "new", code=2)
    assert "--init-from" in capsys.readouterr().err
    run("plan", *arguments, code=2)
    assert "--init-from" in capsys.readouterr().err


@pytest.mark.tier("full")
def test_bart_begins_targets_as_transformers_does(tmp_path, capsys):
    """With its start token and <s>, which its tokenizer puts before every text."""
    made = tokenizers.Tokenizer.from_str(tokenizer("unigram").to_str())
    made.decoder = tokenizers.decoders.Metaspace()
    first, end = made.token_to_id("<unk>"), made.token_to_id(END)
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"<unk> $A {END}", special_tokens=[("<unk>", first), (END, end)]
    )
    config = transformers.BartConfig(
        vocab_size=SIZE, d_model=24, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=30,
        decoder_ffn_dim=30, encoder_attention_heads=2, decoder_attention_heads=2, dropout=0.0,
        max_position_embeddings=64, decoder_start_token_id=end, bos_token_id=first,
        eos_token_id=end, pad_token_id=5, forced_bos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "t5")
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)
    saved.save_pretrained(tmp_path / "t5")
    write_answers(tmp_path / "answers.jsonl")
    command = ["tokenize", tmp_path / "answers.jsonl", "--tokenizer", tmp_path / "t5"]
    run(*command, "--val-fraction", 0.2, "--out", tmp_path / "tokens")
    train(tmp_path, tmp_path / "run", "--steps", 2, "--sample-tokens", 4)
    assert stored_config(tmp_path / "run").target_begin == (end, first)
    total = count = 0
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()[::5]
    for text in map(json.loads, lines):
        ids, labels = (saved(text[k], return_tensors="pt").input_ids for k in ("prompt", "answer"))
        with torch.no_grad():
            total += float(model(input_ids=ids, labels=labels).loss) * labels.numel()
        count += labels.numel()
    np.testing.assert_allclose(losses(tmp_path / "run", "val_loss")[0], total / count, rtol=1e-5)
    # Another token before every text may be a language.
    settings = json.loads((tmp_path / "t5" / "config.json").read_text())
    (tmp_path / "t5" / "config.json").write_text(json.dumps({**settings, "bos_token_id": 9}))
    capsys.readouterr()
    train(tmp_path, tmp_path / "other", "--steps", 2, code=2)
    assert "--target-begin" in capsys.readouterr().err
    # What the user says stays with the run, and goes with it.
    begin = ["--target-begin", end, 9, "--sample-tokens", 4]
    train(tmp_path, tmp_path / "other", "--steps", 2, *begin)
    assert open_checkpoint(tmp_path / "other").target_ids()[0] == [end, 9]
    run("port", tmp_path / "other", tmp_path / "back", "--to", "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["forced_bos_token_id"] == 9
