"""The documentation: what it shows runs, its links lead somewhere, and no name is missing."""

import functools
import json
import os
import pickle
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxformer
from jaxformer import errors
from jaxformer.cli.main import COMMANDS, main
from tests.support.pages import (
    DOCS,
    README,
    ROOT,
    arguments_of,
    blocks,
    page_names,
    read_page,
)
from tests.support.tokens import SIZE, corpus, save_tokenizer, write_model_and_answers

# Pages of which a test of their own runs all blocks.
ELSEWHERE = {
    "guides/data.md": "tests/docs/test_data.py",
    "guides/recipes.md": "tests/docs/test_recipes.py",
    "tutorials/fine_tune.md": "tests/docs/test_recipes.py",
    "reference/families.md": "parity_tests/test_families.py",
}
SMALL = shlex.split(
    "--num-layers 1 --d-model 16 --num-heads 2 --context-length 16 --steps 4 --sample-tokens 0 "
    "--eval-tokens 200"
)
# Of a model that a run starts from.
FEW_STEPS = shlex.split("--steps 2 --sample-tokens 0 --batch-size 4 --devices 1 --eval-tokens 200")
# Fewer steps of smaller models show the same.
SHORTER = {
    "range(1000)": "range(3)",
    "nano().model.replace(": "nano().model.replace(d_model=16, num_heads=2, ",
    "steps=2000": "steps=1, num_layers=1, d_model=16, num_heads=2, context_length=16, "
    "eval_tokens=200, sample_tokens=0, devices=1, data='novel.txt'",
}


def test_every_block_is_run_or_says_why_not():
    run = {name for name, _ in SHOWN}
    for name in page_names():
        if any(block.reason is None for block in blocks(name)):
            assert name in run or name in ELSEWHERE, name
    for page, test in ELSEWHERE.items():
        assert page.rpartition("/")[2] in (ROOT / test).read_text("utf-8")


def test_every_link_leads_to_a_file():
    own = [(ROOT / name) for name in (README, "CONTRIBUTING.md", "ARCHITECTURE.md", "CHANGELOG.md")]
    for page in [*own, *(DOCS / name for name in page_names() if name != README)]:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\(([^)\s]+)\)", text):
            path = link.partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                assert (page.parent / path).is_file(), f"{page.name}: {link}"


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    assert set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE)) == {
        *(name for name in page_names() if name != README),
        *(f"repository/{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")),
    }


def test_every_public_name_has_its_place_and_its_words():
    shown = [
        name
        for page in page_names()
        if page.startswith("reference/api/")
        for name in re.findall(r"^::: jaxformer\.(\w+)$", read_page(page), re.MULTILINE)
    ]
    assert sorted(shown) == sorted(jaxformer.__all__)
    assert [name for name in shown if not getattr(jaxformer, name).__doc__] == []


def test_every_exit_code_is_explained():
    page = read_page("reference/exit_codes.md")
    rows = dict(re.findall(r"^\| (\d+) \|[^|]*\| `(\w+)` \|", page, re.MULTILINE))
    known = {
        str(found.exit_code): name
        for name, found in vars(errors).items()
        if isinstance(found, type)
        and issubclass(found, errors.JaxformerError)
        and found is not errors.StoppedError
    }
    assert rows == known


def test_every_command_is_in_the_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import cli_pages

    page = cli_pages.commands()
    for command in COMMANDS:
        assert f"## jaxformer {command}\n" in page
    assert "| `--learning-rate` `FLOAT` | `0.002` |" in page


def test_every_shown_flag_is_one_of_its_command(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import cli_pages

    sections = re.split(r"^## jaxformer ", cli_pages.commands(), flags=re.MULTILINE)[1:]
    known = {part.split()[0]: set(re.findall(r"`(--[\w-]+)", part)) for part in sections}
    shown = [
        (name, found)
        for name in page_names()
        for block in blocks(name)
        if block.language == "sh"
        for words in block.commands
        if (found := arguments_of(words))
    ]
    assert len(shown) > 50
    for name, (command, *rest) in shown:
        flags = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
        assert flags <= known[command], (name, command, flags - known[command])


def test_the_readme_is_short_and_has_pictures():
    text = read_page(README)
    assert len(text.splitlines()) <= 150
    assert len(re.findall(r"^!\[.+\]\(docs/images/\S+\)$", text, re.MULTILINE)) == 3
    promised = read_page("explanation/faults.md")
    for figure in re.findall(r"\d+ of \d+", text):
        assert figure in promised


def test_the_pictures_show_what_was_measured():
    script = [sys.executable, ROOT / "docs/draw_results.py", "--check"]
    subprocess.run(script, check=True, cwd=ROOT)


def a_run(folder):
    train(["--out", "runs/nano"])
    return folder / "runs" / "nano"


def checkpoints(folder):
    """A Hugging Face folder, one of transformers' Trainer, and nanoGPT's files."""
    from parity_tests.families.nanogpt import GPT, GPTConfig

    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tests.support.trainers import save_trainer, trainer_of

    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16}
    config = transformers.GPT2Config(
        vocab_size=SIZE, n_positions=32, eos_token_id=0, bos_token_id=0, **sizes
    )
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained("gpt2")
    save_tokenizer("gpt2")
    save_trainer(trainer_of(model), folder / "out" / "checkpoint-500")
    save_tokenizer("out/checkpoint-500")
    letters = sorted(set(corpus()[:60_000]))
    arguments = {**sizes, "block_size": 16, "bias": False, "vocab_size": len(letters), "dropout": 0}
    gpt = GPT(GPTConfig(**arguments))
    (folder / "nano").mkdir()
    torch.save({"model": gpt.state_dict(), "model_args": arguments}, "nano/ckpt.pt")
    itos = dict(enumerate(letters))
    meta = {"vocab_size": len(letters), "itos": itos, "stoi": {c: n for n, c in itos.items()}}
    (folder / "nano" / "meta.pkl").write_bytes(pickle.dumps(meta))


def a_model_and_answers(folder):
    """A model of Hugging Face, tokens of conversations in its template, and two runs."""
    write_model_and_answers()
    tokenize = "tokenize answers.jsonl --tokenizer model --val-fraction 0.1 --out tokens"
    assert main(shlex.split(tokenize)) == 0
    train(["--out", "runs/novel"])


def two_sides(folder):
    """Two checkpoints, and two functions that make models, with their inputs."""
    write_model_and_answers()
    Path("model").rename("A")
    assert main(["port", "A", "B"]) == 0
    Path("models.py").write_text(MODELS, encoding="utf-8")
    np.savez("inputs.npz", np.random.default_rng(0).normal(size=(4, 5)))


def a_file(folder):
    from safetensors.numpy import save_file

    save_file({"some.weight": np.ones((3, 5), np.float32)}, "model.safetensors")


MODELS = """
import torch


def reference():
    return torch.nn.Linear(5, 3)


def port(module):
    params = {name: value.detach().numpy() for name, value in module.named_parameters()}
    return lambda params, x: x @ params["weight"].T + params["bias"], params
"""
# The pages whose blocks are run here in their order, and what each of them takes for granted.
SHOWN = [
    (README, checkpoints),
    ("guides/training.md", a_model_and_answers),
    ("tutorials/verify.md", two_sides),
    ("start.md", a_run),
    ("tutorials/train.md", None),
    ("tutorials/port.md", checkpoints),
    ("tutorials/scale_out.md", None),
    ("guides/writing.md", a_run),
    ("guides/trackers.md", None),
    ("guides/hosts.md", None),
    ("guides/tpu.md", None),
    ("guides/accelerators.md", None),
    ("guides/custom_component.md", None),
    ("guides/dialect.md", a_file),
    ("reference/config.md", a_run),
    ("explanation/scale.md", None),
]


@pytest.fixture
def setting_of_users():
    """JAX's own setting, and not that of these tests."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.tier("full")
@pytest.mark.usefixtures("setting_of_users")
@pytest.mark.parametrize(("name", "prepare"), SHOWN, ids=[name for name, _ in SHOWN])
def test_the_page_runs(empty_folder, name, prepare, capsys):
    (empty_folder / "novel.txt").write_text(corpus()[:60_000], encoding="utf-8")
    (empty_folder / "README.md").write_text(read_page(README), encoding="utf-8")
    if prepare is not None:
        prepare(empty_folder)
    names = {"__name__": "page"}
    for block in blocks(name):
        if block.reason is not None:
            continue
        if block.language == "python":
            code = block.code
            for long, short in SHORTER.items():
                code = code.replace(long, short)
            exec(compile(code, name, "exec"), names)
        elif "\nwait\n" in block.code:
            run_together(re.sub(r"--out \S+", "--out runs/together", block.code))
        else:
            for words in block.commands:
                run(words)


def run(words):
    """Runs a command of a page, at a small size."""
    if "&&" in words:
        at = words.index("&&")
        run(words[:at])
        words = words[at + 1 :]
    if words[:2] == ["pip", "install"] or "pytest" in words:
        # With both begins every run of CI.
        return
    arguments = arguments_of(words)
    assert arguments is not None, words
    if arguments[0] == "plan":
        # tests/planning/test_plan.py runs every plan that a page shows.
        return
    if arguments[0] == "train":
        train(arguments[1:])
    elif arguments[0] == "verify":
        code = [] if "--torch" in arguments else ["--data", "random"]
        assert main([*arguments, *code]) == 0
    else:
        assert main([*arguments, "--tokens", "5"] if arguments[0] == "sample" else arguments) == 0


def train(arguments):
    arguments = [
        "novel.txt" if word == "tiny-shakespeare" else word
        for word in arguments
        if word != "--download"
    ]
    if "--resume" in arguments:
        more = ["--steps", "6"]
    elif "--init-from" in arguments:
        more = FEW_STEPS
    else:
        more = [*SMALL, *([] if "--devices" in arguments else ["--devices", "1"])]
        more += [] if "--data" in arguments else ["--data", "novel.txt"]
        more += ["--num-heads", "4"] if "--num-kv-heads" in arguments else []
    assert main(["train", *arguments, *more]) == 0, arguments


@functools.cache
def run_together(code):
    """Runs the processes of a block, on a port that is free; once if two pages have it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = f"{sys.executable} -m jaxformer train {shlex.join(SMALL)} --data novel.txt"
    script = code.replace("uv run train.py", command).replace("127.0.0.1:1234", f"127.0.0.1:{port}")
    assert command in script
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Each job's code counts.
    script = re.sub(r"&$", "& other=$!", script, flags=re.MULTILINE).replace(
        "\nwait", "\nwait $other"
    )
    done = subprocess.run(
        ["bash", "-ec", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    lines = Path("runs/together/metrics.jsonl").read_text("utf-8").splitlines()
    assert json.loads(lines[-1])["step"] == 20
