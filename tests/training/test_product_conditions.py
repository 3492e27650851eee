"""What is built while JAX is imported: what a run may call, and nothing for one that calls none."""

import dataclasses
import subprocess
import sys

import pytest

from jaxformer.hardware.custom_call_builds import OF_A_STEP
from jaxformer.training import product_conditions
from jaxformer.training.presets import nano
from jaxformer.training.product_conditions import build_what_is_called

NANO = nano()
TINY = dataclasses.replace(NANO.model, d_model=16)


@pytest.fixture
def begun(monkeypatch):
    """What is begun to be built, on a machine without a GPU."""
    found = []
    monkeypatch.setattr(product_conditions, "build_ahead", found.append)
    monkeypatch.setattr(product_conditions, "has_driver", lambda: False)
    return found


@pytest.mark.parametrize(
    ("changes", "is_built"),
    [
        ({}, True),
        ({"products": "jaxformer"}, True),
        ({"products": "jaxformer", "model": TINY}, True),
        ({"model": TINY}, False),
        ({"products": "xla"}, False),
        ({"products": "torch"}, False),
        ({"dtype": "bfloat16"}, False),
        ({"strategy": "mesh"}, False),
    ],
    ids=str,
)
def test_what_a_run_may_call_is_built(begun, changes, is_built):
    build_what_is_called(dataclasses.replace(NANO, **changes))
    assert begun == [OF_A_STEP] * is_built


def test_nothing_is_built_for_a_gpu(begun, monkeypatch):
    monkeypatch.setattr(product_conditions, "has_driver", lambda: True)
    build_what_is_called(NANO)
    assert begun == []


COMMAND = """
import sys
import jaxformer.cli.train as command

def note(config):
    print(config.products, config.model.d_model, "jax" in sys.modules)
    sys.exit()

command.build_what_is_called = note
command.run(["--preset", "nano", "--d-model", "160"])
"""


def test_a_command_begins_once_its_arguments_are_known_and_before_jax_is_imported():
    done = subprocess.run([sys.executable, "-c", COMMAND], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("auto 160 False\n", "")
