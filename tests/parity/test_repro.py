"""Repros: the script shows the bug without the checkpoints, and no bug once that is fixed."""

import contextlib
import io
import json
import re
import runpy
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxformer.errors import CheckpointError, UsageError
from jaxformer.parity import assert_parity
from jaxformer.parity.comparison.api import compare
from jaxformer.parity.report.files import load_report
from jaxformer.parity.repro import Repro, write_repro
from jaxformer.porting import from_torch
from jaxformer.porting.formats.safetensors_files import read_safetensors, write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
from tests.support.ported import gpt2_state, hugging_face, port
from tests.support.tiers import FULL
from tests.support.verified import changed, llama, nudged, verify
from torch_ref.config import TransformerLMConfig
from torch_ref.transformer_lm import TransformerLM

torch = pytest.importorskip("torch")
SHORT = ("--length", 9)


def run(folder):
    """Runs the script of a repro and returns what it prints, and the message of its assertion.

    That it runs in a process of its own is seen in ``test_verify_docs``.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(folder / "repro.py"))
        except AssertionError as error:
            return out.getvalue(), str(error)
    return out.getvalue(), ""


def change_config(folder, **settings):
    """Gives the candidate other settings."""
    path = folder / "node.json"
    about = json.loads(path.read_text())
    about["candidate"]["config"].update(settings)
    path.write_text(json.dumps(about))


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    here = tmp_path_factory.mktemp("llama")
    llama(here)
    return here


@pytest.mark.tier("full")
@pytest.mark.parametrize("a", ["llama", "llama.safetensors"])
def test_a_script_shows_the_bug_by_itself_and_none_once_it_is_fixed(llamas, tmp_path, a):
    here = tmp_path / "gone"
    shutil.copytree(llamas, here)
    wrong = changed(
        here / "llama.safetensors", here / "wrong.safetensors", config={"norm_eps": 1e-6}
    )
    repro, numbers = tmp_path / "repro", tmp_path / "report.json"
    code, _ = verify(
        here / a, wrong, "--mode", "forward", *SHORT, "--repro", repro, "--json", numbers
    )
    assert code == 1
    (first, *_) = load_report(numbers).root_causes
    assert first.path == "blocks.0.attention_norm"
    shutil.rmtree(here)

    printed, complaint = run(repro)
    assert complaint == "they differ by more than rounding"
    (line,) = printed.splitlines()
    found = re.fullmatch(r"output: off by (\S+) of scale, allowed (\S+): bug", line)
    assert found is not None, line
    # The module alone has the error that the report gave.
    assert float(found[1]) == pytest.approx(first.forward.relative, rel=0.05)

    change_config(repro, norm_eps=1e-5)
    printed, complaint = run(repro)
    assert complaint == ""
    assert printed.endswith(": rounding\n")


def result(folder):
    repro = Repro(folder)
    return repro.run(repro.build_reference(), repro.build_candidate())


OLD_SCRIPT = """\
from pathlib import Path

from jaxformer.parity.repro import Repro

repro = Repro(Path(__file__).parent)
theirs = repro.build_theirs()  # LlamaAttention, by the settings in node.json
ours = repro.build_ours()  # MultiHeadAttention, by the settings in node.json
result = repro.run(theirs, ours)
print(result)
assert result.is_equal, "they differ by more than rounding"
"""


@pytest.mark.tier("full")
def test_a_folder_of_format_1_still_runs(llamas, tmp_path):
    """Its script, its node.json and its arrays say theirs and ours."""
    wrong = changed(
        llamas / "llama.safetensors", tmp_path / "wrong.safetensors", config={"norm_eps": 1e-6}
    )
    repro = tmp_path / "repro"
    assert verify(llamas / "llama", wrong, *SHORT, "--repro", repro)[0] == 1
    expected = result(repro)

    old = {"reference": "theirs", "candidate": "ours"}
    about = json.loads((repro / "node.json").read_text())
    about = {old.get(key, key): value for key, value in about.items()} | {"format": 1}
    assert about.keys() == {"format", "message", "backward", "groups", "theirs", "ours"}
    (repro / "node.json").write_text(json.dumps(about))
    tensors, _ = read_safetensors(repro / "arrays.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        side, _, rest = name.partition("/")
        stored[f"{old.get(side, side)}/{rest}"] = StoredTensor.of(tensor.read())
    assert {name.partition("/")[0] for name in stored} == {"theirs", "ours", "tables", "expected"}
    write_safetensors(repro / "arrays.safetensors", stored)
    (repro / "repro.py").write_text(OLD_SCRIPT)

    assert str(result(repro)) == str(expected)
    printed, complaint = run(repro)
    assert printed == f"{expected}\n"
    assert complaint == "they differ by more than rounding"


CASES = {
    "rotary layout": ({"rotary_interleaved": True}, "blocks.0.attention"),
    "rotary base": ({"rotary_base": 500.0}, "blocks.0.attention"),
    "activation": ({"activation": "geglu"}, "blocks.0.feed_forward"),
    "window": ({"sliding_window": 5}, ""),
}


@FULL
@pytest.mark.parametrize("case", CASES)
def test_each_kind_of_bug_shows_and_is_fixed(llamas, tmp_path, case):
    """In process; a table is shown in its attention, a mask in the model that makes it."""
    config, path = CASES[case]
    right = llamas / "llama.safetensors"
    wrong = changed(right, tmp_path / "wrong.safetensors", config=config)
    code, _ = verify(llamas / "llama", wrong, *SHORT, "--repro", tmp_path / "repro")
    assert code == 1
    about = json.loads((tmp_path / "repro" / "node.json").read_text())
    assert [call["path"] for call in about["candidate"]["calls"]] == [path]
    found = result(tmp_path / "repro")
    assert found.differences["output"].is_bug
    assert not found.reference_changed
    assert any(name.startswith("gradient of") for name in found.differences)

    settings = json.loads(read_safetensors(right)[1]["jaxformer"])["config"]
    change_config(tmp_path / "repro", **{name: settings[name] for name in config})
    assert result(tmp_path / "repro").is_equal


@FULL
def test_weights_that_are_one_array_of_the_reference(tmp_path):
    """GPT-2 has queries, keys and values in one matrix, jaxformer has three."""
    folder = hugging_face(tmp_path / "hf", gpt2_state())
    port(folder, tmp_path / "right.safetensors", "--as", "torch_ref")
    name = "blocks.1.attention.k_proj.weight"
    wrong = changed(
        tmp_path / "right.safetensors", tmp_path / "wrong.safetensors", arrays={name: nudged}
    )
    repro = tmp_path / "repro"
    assert verify(folder, wrong, *SHORT, "--repro", repro)[0] == 1
    found = result(repro).differences
    assert {name for name, d in found.items() if d.is_bug} == {
        "blocks.1.attention.k_proj: output",
        "blocks.1.attention.k_proj: weight kernel",
        "gradient of input 0",
    }

    tensors, _ = read_safetensors(repro / "arrays.safetensors")
    stored = {name: StoredTensor.of(tensor.read()) for name, tensor in tensors.items()}
    right = read_safetensors(tmp_path / "right.safetensors")[0][name].read().T
    stored["candidate/1/state/kernel"] = StoredTensor.of(right.astype(np.float64))
    write_safetensors(repro / "arrays.safetensors", stored)
    assert result(repro).is_equal


def test_a_wrong_row_that_no_token_reads_is_shown(tmp_path):
    torch.manual_seed(0)
    reference = TransformerLM(
        TransformerLMConfig(vocab_size=11, d_model=8, num_heads=2, num_layers=1, context_length=9)
    ).eval()
    candidate = from_torch(reference)
    embedding = candidate.token_embedding.embedding
    embedding[...] = embedding[...].at[5].add(0.1)
    repro = write_repro(
        tmp_path / "repro", reference, candidate, [np.arange(4)[None]], "token_embedding"
    )
    found = repro.run(repro.build_reference(), repro.build_candidate())
    assert {name for name, d in found.differences.items() if d.is_bug} == {"weight embedding"}
    assert not found.is_equal


@pytest.mark.tier("full")
def test_no_repro_is_written_where_there_is_no_bug(llamas, tmp_path):
    repro = tmp_path / "repro"
    code, lines = verify(
        llamas / "llama",
        llamas / "llama.safetensors",
        "--mode",
        "forward",
        *SHORT,
        "--repro",
        repro,
    )
    assert code == 0
    assert not repro.exists()
    assert not any(str(repro) in line for line in lines)


class UserReference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(5, 7)

    def forward(self, x):
        return torch.tanh(self.inner(x))


class UserCandidate(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(5, 7, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return jnp.tanh(self.inner(x))


def user_modules():
    """Returns two modules of a user with equal weights."""
    reference, candidate = UserReference(), UserCandidate()
    candidate.inner.kernel[...] = jnp.asarray(reference.inner.weight.detach().numpy().T)
    bias = reference.inner.bias.detach().numpy()
    candidate.inner.bias[...] = jnp.asarray(bias)
    return reference, candidate


def test_user_modules_are_filled_in(tmp_path):
    reference, candidate = user_modules()
    x = np.random.default_rng(0).normal(size=(3, 5))
    names = {"inner": "inner"}
    assert_parity(reference, candidate, [x], names=names)
    candidate.inner.bias[...] = candidate.inner.bias[...].at[2].add(1e-3)
    report = compare(reference, candidate, [x], names=names)
    assert report.weights[0].startswith("inner.bias is not inner.bias")
    repro = write_repro(tmp_path / "repro", reference, candidate, [x], "inner", names=names)
    with pytest.raises(UsageError, match=r"build it in repro\.py"):
        repro.build_reference()
    assert run(tmp_path / "repro")[1].startswith("fill in reference in repro.py")
    found = repro.run(torch.nn.Linear(5, 7), nnx.Linear(5, 7, rngs=nnx.Rngs(1)))
    assert found.differences["output"].error == pytest.approx(1e-3, rel=1e-4)
    assert found.differences["output"].is_bug

    reference, candidate = user_modules()
    repro = write_repro(tmp_path / "right", reference, candidate, [x], "inner", names=names)
    assert repro.run(torch.nn.Linear(5, 7), nnx.Linear(5, 7, rngs=nnx.Rngs(1))).is_equal
    with pytest.raises(UsageError, match="not the arrays of the repro: bias"):
        repro.run(torch.nn.Linear(5, 7, bias=False), candidate.inner)


@pytest.mark.tier("full")
def test_a_module_that_was_changed_after_it_was_built_is_filled_in(tmp_path):
    transformers = pytest.importorskip("transformers")
    settings = transformers.GPT2Config(
        vocab_size=31, n_embd=24, n_head=4, n_layer=2, n_positions=19
    )
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(settings).eval()
    reference.config.use_cache = False
    candidate = from_torch(reference)
    candidate.blocks[1].feed_forward_norm.eps = 1e-3
    ids = np.arange(9)[None]
    path = "blocks.1.feed_forward_norm"
    write_repro(tmp_path / "repro", reference, candidate, [ids], path)
    script = (tmp_path / "repro" / "repro.py").read_text()
    assert "reference = repro.build_reference()  # LayerNorm" in script
    assert "it was changed after it was built" in script
    repro = Repro(tmp_path / "repro")
    assert not repro.run(repro.build_reference(), candidate.blocks[1].feed_forward_norm).is_equal
    candidate.blocks[1].feed_forward_norm.eps = 1e-5
    assert repro.run(repro.build_reference(), candidate.blocks[1].feed_forward_norm).is_equal
    # The folder also holds what the reference gave when it was written.
    other = repro.build_reference()[0]
    other.eps = 1e-2
    assert repro.run(other, candidate.blocks[1].feed_forward_norm).reference_changed


def test_what_is_no_repro_is_rejected(tmp_path):
    (tmp_path / "node.json").write_text('{"format": 99}')
    with pytest.raises(CheckpointError, match="no repro of format 1 or 2"):
        Repro(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        Repro(tmp_path / "nothing")
    reference, candidate = user_modules()
    x = np.zeros((3, 5))
    with pytest.raises(UsageError, match="the name of a new folder"):
        write_repro(tmp_path, reference, candidate, [x], "inner", names={"inner": "inner"})
    with jax.enable_x64(False), pytest.raises(ValueError, match="the candidate has no outer"):
        write_repro(tmp_path / "x", reference, candidate, [x], "inner", names={"outer": "inner"})
    assert not (tmp_path / "x").exists()
