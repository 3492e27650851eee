"""Commands work where JAX's CUDA plugin is installed and NVIDIA's driver is not.

The slow tier makes the environment in which they once ended with a segmentation fault: JAX's CUDA
plugin beside PyTorch. It needs a package index and 6 GB: ``pytest --tier slow
tests/hardware/test_nvidia_driver.py``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jaxformer.cli.main import main
from jaxformer.hardware import nvidia_driver

ROOT = Path(__file__).parents[2]
# What a plugin does whose cuPTI asks a driver that is not there.
PLUGIN = """
import os
def initialize():
    if not os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK"):
        os.kill(os.getpid(), 11)
"""


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(nvidia_driver, "NODES", ())
    monkeypatch.delenv(nvidia_driver.SKIP_VERSION_CHECK, raising=False)


def run(command, path=()):
    """Runs a command as a user does: without the settings of these tests."""
    removed = {"JAX_PLATFORMS", "XLA_FLAGS", nvidia_driver.SKIP_VERSION_CHECK}
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_a_node_without_the_library_is_no_driver(monkeypatch, tmp_path):
    monkeypatch.setattr(nvidia_driver, "NODES", (tmp_path,))
    monkeypatch.setattr(nvidia_driver, "LIBRARY", "libc.so.6")
    assert nvidia_driver.has_driver()
    monkeypatch.setattr(nvidia_driver, "LIBRARY", "libjaxformer-no-such.so.1")
    assert not nvidia_driver.has_driver()


def test_the_check_is_skipped_only_where_there_is_no_driver(monkeypatch, no_driver):
    monkeypatch.setattr(nvidia_driver, "has_driver", lambda: True)
    nvidia_driver.skip_version_check_without_driver()
    assert nvidia_driver.SKIP_VERSION_CHECK not in os.environ
    monkeypatch.setattr(nvidia_driver, "has_driver", lambda: False)
    nvidia_driver.skip_version_check_without_driver()
    assert os.environ[nvidia_driver.SKIP_VERSION_CHECK] == "1"


def test_gpus_that_are_asked_for_and_are_not_there(monkeypatch, no_driver, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main(["plan"]) == 9
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("jaxformer: JAX_PLATFORMS=cuda asks for a GPU")


@pytest.mark.tier("full")
@pytest.mark.skipif(nvidia_driver.has_driver(), reason="NVIDIA's driver is here")
@pytest.mark.parametrize("imports", ["import jaxformer, jax", "import jax, jaxformer"])
def test_a_plugin_that_would_crash_is_not_asked(tmp_path, imports):
    plugin = tmp_path / "jax_plugins" / "crashes"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    path = (ROOT, tmp_path)
    assert run([sys.executable, "-c", "import jax; jax.devices()"], path).returncode == -11
    done = run([sys.executable, "-c", f"{imports}; print(jax.devices()[0].platform)"], path)
    assert (done.returncode, done.stdout) == (0, "cpu\n"), done.stderr


@pytest.mark.tier("slow")
@pytest.mark.skipif(nvidia_driver.has_driver(), reason="NVIDIA's driver is here")
def test_the_cuda_plugin_and_torch_live_together(tmp_path):
    uv = os.environ.get("UV") or shutil.which("uv")
    if uv is None:
        pytest.skip("there is no uv to make an environment with")
    subprocess.run([uv, "venv", "-q", "--python", sys.executable, tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    subprocess.run(
        [uv, "pip", "install", "-q", "--python", python, f"{ROOT}[cuda,torch]"], check=True
    )
    for imports in ("import torch, jaxformer, jax", "import jax, jaxformer, torch"):
        done = run([python, "-c", f"{imports}; print(jax.devices()[0].platform)"])
        assert (done.returncode, done.stdout, done.stderr) == (0, "cpu\n", "")
    jaxformer = python.with_name("jaxformer")
    done = run([jaxformer, "train", "--steps", "2", "--out", tmp_path / "run"])
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
