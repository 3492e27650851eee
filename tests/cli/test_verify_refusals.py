"""``jaxformer verify`` in a process of its own, what it refuses, and what becomes of faults."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer.cli.main import main
from jaxformer.parity.sources.checkpoints import open_source
from tests.support.ported import CONFIG, gpt2_state, hugging_face
from tests.support.verified import changed, gpt2_formats, llama, nano_run

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
SHORT = ("--length", 9)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return gpt2_formats(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(autouse=True, scope="module")
def opened_before(gpt2):
    """Whoever opens the first checkpoint of a process compiles how a random key is made."""
    with jax.enable_x64(True):
        open_source(gpt2["run"], "a")


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """A folder with a Llama, as transformers has it and as a jaxformer file."""
    here = tmp_path_factory.mktemp("llama")
    llama(here)
    return here


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    return nano_run(tmp_path_factory.mktemp("nano"))


def run(*arguments, path=""):
    """``python -m jaxformer verify`` in a process of its own."""
    paths = os.pathsep.join(p for p in (path, str(ROOT)) if p)
    return subprocess.run(
        [sys.executable, "-m", "jaxformer", "verify", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.tier("full")
def test_a_real_process_ends_with_the_node(llamas, tmp_path):
    wrong = changed(
        llamas / "llama.safetensors", tmp_path / "wrong.safetensors",
        config={"rotary_interleaved": True},
    )  # fmt: skip
    done = run(llamas / "llama", wrong, "--mode", "forward", *SHORT)
    assert done.returncode == 1
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1].startswith("bug: blocks.0.attention ")


def test_without_torch_the_extra_is_named(gpt2, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('blocked')")
    done = run(gpt2["pt"], gpt2["run"], path=str(tmp_path))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "[torch]'" in done.stderr


def test_help_needs_neither_jax_nor_torch():
    code = (
        "import sys\nfrom jaxformer.cli.main import main\n"
        "try:\n main(['verify', '--help'])\nexcept SystemExit:\n pass\n"
        "import jaxformer.parity\n"
        "print([n for n in ('jax', 'torch', 'flax', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


REFUSED = {
    "nothing": ((), 2, "required"),
    "one path": (("{a}",), 2, "required"),
    "no such A": (("nowhere", "{b}"), 4, "nowhere"),
    "no such B": (("{a}", "nowhere.pt"), 4, "nowhere.pt"),
    "cut short": (("{a}", "{short}"), 4, "not a complete safetensors file"),
    "pickle": (("{a}", "{pickle}"), 5, "{pickle}"),
    "unknown model_type": (("{unknown}", "{b}"), 2, "model_type 'mystery'"),
    "code of its own": (("{remote}", "{b}"), 2, "auto_map"),
    "hostile config": (("{hostile}", "{b}"), 2, "finite"),
    "another architecture": (("{a}", "{llama}"), 4, "missing position_embedding.embedding"),
    "part of a model": (("{a}", "{part}", "--dialect-b", "unified"), 2, "only whole models"),
    "no dialect": (("{a}", "{b}", "--dialect-b", "nobody"), 2, "there is no dialect nobody"),
    "unknown names": (("{a}", "{strange_names}"), 2, "name one with --dialect-b to see"),
    "no settings": (
        ("{bare}", "{b}", "--dialect-a", "gpt2"),
        2,
        "give it as a JSON file for --config-a: {{",
    ),
    "mode": (("{a}", "{b}", "--mode", "backward"), 2, "backward"),
    "batch": (("{a}", "{b}", "--batch", "0"), 2, "--batch must be at least 1: got 0"),
    "length": (("{a}", "{b}", "--length", "99"), 2, "the models hold 19 tokens"),
    "steps": (("{a}", "{b}", "--steps", "3"), 2, "--steps is for --mode train"),
    "dropout": (("{a}", "{b}", "--dropout"), 2, "--dropout is for --mode train"),
    "tokens": (("{a}", "{b}", "--tokens", "3"), 2, "--tokens is for --mode generate"),
    "dtype": (("{a}", "{b}", "--dtype", "float32", "--mode", "train"), 2, "--dtype is for"),
    "seed": (("{a}", "{b}", "--seed", "-1"), 2, "--seed"),
    "no such text": (("{a}", "{b}", "--data", "nowhere.txt"), 2, "does not exist"),
    "not UTF-8": (("{nano}", "{nano}", "--data", "{latin}"), 3, "offset 2"),
    "empty": (("{nano}", "{nano}", "--data", "{empty}"), 3, "is empty"),
    "too short": (("{nano}", "{nano}", "--data", "{few}"), 3, "has 3 tokens and 16 are needed"),
    "unknown character": (("{nano}", "{nano}", "--data", "{strange}"), 3, "U+00FC"),
    "no tokenizer": (("{a}", "{b}", "--data", "{few}"), 2, "has a tokenizer"),
    "no earlier report": (("{a}", "{b}", "--against", "no.json"), 4, "no.json"),
    "no report": (("{a}", "{b}", "--against", "{few}"), 4, "{few}"),
    "no folder for the page": (("{a}", "{b}", "--html", "no/x.html"), 7, "no/x.html"),
    "page is a folder": (("{a}", "{b}", "--html", "{folder}"), 2, "is a folder"),
    "one name for both": (("{a}", "{b}", "--html", "x", "--json", "x"), 2, "the same file"),
    "repro in use": (("{a}", "{b}", "--repro", "{folder}"), 2, "the name of a new folder"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_refusals(refuse, tmp_path, gpt2, llamas, nano, case):
    arguments, code, words = REFUSED[case]
    whole = gpt2["safetensors"].read_bytes()
    paths = {
        "a": gpt2["run"],
        "b": gpt2["safetensors"],
        "llama": llamas / "llama.safetensors",
        "nano": nano[1],
        "folder": tmp_path / "folder",
    }
    paths["folder"].mkdir()
    (paths["folder"] / "something").write_text("here")
    texts = {"latin": b"ab\xff", "empty": b"", "few": b"abc", "strange": "aü".encode() * 20}
    for name, data in {**texts, "short": whole[:-9]}.items():
        paths[name] = tmp_path / f"{name}.safetensors"
        paths[name].write_bytes(data)
    paths["pickle"] = tmp_path / "evil.pt"
    torch.save({"model": {"x": torch.zeros(2)}, "config": Evil()}, paths["pickle"])
    for name, config in {
        "unknown": {"model_type": "mystery"},
        "remote": {"model_type": "gpt2", "auto_map": {"AutoModel": "code.Model"}},
        "hostile": {"layer_norm_epsilon": float("nan")},
    }.items():
        paths[name] = hugging_face(tmp_path / name, gpt2_state(), config={**CONFIG, **config})
    from parity_tests.families import unified

    part = unified.FeedForward(24, 35)
    paths["part"] = tmp_path / "part.pt"
    torch.save(part.state_dict(), paths["part"])
    paths["strange_names"] = tmp_path / "strange.pt"
    torch.save({"w": torch.zeros(2)}, paths["strange_names"])
    paths["bare"] = tmp_path / "bare.pt"
    torch.save(gpt2_state(), paths["bare"])
    filled = [argument.format(**paths) for argument in arguments]
    refuse(["verify", *filled], code, words.format(**paths))


@pytest.mark.parametrize("name", ["missing", "arrays"])
def test_a_folder_is_named_whatever_it_is_called(refuse, tmp_path, gpt2, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    state = gpt2_state()
    del state["transformer.ln_f.bias"]
    hugging_face(Path(name), state)
    words = f"{name}: the arrays are not those of GPT2LMHeadModel: missing transformer.ln_f.bias"
    refuse(["verify", gpt2["run"], name], 4, words)


class Evil:
    """What a file must not make us build."""


def test_damaged_runs_are_refused(refuse, tmp_path, gpt2):
    shutil.copytree(gpt2["run"], tmp_path / "run")
    manifest = next(tmp_path.glob("run/checkpoints/*/MANIFEST.json"))
    manifest.write_text(manifest.read_text()[:-20])
    refuse(["verify", tmp_path / "run", gpt2["pt"]], 4)


def test_a_bug_of_jaxformer_is_one_line(gpt2, monkeypatch, capsys):
    monkeypatch.setattr("jaxformer.parity.session.compare", lambda *_, **__: 1 / 0)
    assert main(["verify", str(gpt2["run"]), str(gpt2["run"]), "--mode", "forward"]) == 1
    assert capsys.readouterr().err.startswith("jaxformer: ZeroDivisionError")


def test_a_report_is_not_lost_where_it_cannot_be_written(llamas, tmp_path, monkeypatch, capsys):
    from jaxformer.errors import ResourceError, UsageError

    def fail(error):
        def raising(*_, **__):
            raise error

        return raising

    a, b = llamas / "llama", llamas / "llama.safetensors"
    wrong = changed(b, tmp_path / "wrong.safetensors", config={"norm_eps": 1e-6})
    full, odd = ResourceError("the disk is full"), UsageError("a Cache cannot be written")
    monkeypatch.setattr("jaxformer.parity.report.files.save_json", fail(full))
    monkeypatch.setattr("jaxformer.parity.session.write_repro", fail(odd))
    paths = ("--json", str(tmp_path / "x.json"), "--repro", str(tmp_path / "repro"))
    arguments = [*map(str, (a, wrong)), "--mode", "forward", *map(str, SHORT), *paths]
    capsys.readouterr()
    assert main(["verify", *arguments]) == 7
    captured = capsys.readouterr()
    assert captured.err == "jaxformer: the disk is full\n"
    assert captured.out.splitlines()[-1].startswith("bug: blocks.0.attention_norm ")
    assert "repro         not written: a Cache cannot be written" in captured.out
