"""``jaxformer verify``: every format against every other, bugs named, and what is refused."""

import dataclasses
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxformer.cli import main
from jaxformer.config import EncoderDecoderConfig
from jaxformer.parity.reference import make_twin
from jaxformer.parity.report_files import load_report
from tests.ported import CONFIG, VOCABULARY, gpt2_state, hugging_face, nanogpt, port, refused
from tests.verified import changed, is_installed, llama, nudged, verify

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parent.parent
FORMATS = ("folder", "run", "safetensors", "pt")
SHORT = ("--length", 9)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory):
    """One GPT-2 in every format."""
    here = tmp_path_factory.mktemp("gpt2")
    paths = {
        "folder": hugging_face(here / "hf", gpt2_state()),
        "run": here / "run",
        "safetensors": here / "gpt2.safetensors",
        "pt": here / "gpt2.pt",
    }
    for path in list(paths.values())[1:]:
        port(paths["folder"], path)
    return paths


@pytest.fixture(scope="session")
def llamas(tmp_path_factory):
    """A folder with a Llama, as transformers has it and as a file of ours."""
    here = tmp_path_factory.mktemp("llama")
    llama(here)
    return here


@pytest.fixture(scope="session")
def nano(tmp_path_factory):
    """NanoGPT's checkpoint with its characters, and the run it becomes."""
    here = tmp_path_factory.mktemp("nano")
    path = nanogpt(here / "nano")
    port(path, here / "run")
    return path, here / "run"


@pytest.mark.parametrize(("a", "b"), list(itertools.product(FORMATS, FORMATS)))
def test_every_format_equals_every_other(gpt2, a, b):
    code, lines = verify(gpt2[a], gpt2[b], "--mode", "forward", *SHORT)
    assert code == 0
    assert lines[-1] in ("equal (rounding)", "equal (amplified)")
    library = "transformers" if a == "folder" and is_installed("transformers") else "torch_ref"
    assert library in lines[0]
    assert "jaxformer.TransformerLM in JAX" in lines[1]


BUGS = {
    "weight": (
        {"arrays": {"blocks.1.feed_forward.down_proj.weight": nudged}},
        "blocks.1.feed_forward.down_proj (their ",
        "its weights differ: kernel (1 of its 960 elements differ)",
    ),
    "rotary layout": (
        {"config": {"rotary_interleaved": True}},
        "blocks.0.attention (their ",
        "its position.interleaved is True, theirs False",
    ),
    "eps": (
        {"config": {"norm_eps": 1e-6}},
        "blocks.0.attention_norm (their ",
        "its eps is 1e-06, theirs 1e-05",
    ),
    "activation": (
        {"config": {"activation": "geglu"}},
        "blocks.0.feed_forward (their ",
        "its activation is gelu, theirs silu",
    ),
    "rotary base": ({"config": {"rotary_base": 500.0}}, "blocks.0.attention", "500.0"),
    "scale": (
        {"config": {"attention_scale": 0.5}},
        "blocks.0.attention (their ",
        "its scale is 0.5, theirs 0.40824829",
    ),
    "window": (
        {"config": {"sliding_window": 5}},
        "the whole model (their whole model)",
        "its sliding_window is 5, theirs absent",
    ),
}


@pytest.mark.parametrize("bug", list(BUGS))
@pytest.mark.parametrize("a", ["llama", "llama.safetensors"])
def test_a_bug_is_code_1_and_the_last_line_names_the_node(llamas, tmp_path, a, bug):
    changes, node, words = BUGS[bug]
    wrong = changed(llamas / "llama.safetensors", tmp_path / "wrong.safetensors", **changes)
    code, lines = verify(llamas / a, wrong, "--mode", "forward", *SHORT)
    assert code == 1
    assert lines[-1].startswith(f"bug: {node}")
    assert words in lines[-1]


def test_gradients_are_compared_by_default(llamas):
    code, lines = verify(llamas / "llama", llamas / "llama.safetensors", *SHORT)
    assert code == 0
    assert "TransformerLM against" in "\n".join(lines)
    assert ", grad, float32" in "\n".join(lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_measured_in_another_dtype(gpt2, dtype):
    code, lines = verify(gpt2["run"], gpt2["pt"], "--mode", "forward", "--dtype", dtype, *SHORT)
    assert code == 0
    assert f"forward, {dtype}" in "\n".join(lines)


def test_weights_that_were_rounded_once_are_no_bug(gpt2, tmp_path):
    port(gpt2["safetensors"], tmp_path / "low.safetensors", "--dtype", "bfloat16")
    code, lines = verify(gpt2["safetensors"], tmp_path / "low.safetensors", *SHORT)
    assert code == 0
    assert "float32" in lines[0]
    assert "bfloat16" in lines[1]
    code, lines = verify(tmp_path / "low.safetensors", tmp_path / "low.safetensors", *SHORT)
    assert code == 0


@pytest.mark.parametrize(
    "mode",
    [("train", "--steps", 3), ("train", "--steps", 2, "--dropout"), ("generate", "--tokens", 4)],
)
def test_training_and_generation(llamas, tmp_path, mode):
    dropout = {"attention_dropout": 0.1, "residual_dropout": 0.2}
    right = changed(llamas / "llama.safetensors", tmp_path / "right.safetensors", config=dropout)
    wrong = changed(right, tmp_path / "wrong.safetensors", config={"rotary_interleaved": True})
    code, lines = verify(right, right, "--mode", *mode, *SHORT)
    assert code == 0
    assert lines[-1] == "equal (rounding)"
    code, lines = verify(right, wrong, "--mode", *mode, *SHORT)
    assert code == 1
    unit = "token" if mode[0] == "generate" else "step"
    assert lines[-1].startswith(f"bug: {unit} 0: ours ")
    assert any("blocks.*.attention.position.interleaved  True" in line for line in lines)


def test_a_wrong_rotary_base_parts_training_and_generation(llamas, tmp_path):
    """The tables of the other side are taken over only where ours are right."""
    wrong = changed(
        llamas / "llama.safetensors", tmp_path / "wrong.safetensors", config={"rotary_base": 500.0}
    )
    for mode in (("train", "--steps", 1), ("generate", "--tokens", 2)):
        code, lines = verify(llamas / "llama", wrong, "--mode", *mode, *SHORT)
        assert code == 1, lines


def test_a_text_is_read_with_the_vocabulary_of_either(nano, tmp_path):
    path, run = nano
    text = tmp_path / "letters.txt"
    text.write_text("abc hid\n" * 20)
    for a, b in ((path, run), (run, path)):
        for mode in (("forward",), ("train", "--steps", 2), ("generate", "--tokens", 3)):
            code, lines = verify(a, b, "--mode", *mode, "--data", text, *SHORT)
            assert code == 0
            assert f"{text}, " in lines[2]
    assert set("abc hid\n") <= set(VOCABULARY)


def test_the_other_rotary_layout_is_no_bug_where_the_weights_fit_it(llamas, tmp_path):
    """Neighbours turned, with the weights of each head in that order: the same model."""

    def neighbours(array):
        # Six features a head: 0 1 2 and 3 4 5 are the halves.
        heads = array.reshape(-1, 6, *array.shape[1:])
        return heads[:, [0, 3, 1, 4, 2, 5]].reshape(array.shape)

    names = [f"blocks.{n}.attention.{p}_proj.weight" for n in range(2) for p in "qk"]
    other = changed(
        llamas / "llama.safetensors",
        tmp_path / "other.safetensors",
        config={"rotary_interleaved": True},
        arrays=dict.fromkeys(names, neighbours),
    )
    code, lines = verify(llamas / "llama", other, *SHORT)
    assert code == 0
    assert "reordered to A's rotary layout" in lines[1]
    code, lines = verify(other, llamas / "llama", *SHORT)
    assert code == 0
    # And with a bug beside it, that bug alone is found.
    wrong = changed(other, tmp_path / "wrong.safetensors", arrays={names[3]: nudged})
    code, lines = verify(llamas / "llama", wrong, *SHORT)
    assert code == 1
    assert lines[-1].startswith("bug: blocks.1.attention.k_proj (their ")
    assert sum(line.startswith("bug ") for line in lines) == 0


def test_reports_are_written(llamas, tmp_path):
    page, numbers = tmp_path / "report.html", tmp_path / "report.json"
    a, b = llamas / "llama", llamas / "llama.safetensors"
    code, _ = verify(a, b, *SHORT, "--html", page, "--json", numbers, "--seed", 5)
    assert code == 0
    report = load_report(numbers)
    assert report.verdict == "rounding"
    assert report.mode == "grad"
    assert str(a) in report.about["theirs"]
    assert str(b) in report.about["ours"]
    assert report.about["data"] == "random tokens, seed 5"
    assert report.about["inputs"] == "int64 (1, 9)"
    assert "Content-Security-Policy" in page.read_text()


def test_what_got_worse_since_an_earlier_report_is_an_error(llamas, tmp_path):
    before = tmp_path / "before.json"
    a, b = llamas / "llama", llamas / "llama.safetensors"
    assert verify(a, b, "--mode", "forward", *SHORT, "--json", before)[0] == 0
    code, lines = verify(a, b, "--mode", "forward", *SHORT, "--against", before)
    assert code == 0
    assert lines[-1] == "equal (rounding)"
    assert any(f"{before}: nothing got worse" in line for line in lines)

    report = json.loads(before.read_text())
    gone = next(n for n in report["nodes"] if n["path"] == "blocks.1.feed_forward")
    report["nodes"].remove(gone)
    before.write_text(json.dumps(report))
    code, lines = verify(a, b, "--mode", "forward", *SHORT, "--against", before)
    assert code == 1
    assert lines[-1] == f"worse than {before}: blocks.1.feed_forward: new, rounding"

    wrong = changed(b, tmp_path / "wrong.safetensors", config={"norm_eps": 1e-6})
    code, lines = verify(a, wrong, "--mode", "forward", *SHORT, "--against", before)
    assert code == 1
    assert lines[-1].startswith("bug: blocks.0.attention_norm ")
    assert any("bug, it was rounding" in line for line in lines)


def test_an_encoder_and_decoder(tmp_path):
    config = EncoderDecoderConfig(
        d_model=24, num_heads=3, d_ff=35, context_length=17, source_vocab_size=31,
        target_vocab_size=37, num_encoder_layers=2, num_decoder_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    module = make_twin(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    record = {"dialect": "torch_ref", "class": "EncoderDecoder"}
    path, wrong = tmp_path / "right.pt", tmp_path / "wrong.pt"
    settings = dataclasses.asdict(config)
    torch.save({"model": module.state_dict(), "config": settings, **record}, path)
    settings["activation"] = "gelu"
    torch.save({"model": module.state_dict(), "config": settings, **record}, wrong)
    code, lines = verify(path, path, "--mode", "forward")
    assert code == 0
    assert "int64 (1, 17) and int64 (1, 13)" in lines[2]
    code, lines = verify(path, wrong, "--mode", "forward")
    assert code == 1
    assert lines[-1].startswith("bug: encoder.blocks.0.feed_forward ")
    code, line = refused("verify", path, path, "--mode", "train")
    assert code == 2
    assert "an encoder and a decoder" in line
    code, line = refused("verify", path, path, "--data", "python-docs")
    assert code == 2
    assert "leave out --data" in line


def test_a_bert_with_and_without_its_pooler(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.BertConfig(
        vocab_size=31, hidden_size=24, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=44, max_position_embeddings=19,
    )  # fmt: skip
    for pooler in (True, False):
        torch.manual_seed(0)
        module = transformers.BertModel(settings, add_pooling_layer=pooler)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        folder = tmp_path / f"bert-{pooler}"
        module.save_pretrained(folder)
        code, lines = verify(folder, folder)
        assert code == 0
        assert any("pooler" in line for line in lines) is pooler
        code, line = refused("verify", folder, folder, "--mode", "train")
        assert code == 2
        assert "no head" in line


def test_without_transformers_torch_ref_runs_the_folder(gpt2, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "transformers" else found(name)
    )
    code, lines = verify(gpt2["folder"], gpt2["run"], "--mode", "forward", *SHORT)
    assert code == 0
    assert "torch_ref TransformerLM" in lines[0]
    assert "as transformers is not installed" in lines[0]


def test_jax_may_be_set_to_float64_or_not(gpt2):
    for wide in (False, True):
        with jax.enable_x64(wide):
            assert verify(gpt2["pt"], gpt2["run"], "--mode", "forward", *SHORT)[0] == 0
            assert jax.config.jax_enable_x64 is wide


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
    assert 'pip install "jaxformer[torch]"' in done.stderr


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


def test_help_needs_neither_jax_nor_torch():
    code = (
        "import sys\nfrom jaxformer.cli import main\n"
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
    filled = [argument.format(**paths) for argument in arguments]
    refuse(["verify", *filled], code, words.format(**paths))


class Evil:
    """What a file must not make us build."""


def test_damaged_runs_are_refused(refuse, tmp_path, gpt2):
    shutil.copytree(gpt2["run"], tmp_path / "run")
    manifest = next(tmp_path.glob("run/checkpoints/*/MANIFEST.json"))
    manifest.write_text(manifest.read_text()[:-20])
    refuse(["verify", tmp_path / "run", gpt2["pt"]], 4)


def test_a_bug_of_ours_is_one_line(gpt2, monkeypatch, capsys):
    monkeypatch.setattr("jaxformer.parity.comparison.compare", lambda *_, **__: 1 / 0)
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
    monkeypatch.setattr("jaxformer.parity.command.save_json", fail(full))
    monkeypatch.setattr("jaxformer.parity.repro_writing.write_repro", fail(odd))
    paths = ("--json", str(tmp_path / "x.json"), "--repro", str(tmp_path / "repro"))
    arguments = [*map(str, (a, wrong)), "--mode", "forward", *map(str, SHORT), *paths]
    capsys.readouterr()
    assert main(["verify", *arguments]) == 7
    captured = capsys.readouterr()
    assert captured.err == "jaxformer: the disk is full\n"
    assert captured.out.splitlines()[-1].startswith("bug: blocks.0.attention_norm ")
    assert "repro       not written: a Cache cannot be written" in captured.out
