"""The commands of docs/recipes.md run, in order, with small models and files made on the spot."""

import json
import re
import shlex
from pathlib import Path

import pytest
import transformers

from jaxformer.cli.main import main
from tests.support.tiny import records
from tests.support.tokens import SIZE, corpus, tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = [
    block.replace("\\\n", " ").splitlines()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
]
SMALL = "--devices 1 --sample-tokens 0 --batch-size 4"
MODEL = "--d-model 16 --num-heads 2 --num-layers 1"
END = "<|endoftext|>"
CHAT = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def run(command, more=""):
    words = shlex.split(command.replace("uv run ", "").replace("--extra data ", ""))
    words = ["train", *words[1:], *more.split()] if words[0] == "train.py" else words[1:]
    assert main(words) == 0, command


def save_tokenizer(folder):
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer(), eos_token=END)
    made.chat_template = CHAT
    made.save_pretrained(folder)


@pytest.mark.tier("full")
def test_gpt2(empty_folder, capsys):
    save_tokenizer("gpt2")
    (empty_folder / "openwebtext").mkdir()
    lines = [json.dumps({"text": corpus()[n : n + 700]}) for n in range(0, 70_000, 700)]
    (empty_folder / "openwebtext" / "part.jsonl").write_text("\n".join(lines))
    tokenize, train, resume, sample = BLOCKS[0]
    run(tokenize)
    # The validation split is one document, of the first record.
    run(train, f"{SMALL} {MODEL} --accumulation 2 --context-length 32 --steps 2 --dtype float32")
    run(resume, "--steps 3")
    assert [r["step"] for r in records("runs/gpt2") if "train_loss" in r] == [1, 2, 3]
    capsys.readouterr()
    run(sample)
    assert capsys.readouterr().out.startswith("The")


@pytest.mark.tier("full")
def test_fine_tuning(empty_folder, capsys):
    config = transformers.LlamaConfig(
        vocab_size=SIZE, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, eos_token_id=0, bos_token_id=None,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained("model")
    save_tokenizer("model")
    talks = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "7"}]}
        for n in range(60)
    ]
    (empty_folder / "answers.jsonl").write_text("\n".join(map(json.dumps, talks)))
    tokenize, train, sample, port = BLOCKS[1]
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
def test_characters_bytes_and_tokens(empty_folder):
    (empty_folder / "tiny-shakespeare.txt").write_text(corpus()[:40_000])
    assert len(BLOCKS) == 3
    for command in BLOCKS[2]:
        run(command, f"{SMALL} {MODEL} --steps 2")
    for name in ("bytes", "tokens"):
        assert records(f"runs/{name}")[-1]["val_bits_per_byte"] > 0
