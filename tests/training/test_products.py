"""Whose products a run computes with: decided once, written down, and kept when it is resumed."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.errors import UsageError
from jaxformer.hardware.custom_calls import UnavailableError
from jaxformer.training import products
from jaxformer.training.presets import nano
from jaxformer.training.products import choose_products
from tests.hardware.test_torch_library import needs_products
from tests.support.tiny import DROPOUT, losses, resume, same_run, train

NANO = nano()
FASTER, SLOWER, MISSING = "faster", "slower", "missing"


@pytest.fixture
def machine(monkeypatch):
    """Sets whether torch's products are faster here, slower, or missing."""

    def become(kind):
        def register():
            if kind == MISSING:
                raise UnavailableError("torch is not installed")

        monkeypatch.setattr(products, "register_products", register)
        monkeypatch.setattr(products, "is_torch_faster", lambda *_: kind == FASTER)
        monkeypatch.setattr(products, "count_cores", lambda: 2)

    return become


def choose(chosen, devices=2, *, resumed=False, **changes):
    config = dataclasses.replace(NANO, products=chosen, **changes)
    config, notes = choose_products(config, jax.devices()[:devices], resumed=resumed)
    return config.products, notes


@pytest.mark.parametrize(("kind", "chosen"), [(FASTER, "torch"), (SLOWER, "xla"), (MISSING, "xla")])
def test_the_faster_one_is_taken(machine, kind, chosen):
    machine(kind)
    assert choose("auto") == (chosen, [])
    assert choose("xla") == ("xla", [])


def test_torch_is_not_tried_where_it_cannot_gain(machine):
    machine(FASTER)
    assert choose("auto", 8)[0] == "xla", "eight devices on two cores"
    assert choose("auto", dtype="bfloat16")[0] == "xla"
    assert choose("auto", strategy="mesh")[0] == "xla"
    tiny = dataclasses.replace(NANO.model, d_model=16)
    assert choose("auto", model=tiny)[0] == "xla"


def test_torch_that_was_asked_for_is_used_or_the_reason_said(machine):
    machine(SLOWER)
    assert choose("torch") == ("torch", [])
    assert choose("torch", 8) == ("torch", [])
    with pytest.raises(UsageError, match="torch's products are float32, and dtype is bfloat16: "):
        choose("torch", dtype="bfloat16")
    with pytest.raises(UsageError, match="torch's products cannot be divided over a mesh: "):
        choose("torch", strategy="mesh")
    machine(MISSING)
    with pytest.raises(UsageError, match=r"used here \(torch is not installed\): give another "):
        choose("torch")


def test_a_resumed_run_keeps_what_it_began_with(machine):
    machine(FASTER)
    assert choose("auto", resumed=True) == ("xla", []), "an older version began it"
    machine(SLOWER)
    assert choose("torch", resumed=True) == ("torch", [])
    machine(MISSING)
    chosen, notes = choose("torch", resumed=True)
    assert chosen == "xla"
    assert notes == [
        "the products are XLA's from here on, as torch's cannot be used here (torch is not "
        "installed)"
    ]


@pytest.mark.tier("full")
@needs_products
def test_a_run_with_torchs_products_resumes_bit_for_bit(text, capsys):
    arguments = ["--products", "torch", "--decay-steps", 30, *DROPOUT]
    assert train(text, "whole", "--steps", 30, *arguments) == 0
    assert "torch's products" in capsys.readouterr().out
    assert train(text, "run", "--steps", 10, *arguments) == 0
    assert json.loads(Path("run/config.json").read_text())["products"] == "torch"
    assert resume("run", "--steps", 30) == 0
    same_run("run", "whole")
    # XLA's are others, and as near as rounding lets them be.
    assert train(text, "xla", "--steps", 30, *arguments, "--products", "xla") == 0
    candidate, reference = (list(losses(run).values()) for run in ("whole", "xla"))
    np.testing.assert_allclose(candidate, reference, rtol=1e-4)
