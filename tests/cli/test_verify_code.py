"""``jaxformer verify`` on models that people's own code makes."""

import json

import numpy as np
import pytest

from jaxformer.cli.main import main

MODELS = """
import jax
import jax.numpy as jnp
import torch


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
    import jax

    with jax.numpy_rank_promotion("allow"):
        assert verify() == 0
        assert "equal (rounding)" in capsys.readouterr().out
        assert verify("wrong", "reference", "inputs.npz", "--json", "report.json") == 1
        assert "the number 2 in mul must be 1" in capsys.readouterr().out
        assert verify("partial") == 11
        assert "the parameter spare of the candidate has no effect" in capsys.readouterr().out
    report = json.loads((folder / "report.json").read_text())
    assert report["verdict"] == "bug"
    assert "made_models.py:" in report["root_causes"][0]["jax_source"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("absent",), 2, "made_models has no function absent"),
        (("port", "reference", "absent.npz"), 3, "cannot be read as .npz"),
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
