"""``jaxformer port`` and ``jaxformer inspect CHECKPOINT``: what they reject, and what they show."""

import hashlib
import http.server
import json
import os
import re
import threading

import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import save_file

from jaxformer.checkpoints import CheckpointFolder
from jaxformer.cli.main import main
from jaxformer.porting.checkpoint import open_checkpoint
from jaxformer.porting.dialects import HUGGING_FACE
from jaxformer.porting.dialects.multimodal import MULTIMODAL
from tests.support.ported import CONFIG, gpt2_state, hugging_face, nanogpt, port, run_rejected, same
from tests.support.tiny import snapshot


@pytest.fixture(autouse=True, scope="module")
def keys():
    """The first key compiles something, and what is rejected must compile nothing."""
    nnx.Rngs(0).params()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("source") / "hf", gpt2_state())


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("nowhere out", 4, ["nowhere does not exist"]),
        ("{hf}", 2, ["DST"]),
        ("{hf} out --dialect klingon", 2, ["no dialect klingon", "choose among", "gpt2"]),
        ("{hf} out.pt --as klingon", 2, ["no dialect klingon"]),
        ("{hf} out --to moon", 2, ["--to", "moon"]),
        ("{hf} out --dtype int8", 2, ["--dtype", "int8"]),
        ("{hf} out --step 1 --best", 2, ["--step and --best exclude each other"]),
        ("{hf} out --step 1", 2, ["has one checkpoint alone"]),
        ("{hf} out.pt --to jax", 2, ["--to jax writes a folder or a .safetensors file"]),
        ("{hf} out.pt --as unified", 2, ["unified's Transformer cannot hold this TransformerLM"]),
        ("{hf} out --to hf --as unified", 2, ["unified is not of Hugging Face"]),
        ("{hf} out --to hf --as llama", 2, ["llama's Llama", "cannot hold"]),
        ("{hf} out --dialect bloom", 2, []),
        ("{hf} out --config nowhere.json", 4, ["nowhere.json does not exist"]),
        ("{hf} out --ignore *.ln_f.*", 4, ["missing transformer.ln_f.weight"]),
        ("{hf} out --ignore *.inv_freq", 2, ["--ignore '*.inv_freq'", "no array and no setting"]),
        ("{hf} out.pt --tpye x", 2, ["--tpye"]),
        ("hf://owner/name out", 2, ["nothing is fetched unasked", "--download and --sha256"]),
        ("https://host/x out --download", 2, ["--download needs --sha256"]),
        ("https://host/x out --sha256 12", 2, ["64 hexadecimal digits"]),
    ],
)
def test_what_cannot_be_is_rejected(refuse, folder, flags, code, words):
    refuse(["port", *flags.replace("{hf}", str(folder)).split()], code, *words)


@pytest.mark.tier("full")
def test_a_run_that_no_model_type_holds_is_compared_with_the_nearest(refuse, whole, tmp_path):
    line = refuse(["port", whole, tmp_path / "out", "--to", "hf"], 2, "no model type of Hugging")
    assert re.search(r"the nearest: \w+'s \w+ cannot hold this TransformerLM: ", line)


def test_help_answers_at_once(capsys):
    with pytest.raises(SystemExit):
        main(["port", "--help"])
    out = capsys.readouterr().out
    for flag in ("--dialect", "--to", "--as", "--dtype", "--cast", "--overwrite", "--download"):
        assert flag in out


def test_arrays_are_left_out_on_request(tmp_path, empty_folder):
    state = {**gpt2_state(), "score.weight": torch.ones(3, 24)}
    path = hugging_face(tmp_path / "hf", state)
    shown = port(path, "out", "--to", "hf", "--ignore", "score.*")
    assert "left out     score.weight" in shown
    same("out", gpt2_state())
    proof = json.loads((empty_folder / "out" / "certificate.json").read_text())
    assert proof["source"]["ignored"] == ["score.weight"]


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_broken_file_beside_the_weights_is_named_and_copied(tmp_path, empty_folder, name):
    path = hugging_face(tmp_path / "hf", gpt2_state())
    (path / name).write_text("{")
    shown = " ".join(port(path, "out", "--to", "hf").split())
    assert f"warning: {path / name} is not JSON at character 1" in shown
    assert "it is copied as it is" in shown
    assert (empty_folder / "out" / name).read_text() == "{"


def test_only_what_a_port_wrote_is_replaced_and_only_on_request(refuse, folder, tmp_path):
    port(folder, "out.pt")
    port(folder, "run")
    refuse(["port", folder, "out.pt"], 2, "out.pt exists", "--overwrite")
    refuse(["port", folder, "run"], 2, "run exists", "--overwrite")
    refuse(["port", folder, "out.pt", "--to", "hf", "--overwrite"], 2, "something else")
    refuse(["port", folder, "run", "--to", "torch", "--overwrite"], 2, "something else")
    os.remove("out.pt")
    refuse(["port", folder, "out.pt"], 2, "out.pt.certificate.json exists")
    port(folder, "out.pt", "--overwrite")
    port(folder, "run", "--overwrite", "--dtype", "bfloat16")
    before = (tmp_path / "here" / "run" / "certificate.json").read_text()
    assert '"bfloat16"' in before
    port("run", "run", "--overwrite", "--dtype", "float32")
    os.mkdir("other")
    refuse(["port", folder, "other", "--overwrite"], 2, "other was not made by jaxformer port")
    open("run/diary.txt", "w").close()
    refuse(["port", folder, "run", "--overwrite"], 2, "holds more than jaxformer port wrote (diary")
    os.remove("run/diary.txt")
    os.symlink("run", "link")
    refuse(["port", folder, "link", "--overwrite"], 2, "something else")
    assert not [name for name in os.listdir() if name.startswith(".")]


def test_a_failed_port_leaves_what_was_there(folder, monkeypatch, tmp_path):
    port(folder, "run")
    port(folder, "out.pt")
    before = {path: data for path, (_, data) in snapshot(tmp_path).items()}

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("jaxformer.porting.port.make_certificate", fail)
    for target in ("run", "out.pt", "new", "new.pt", "a/b/c.safetensors"):
        code, line = run_rejected("port", folder, target, "--overwrite")
        assert code == 7
        assert "Input/output error" in line
    assert {path: data for path, (_, data) in snapshot(tmp_path).items()} == before


def test_the_summary_says_what_was_done(folder):
    shown = port(folder, "run").splitlines()
    assert shown[0] == f"from         {folder} · Hugging Face folder · gpt2 GPT2LMHeadModel"
    assert shown[1] == "to           run · run folder · jaxformer TransformerLM"
    assert shown[2].startswith("model        36 arrays, ")
    assert shown[-1].endswith("36 arrays read back and compared")
    assert not [line for line in shown if line != line.rstrip()]


def inspect(capsys, *arguments):
    assert main(["inspect", *map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_a_checkpoint_is_listed(capsys, folder, tmp_path):
    facts = json.loads(inspect(capsys, folder, "--json"))
    count = sum(tensor.numel() for tensor in gpt2_state().values())
    assert (facts["format"], facts["dialect"], facts["class"]) == (
        "huggingface", "gpt2", "GPT2LMHeadModel",
    )  # fmt: skip
    assert (facts["parameters"], facts["bytes"], facts["dtypes"]) == (count, 4 * count, ["float32"])
    assert facts["config"] == CONFIG
    assert facts["tensors"]["transformer.h.1.mlp.c_fc.weight"] == {
        "shape": [24, 35], "dtype": "float32", "bytes": 24 * 35 * 4
    }  # fmt: skip
    shown = inspect(capsys, folder)
    assert shown.startswith(f"{folder} · Hugging Face folder · gpt2 GPT2LMHeadModel\n")
    for words in ("0 … 1, each", "weight 24 × 72 float32 6.9 kB", "n_layer: 2", f"{count:,} param"):
        assert words in shown


def test_ties_optimizers_and_vocabularies_are_listed(capsys, tmp_path):
    path = nanogpt(tmp_path / "nano")
    facts = json.loads(inspect(capsys, path, "--json"))
    names = {"name": "lm_head.weight", "to": "transformer.wte.weight"}
    assert facts["tied"] == [names]
    assert facts["optimizer"]
    assert facts["step"] == 3
    assert facts["vocabulary"] == "\n abcdefghi"
    shown = inspect(capsys, path)
    assert "tied: lm_head.weight = transformer.wte.weight" in shown
    assert "with the state of an optimizer" in shown
    assert "vocabulary: 11 characters" in shown


def test_what_cannot_be_ported_is_listed_all_the_same(capsys, tmp_path):
    same_array = torch.ones(3, 5)
    torch.save({"odd.weight": same_array, "even.weight": same_array, "n": torch.ones(2)}, "odd.pt")
    facts = json.loads(inspect(capsys, "odd.pt", "--json"))
    assert "no dialect has these arrays" in facts["problem"]
    assert facts["parameters"] == 17
    assert facts["tied"] == [{"name": "even.weight", "to": "odd.weight"}]
    assert "unknown" in inspect(capsys, "odd.pt")


def test_a_run_is_listed_with_its_settings(capsys, whole):
    facts = json.loads(inspect(capsys, whole, "--json"))
    assert (facts["format"], facts["dialect"], facts["step"]) == ("run", "jaxformer", 30)
    assert facts["config"]["d_model"] == 16
    assert facts["optimizer"]
    shown = inspect(capsys, whole, "--step", 20)
    assert "step: 20" in shown
    # Settings with their default value are not shown.
    assert "rotary_base" not in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nowhere/x"], 4, ["does not exist"]),
        (["atention"], 2, ["atention is not to be inspected: use attention"]),
        (["."], 4, ["is not a checkpoint"]),
        ([".", "--step", "1", "--best"], 2, ["exclude each other"]),
    ],
)
def test_what_is_no_checkpoint_is_not_listed(refuse, arguments, code, words):
    refuse(["inspect", *arguments], code, *words)


def test_a_run_goes_to_torch_and_back_with_its_step_and_moments(whole, empty_folder):
    shown = port(whole, "out.pt", "--step", 20)
    assert "AdamW after 20 steps" in shown
    saved = torch.load("out.pt", weights_only=True)
    assert saved["step"] == 20
    assert saved["dialect"] == "torch_ref"
    port("out.pt", "again")
    before, _ = CheckpointFolder(whole / "checkpoints").restore(20)
    after, manifest = CheckpointFolder(empty_folder / "again" / "checkpoints").restore(20)
    assert int(after["step"]) == 20
    for group in ("parameters", "mu", "nu"):
        assert before[group].keys() == after[group].keys()
        for name, array in before[group].items():
            assert np.array_equal(np.asarray(array), np.asarray(after[group][name])), name
    # The rate of the last step, on the cosine that ends at step 30.
    rate = saved["optimizer"]["param_groups"][0]["lr"]
    assert 1e-4 < rate < 1e-2
    assert manifest["optimizer"]["learning_rate"] == rate


@pytest.fixture
def server(folder):
    """This machine serves one file, and redirects requests for another."""
    data = (folder / "model.safetensors").read_bytes()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/model.safetensors":
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            elif self.path == "/elsewhere":
                self.send_response(302)
                self.send_header("Location", "ftp://example.invalid/model")
                self.end_headers()
            else:
                self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", hashlib.sha256(data).hexdigest()
        running.shutdown()
        thread.join()


def test_a_file_is_fetched_only_when_asked_and_only_if_it_is_the_one(server, folder, empty_folder):
    address, digest = server
    config = ["--config", folder / "config.json"]
    fetch = ["port", f"{address}/model.safetensors", "out", *config]
    for arguments, code, words in (
        (fetch, 2, "nothing is fetched unasked"),
        ([*fetch, "--download", "--sha256", "0" * 64], 4, "is not the file that was meant"),
        (["port", f"{address}/gone", "out", "--download", "--sha256", digest], 7, "404"),
        (["port", f"{address}/elsewhere", "out", "--download", "--sha256", digest], 2, "ftp://"),
        (["port", "http://example.invalid/x", "out", "--download", "--sha256", digest], 2, "https"),
        (["port", "ftp://127.0.0.1/x", "out", "--download", "--sha256", digest], 2, "https"),
    ):
        found, line = run_rejected(*arguments)
        assert found == code, line
        assert words in line
        assert list(empty_folder.iterdir()) == []
    port(*fetch[1:], "--to", "hf", "--download", "--sha256", digest.upper())
    same("out", gpt2_state())
    assert [path.name for path in empty_folder.iterdir()] == ["out"]


def test_a_single_module_is_ported_too(empty_folder):
    d, f = 24, 35
    state = {
        "net.0.weight": torch.randn(f, d), "net.0.bias": torch.randn(f),
        "net.3.weight": torch.randn(d, f), "net.3.bias": torch.randn(d),
    }  # fmt: skip
    save_file(state, "ff.safetensors")
    code, line = run_rejected("port", "ff.safetensors", "run")
    assert code == 2
    assert "a run's folder holds whole models" in line
    port("ff.safetensors", "ff.pt")
    assert open_checkpoint("ff.pt").config["class"] == "FeedForward"
    port("ff.pt", "back.safetensors")
    same("back.safetensors", state)
    port("ff.pt", "twin.pt", "--as", "torch_ref")
    twin = torch.load("twin.pt", weights_only=True)["model"]
    assert torch.equal(twin["down_proj.weight"], state["net.3.weight"])


def test_the_list_of_model_types_is_printed(capsys):
    assert main(["port", "--list"]) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split() == ["model", "type", "state", "parts"]
    assert [line.split()[0] for line in lines] == [*HUGGING_FACE, *MULTIMODAL]
    states = {line.split()[0]: line for line in lines}
    assert re.search("ported, generation +Rotary", states["llama"])
    assert re.search("text part, generation +Rotary", states["gemma3"])
