"""Checkpoints of earlier releases, and of other versions of JAX, are read and trained on."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxformer.checkpoints import CheckpointFolder, describe
from tests.fixtures import write
from tests.support.tiny import resume

pytestmark = pytest.mark.optimized

FIXTURES = sorted(path.parent for path in write.HERE.glob("*/expected.json"))


@pytest.fixture(params=FIXTURES, ids=[path.name for path in FIXTURES])
def fixture(request, empty_folder):
    shutil.copytree(request.param, empty_folder, dirs_exist_ok=True)
    return json.loads(Path("expected.json").read_text())


def test_every_supported_version_has_a_fixture():
    assert len({json.loads((p / "expected.json").read_text())["jax"] for p in FIXTURES}) >= 2
    assert sum(f.stat().st_size for p in FIXTURES for f in p.rglob("*") if f.is_file()) < 100_000


def test_it_is_restored_to_the_bit(fixture):
    arrays, manifest = CheckpointFolder(Path("run/checkpoints")).restore(10)
    assert describe(arrays) == manifest["arrays"]
    assert manifest["versions"]["jax"] == fixture["jax"]


def test_it_goes_on_as_it_did_where_it_was_written(fixture):
    assert resume("run", "--steps", 20) == 0
    found = write.result(Path("run"))
    # Rounding is the version's and the processor's; the steps are the same.
    np.testing.assert_allclose(found["losses"], fixture["losses"], rtol=1e-5)
    if (fixture["jax"], fixture["processor"]) == (jax.__version__, write.processor()):
        assert found == {name: fixture[name] for name in found}
