"""``jaxformer verify`` on models that people's own code makes."""

import json

import jax
import numpy as np
import pytest

from jaxformer.cli.main import main

MODELS = """
import sys

import jax
import jax.numpy as jnp
import torch
from flax import nnx


def reference():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 3))


def forward(params, x):
    return jax.nn.gelu(x @ params["w"] + params["b"], False) @ params["v"] + params["c"]


def port(reference):
    arrays = [p.detach().numpy().T for p in reference.parameters()]
    return forward, dict(zip("wbvc", arrays))


def wrong():
    _, params = port(reference())
    return lambda params, x: forward(params, 2 * x), params


def compiled(reference):
    class Port(nnx.Module):
        def __init__(self):
            self.params = nnx.data(
                {name: nnx.Param(array) for name, array in port(reference)[1].items()}
            )

        def __call__(self, x):
            return forward({name: param[...] for name, param in self.params.items()}, x)

    return nnx.jit(Port())


def broken():
    raise RuntimeError("no weights here\\nat all")


def ended():
    raise SystemExit(0)


def ending():
    return lambda params, x: sys.exit(0), {"w": jnp.ones(3)}


def nothing():
    return None


def transposed(reference):
    function, params = port(reference)
    return function, {**params, "w": params["w"].T}


def incomplete(reference):
    function, params = port(reference)
    return function, {"w": params["w"]}


def named(reference):
    function, params = port(reference)
    return function, {**params, "act": "gelu"}


def partial(reference):
    function, params = port(reference)
    return function, {**params, "spare": params["w"]}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "made_models.py").write_text(MODELS)
    np.savez(tmp_path / "inputs.npz", np.random.default_rng(0).normal(size=(4, 5)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def verify(jax="port", torch="reference", inputs="inputs.npz", *more):
    models = ["--torch", f"made_models:{torch}", "--jax", f"made_models:{jax}"]
    return main(["verify", *models, "--inputs", inputs, *more])


def test_the_exit_code_says_what_was_found(folder, capsys):
    with jax.numpy_rank_promotion("allow"):
        assert verify() == 0
        assert "equal (rounding)" in capsys.readouterr().out
        assert verify("compiled") == 0
        assert verify("wrong", "reference", "inputs.npz", "--json", "report.json") == 1
        assert "the number 2 in mul must be 1" in capsys.readouterr().out
        assert verify("partial") == 11
        assert "the parameter spare of the candidate has no effect" in capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "bug"
    assert "made_models.py:" in report["root_causes"][0]["jax_source"]


def test_a_page_and_what_got_worse(folder, capsys):
    with jax.numpy_rank_promotion("allow"):
        assert verify("port", "reference", "inputs.npz", "--json", "before.json") == 0
        options = ("--html", "page.html", "--against", "before.json")
        assert verify("wrong", "reference", "inputs.npz", *options) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "html          page.html" in lines
    assert any(line.startswith("against       before.json: ") for line in lines)
    assert "  0: bug, it was exact: the number 2 in mul must be 1" in "\n".join(lines)
    assert lines[-1].startswith("bug: ")
    page = (folder / "page.html").read_text()
    assert "the number 2 in mul must be 1" in page
    assert "made_models.py:" in page


def test_a_page_that_cannot_be_written(folder, capsys):
    assert verify("port", "reference", "inputs.npz", "--html", "no/page.html") == 7
    assert "the folder no does not exist" in capsys.readouterr().err
    assert verify("port", "reference", "inputs.npz", "--html", "x", "--json", "x") == 2
    assert "--html and --json name the same file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("absent",), 2, "made_models has no function absent"),
        (("port", "reference", "absent.npz"), 3, "cannot be read as .npz"),
        (
            ("port", "broken"),
            2,
            "--torch made_models:broken raised RuntimeError: no weights here\n",
        ),
        (("broken",), 2, "--jax made_models:broken raised RuntimeError: no weights here\n"),
        (
            ("port", "nothing"),
            2,
            "--torch made_models:nothing returned None, which is no torch.nn.Module",
        ),
        (("nothing",), 2, "--jax made_models:nothing: the candidate must be an NNX"),
        (("named",), 2, "--jax made_models:named: the parameter act of the candidate is no array"),
        (("transposed",), 2, "the inputs do not fit the candidate: TypeError: dot_general"),
        (("incomplete",), 2, "the candidate raised KeyError: 'b' at "),
        (("ended",), 2, "--jax made_models:ended ended the program: SystemExit(0)"),
        (("ending",), 2, "the candidate ended the program: SystemExit(0)"),
    ],
)
def test_what_cannot_work_is_said_in_a_line(folder, capsys, arguments, code, words):
    assert verify(*arguments) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("inputs", [{"x": np.ones(5)}, {"arr_0": 0, "arr_1": 0}])
def test_inputs_that_the_reference_does_not_take(folder, capsys, inputs):
    np.savez(folder / "others.npz", **inputs)
    assert verify("port", "reference", "others.npz") == 2
    assert "others.npz does not fit the reference's forward(input" in capsys.readouterr().err


def test_inputs_of_a_wrong_shape(folder, capsys):
    np.savez(folder / "narrow.npz", np.ones((4, 3), np.float32))
    assert verify("port", "reference", "narrow.npz") == 2
    error = capsys.readouterr().err
    assert "the inputs do not fit the reference: RuntimeError: " in error
    assert error.endswith("shapes cannot be multiplied (4x3 and 5x7); given: float32 (4, 3)\n")
    assert verify("port", "reference", "inputs.npz", "--jax-inputs", "narrow.npz") == 2
    error = capsys.readouterr().err
    assert "the inputs do not fit the candidate: TypeError: dot_general requires" in error
    assert "made_models.py:" in error


@pytest.mark.parametrize("models", [("port", "broken"), ("transposed", "reference")])
def test_debug_shows_the_users_code(folder, capsys, models):
    assert verify(*models, "inputs.npz", "--debug") == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert 'made_models.py", line' in error


def test_a_module_that_cannot_be_imported(folder, capsys):
    (folder / "broken_models.py").write_text("1 / 0")
    code = main(["verify", "--torch", "broken_models:f", "--jax", "x:y", "--inputs", "inputs.npz"])
    assert code == 2
    words = "--torch broken_models:f: the import of broken_models raised ZeroDivisionError"
    assert words in capsys.readouterr().err


def test_names_that_only_one_side_has(folder, capsys):
    np.savez(folder / "named.npz", input=np.ones((4, 5)))
    assert verify("port", "reference", "named.npz") == 2
    error = capsys.readouterr().err
    assert "the candidate, which takes (x): it has no input input" in error
    assert "in order, pass a list, or name them arr_0, arr_1 … in an .npz file" in error


def test_files_that_are_no_npz(folder, capsys):
    np.save(folder / "one.npy", np.ones((4, 5)))
    (folder / "junk.npz").write_text("junk")
    (folder / "empty.npz").touch()
    whole = (folder / "inputs.npz").read_bytes()
    (folder / "cut.npz").write_bytes(whole[: len(whole) // 2])
    for name in ("one.npy", "junk.npz", "empty.npz", "cut.npz"):
        assert verify("port", "reference", name) == 3
        expected = f"jaxformer: {name} is no .npz file: save the inputs with numpy.savez\n"
        assert capsys.readouterr().err == expected
    np.savez(folder / "objects.npz", x=np.array([{}]))
    assert verify("port", "reference", "objects.npz") == 3
    assert "objects.npz: the array x is damaged, or holds Python objects" in capsys.readouterr().err
