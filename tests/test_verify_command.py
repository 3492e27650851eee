"""``jaxformer verify``: every format against every other, bugs named, and what is refused."""

import itertools
import json
import os
import subprocess
import sys

import jax
import pytest

from jaxformer.cli import main
from tests.ported import VOCABULARY, gpt2_state, hugging_face, nanogpt, port, refused
from tests.verified import changed, is_installed, llama, nudged, verify

pytest.importorskip("torch")

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
