"""What docs/tutorials/verify.md shows is what happens: script, commands and examples."""

import contextlib
import io
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer.cli.main import main
from jaxformer.cli.verify import VerifyOptions
from jaxformer.cli.verify_code import VerifyCodeOptions
from tests.support.ported import hugging_face
from tests.support.verified import LLAMA, llama_state

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tutorials" / "verify.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^\$ jaxformer (.*)$", PAGE, re.MULTILINE)


def measured(name):
    """Returns a result of a benchmark."""
    return json.loads((ROOT / "benchmarks" / "results" / f"verify-{name}.json").read_text("utf-8"))


def test_its_figures_are_those_that_were_measured():
    found = measured("cpu")
    cost = (
        f"takes {found['cpu_seconds']:.0f} s of processor time and {found['peak_gib']:.1f} GiB,\n"
        f"and {found['seconds']:.0f} s by the clock"
    )
    assert cost in PAGE
    found = measured("operators-cpu")
    cost = (
        f"takes {found['cpu_seconds']:.0f} s\nof processor time, {found['seconds']:.0f} s by the "
        f"clock and {found['peak_gib']:.1f} GiB"
    )
    assert cost in PAGE
    for name in ("llama-3.2-1b", "llama-3-8b"):
        found = measured(name)
        minutes, cpu = (found[key] / 60 for key in ("seconds", "cpu_seconds"))
        row = (
            f"| {name} | {found['layers']} of {found['layers']} "
            f"| {found['parameters'] / 1e9:.2f} billion | {found['peak_gib']:.1f} GiB "
            f"| {minutes:.0f} minutes | {cpu:.0f} minutes |"
        )
        assert row in PAGE


def code(words):
    """Returns the one block of Python that contains these words."""
    (found,) = (block for block in CODE if words in block)
    return found


def run(command):
    """Runs a command of the page and returns its exit code and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exit_code = main(shlex.split(command))
    return exit_code, out.getvalue()


@pytest.fixture
def verse(empty_folder):
    """A folder as the page has it, with a smaller model."""
    # The page's model has one key/value head a head, and a tied head.
    config = {**LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": True}
    state = llama_state()
    for name in [name for name in state if "k_proj" in name or "v_proj" in name]:
        state[name] = torch.cat([state[name], -0.5 * state[name]])
    del state["lm_head.weight"]
    letters = "KING abcdefghijklmnopqrstuvwxyz"
    assert len(letters) == LLAMA["vocab_size"]
    itos = dict(enumerate(letters))
    meta = {"vocab_size": len(letters), "itos": itos, "stoi": {c: i for i, c in itos.items()}}
    (empty_folder / "vocabulary.pkl").write_bytes(pickle.dumps(meta))
    return hugging_face(empty_folder / "verse", state, config=config)


@pytest.mark.tier("slow")
def test_the_bug_hunt(verse):
    script = code("# convert.py")
    exec(compile(script, "convert.py", "exec"), {})
    verify, repro = "verify verse ported.pt", "verify verse ported.pt --repro repro"
    assert COMMANDS.count(verify) == 2
    assert repro in COMMANDS
    sample = next(c for c in COMMANDS if c.startswith("sample ported.pt"))
    assert run(f"{sample} --tokens 5")[0] == 0

    exit_code, printed = run(repro)
    assert exit_code == 1
    shown = re.findall(r"^bug.*: blocks.*$", PAGE, re.MULTILINE)
    assert printed.splitlines()[-2:] == shown
    lines = [line.rstrip() for line in printed.splitlines()]
    for line in re.search(r"^Settings that differ$.*?^$", PAGE, re.M | re.S)[0].splitlines():
        assert line in lines

    done = subprocess.run(
        [sys.executable, "repro/repro.py"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert re.match(r"output: off by \S+ of scale, allowed \S+: bug\n", done.stdout)
    assert done.stderr.endswith("AssertionError: they differ by more than rounding\n")

    fixed = script.replace('"rotary_interleaved": True', '"rotary_interleaved": False')
    assert fixed != script
    exec(compile(fixed, "convert.py", "exec"), {})
    exit_code, printed = run(verify)
    assert exit_code == 0
    assert printed.endswith("equal (rounding)\n")


def test_the_test_in_the_page(verse):
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(**json.loads((verse / "config.json").read_text()))
    names: dict = {}
    exec(code("def test_the_port"), names)
    model = transformers.LlamaForCausalLM(settings).eval()
    model.config.use_cache = False
    names["test_the_port_computes_the_same"](model, torch.arange(9)[None])


def test_the_map_of_names_in_the_page():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code("class Reference"), {"__name__": "page"})
    shown = re.search(r"```text\n(the model: .*?\n)```", PAGE)[1]
    assert out.getvalue() == shown


def test_the_options_and_modes_of_the_page_are_those_of_the_command():
    fields = {**VerifyOptions.__dataclass_fields__, **VerifyCodeOptions.__dataclass_fields__}
    # Other commands make the files that are compared.
    lines = [line for line in PAGE.splitlines() if "train.py " not in line and " port " not in line]
    used = set(re.findall(r"--(\w+)", "\n".join(lines))) - {"extra", "prompt", "meta", "parity"}
    assert used <= set(fields)
    for mode in ("forward", "grad", "train", "generate"):
        assert f"`--mode {mode}" in PAGE


def test_any_jax_code(capsys):
    with jax.numpy_rank_promotion("allow"):
        exec(code("def port(params, x)"), {"__name__": "page"})
    shown = capsys.readouterr().out.strip()
    assert shown.startswith("the candidate computes the tanh form of GELU")
    assert f"```text\n{shown}\n```" in PAGE


def test_what_a_dtype_rounds(capsys):
    with jax.numpy_rank_promotion("allow"):
        exec(code("class Port"), {"__name__": "page"})
    shown = re.search(r"```text\n(rounding\nin float32.*?)\n```", PAGE, re.DOTALL)[1]
    # The page has the first digits: the last ones are not those of every processor.
    pattern = re.escape(shown).replace("…", r"\d*")
    assert re.fullmatch(pattern, capsys.readouterr().out.strip())


def test_the_figures_of_large_checkpoints_are_those_that_were_measured():
    rows = re.findall(r"^\| (llama-\S+) \|(.*)\|$", PAGE, re.MULTILINE)
    assert rows
    layers = {"llama-3.2-1b": 16, "llama-3-8b": 32}
    for name, shown in rows:
        result = json.loads((ROOT / "benchmarks" / "results" / f"verify-{name}.json").read_text())
        assert (result["verdict"], result["tokens"]) == ("rounding", 128)
        assert result["compared"].startswith("block by block")
        assert [cell.strip() for cell in shown.split("|")] == [
            f"{result['layers']} of {layers[name]}",
            f"{result['parameters'] / 1e9:.2f} billion",
            f"{result['peak_gib']:.1f} GiB",
            f"{result['seconds'] / 60:.0f} minutes",
            f"{result['cpu_seconds'] / 60:.0f} minutes",
        ]
