"""The commands of guides/recipes.md and tutorials/fine_tune.md run, with small models."""

import json

import numpy as np
import pytest
import torch
import transformers

import jaxformer
from jaxformer.cli.main import main
from tests.support.pages import arguments_of, blocks
from tests.support.tiny import records
from tests.support.tokens import (
    CHAT,
    SIZE,
    corpus,
    save_tokenizer,
    write_model_and_answers,
    write_t5,
)

GPT2, TEXTS = (block.commands for block in blocks("guides/recipes.md"))
*COMMANDS, PYTHON = blocks("tutorials/fine_tune.md")
ALL_WEIGHTS, ADAPTERS, PAIRS = (block.commands for block in COMMANDS)
SMALL = "--devices 1 --sample-tokens 0 --batch-size 4"
MODEL = "--d-model 16 --num-heads 2 --num-layers 1"


def run(command, more="", code=0):
    assert main([*arguments_of(command), *more.split()]) == code, command


@pytest.mark.tier("full")
def test_gpt2(empty_folder, capsys):
    save_tokenizer("gpt2")
    (empty_folder / "openwebtext").mkdir()
    lines = [json.dumps({"text": corpus()[n : n + 700]}) for n in range(0, 70_000, 700)]
    (empty_folder / "openwebtext" / "part.jsonl").write_text("\n".join(lines))
    tokenize, train, resume, sample = GPT2
    run(tokenize)
    # The validation split is one document, of the first record.
    run(train, f"{SMALL} {MODEL} --accumulation 2 --context-length 32 --steps 2 --dtype float32")
    run(resume, "--steps 3")
    assert [r["step"] for r in records("runs/gpt2") if "train_loss" in r] == [1, 2, 3]
    capsys.readouterr()
    run(sample)
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.tier("full")
def test_fine_tuning(empty_folder):
    write_model_and_answers()
    tokenize, train, sample, port = ALL_WEIGHTS
    run(tokenize)
    run(train, f"{SMALL} --steps 20 --eval-interval 10 --learning-rate 1e-2")
    found = [r["val_loss"] for r in records("runs/tuned") if "val_loss" in r]
    assert found[-1] < found[0]
    run(sample)
    run(port)
    again = transformers.AutoModelForCausalLM.from_pretrained("tuned")
    assert again.config.vocab_size == SIZE
    known = transformers.AutoTokenizer.from_pretrained("tuned")
    assert known.chat_template == CHAT


@pytest.mark.tier("full")
def test_sources_and_targets(empty_folder, capsys):
    write_t5("t5")
    lines = [{"prompt": f"What is {n}?", "answer": f"a module {n % 3}"} for n in range(40)]
    (empty_folder / "questions.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tokenize, train, sample, port = PAIRS
    run(tokenize)
    run(train, f"{SMALL} --steps 20 --eval-interval 10 --learning-rate 1e-2")
    found = [r["val_loss"] for r in records("runs/answers") if "val_loss" in r]
    assert found[-1] < found[0]
    run(sample)
    run(port)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained("answering")
    assert model.config.decoder_start_token_id == 0
    assert transformers.AutoTokenizer.from_pretrained("answering").vocab_size == SIZE


@pytest.mark.tier("full")
# PEFT asks transformers by a name that is going away.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_adapters(empty_folder):
    peft = pytest.importorskip("peft")
    write_model_and_answers()
    run(ALL_WEIGHTS[0])
    train, sample, to_peft, back, merge = ADAPTERS
    run(train, f"{SMALL} --steps 20 --eval-interval 10 --learning-rate 1e-2")
    found = [r["val_loss"] for r in records("runs/lora") if "val_loss" in r]
    assert found[-1] < found[0]
    for command in (sample, to_peft, back, merge):
        run(command)
    ids = torch.arange(9)[None]
    load = transformers.AutoModelForCausalLM.from_pretrained
    adapted = peft.PeftModel.from_pretrained(load("model"), "adapter")
    with torch.no_grad():
        logits = adapted(ids).logits.numpy()
        merged = load("merged")(ids).logits.numpy()
        base = load("model")(ids).logits.numpy()
    np.testing.assert_allclose(merged, logits, rtol=0, atol=1e-5)
    assert np.abs(logits - base).max() > 1e-3
    again = jaxformer.load("runs/again").module
    again.eval()
    np.testing.assert_allclose(again(ids.numpy()), logits, rtol=0, atol=1e-5)

    few = "steps=2, devices=1, sample_tokens=0, batch_size=4, learning_rate=1e-2,"
    code = PYTHON.code.replace("steps=300,", few).replace("    learning_rate=2e-4,\n", "")
    names: dict = {}
    exec(code, names)
    expected = names["result"].model.module(ids.numpy())
    adapted = peft.PeftModel.from_pretrained(load("model"), "adapter-python")
    with torch.no_grad():
        for found in (adapted(ids).logits, load("merged-python")(ids).logits):
            np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)
    assert np.abs(expected - base).max() > 1e-3


@pytest.mark.tier("full")
def test_characters_bytes_and_tokens(empty_folder):
    (empty_folder / "tiny-shakespeare.txt").write_text(corpus()[:40_000])
    for command in TEXTS:
        run(command, f"{SMALL} {MODEL} --steps 2" if "train.py" in command else "")
    for name in ("bytes", "tokens"):
        assert records(f"runs/{name}")[-1]["val_bits_per_byte"] > 0
