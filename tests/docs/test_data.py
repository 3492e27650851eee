"""The commands of docs/guides/data.md run, and its table names the files that there are."""

import json
import re
import shlex
from pathlib import Path

import pytest

from jaxformer.cli.main import main
from jaxformer.data.corpora import load_corpus
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import nano

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
]
SMALLER = shlex.split("--d-model 16 --num-heads 2 --num-layers 1 --devices 1 --sample-tokens 0")


def arguments_of(command):
    """The arguments of jaxformer, with a smaller model."""
    words = shlex.split(command.replace("uv run ", "").replace("--extra data ", ""))
    if words[0] == "train.py":
        return ["train", *words[1:], *SMALLER]
    assert words[0] == "jaxformer"
    return words[1:]


@pytest.mark.tier("full")
def test_the_commands_run(empty_folder):
    text = load_corpus("python-docs").text[:60_000]
    (empty_folder / "corpus.txt").write_text(text)
    records = [json.dumps({"text": text[n : n + 500]}) for n in range(0, 30_000, 500)]
    (empty_folder / "records.jsonl").write_text("\n".join(records))
    assert len(COMMANDS) == 8
    for command in COMMANDS:
        assert main(arguments_of(command)) == 0, command
    for name in ("index.json", "train-00000.bin", "val-00000.bin", "train-00000.documents"):
        assert f"`{name}`" in PAGE
        assert (empty_folder / "tokens" / name).is_file()


def test_the_page_has_the_limit_that_there_is():
    assert f"{TrainConfig(model=nano().model).resident_tokens:,} tokens" in PAGE
