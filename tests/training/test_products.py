"""Whose products a run computes with: decided once, written down, and kept when it is resumed."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.errors import UsageError
from jaxformer.hardware.custom_call_builds import UnavailableError
from jaxformer.training import products
from jaxformer.training.presets import nano
from jaxformer.training.products import choose_products
from tests.execution.test_called_products import for_each_library
from tests.support.tiny import DROPOUT, losses, resume, same_run, train

NANO = nano()


@pytest.fixture
def machine(monkeypatch):
    """Sets whose products are the fastest here, None for XLA's, and what is missing."""

    def become(fastest, missing=()):
        def register(library):
            if library in missing:
                raise UnavailableError("torch is not installed")

        monkeypatch.setattr(products, "register_products", register)
        monkeypatch.setattr(products, "fastest_library", lambda *_: fastest)
        monkeypatch.setattr(products, "count_cores", lambda: 2)

    return become


def choose(chosen, devices=2, *, resumed=False, **changes):
    config = dataclasses.replace(NANO, products=chosen, **changes)
    config, notes = choose_products(config, jax.devices()[:devices], resumed=resumed)
    return config.products, notes


@pytest.mark.parametrize("fastest", [None, "jaxformer", "torch"])
def test_the_fastest_is_taken(machine, fastest):
    machine(fastest)
    assert choose("auto") == (fastest or "xla", [])
    assert choose("xla") == ("xla", [])


def test_others_are_not_tried_where_they_cannot_gain(machine):
    machine("jaxformer")
    assert choose("auto", 8)[0] == "xla", "eight devices on two cores"
    assert choose("auto", dtype="bfloat16")[0] == "xla"
    assert choose("auto", strategy="mesh")[0] == "xla"
    tiny = dataclasses.replace(NANO.model, d_model=16)
    assert choose("auto", model=tiny)[0] == "xla"


@pytest.mark.parametrize("library", ["jaxformer", "torch"])
def test_what_was_asked_for_is_used_or_the_reason_said(machine, library):
    machine(None)
    assert choose(library) == (library, [])
    assert choose(library, 8) == (library, [])
    said = f"{library}'s products are float32, and dtype is bfloat16: "
    with pytest.raises(UsageError, match=said):
        choose(library, dtype="bfloat16")
    with pytest.raises(UsageError, match=f"{library}'s products cannot be divided over a mesh: "):
        choose(library, strategy="mesh")
    machine(None, missing=[library])
    with pytest.raises(UsageError, match=r"used here \(torch is not installed\): give another "):
        choose(library)


def test_a_resumed_run_keeps_what_it_began_with(machine):
    machine("torch")
    assert choose("auto", resumed=True) == ("xla", []), "an older version began it"
    assert choose("jaxformer", resumed=True) == ("jaxformer", [])
    machine("jaxformer", missing=["torch"])
    chosen, notes = choose("torch", resumed=True)
    assert chosen == "xla"
    assert notes == [
        "the products are XLA's from here on, as torch's cannot be used here (torch is not "
        "installed)"
    ]


@pytest.mark.tier("full")
@for_each_library
def test_a_run_with_others_products_resumes_bit_for_bit(text, capsys, library):
    arguments = ["--products", library, "--decay-steps", 30, *DROPOUT]
    assert train(text, "whole", "--steps", 30, *arguments) == 0
    assert f"{library}'s products" in capsys.readouterr().out
    assert train(text, "run", "--steps", 10, *arguments) == 0
    assert json.loads(Path("run/config.json").read_text())["products"] == library
    assert resume("run", "--steps", 30) == 0
    same_run("run", "whole")
    # XLA's are others, and as near as rounding lets them be.
    assert train(text, "xla", "--steps", 30, *arguments, "--products", "xla") == 0
    candidate, reference = (list(losses(run).values()) for run in ("whole", "xla"))
    np.testing.assert_allclose(candidate, reference, rtol=1e-4)
