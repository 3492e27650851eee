"""The wheel and the sdist. The slow tier builds them, and tries the wheel in empty environments.

It needs a package index and uv: ``pytest --tier slow tests/packaging``.
"""

import os
import re
import shutil
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import jaxformer

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TRY = """
import sys
import jaxformer
assert "jax" not in sys.modules
result = jaxformer.train("nano", "run", steps=2, sample_tokens=0, data=sys.argv[1], devices=1)
model = jaxformer.load("run")
assert len(model.generate("the ", 5)) == 5
model.save("nano.pt", dialect="nanogpt")
"""


def test_one_version_is_everywhere():
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "jaxformer/__init__.py"
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\nversion: {jaxformer.__version__}\n" in citation
    assert f"## [{jaxformer.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_the_readme_of_the_package_has_no_link_to_a_file():
    text = (ROOT / "README.md").read_text("utf-8")
    link = r"\]\((?!https?:|#)[^)]+\)"
    assert re.search(link, text)
    for one in PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]:
        text = re.sub(one["pattern"], one["replacement"], text)
    assert re.findall(f".*{link}", text) == []


def interpreters():
    """A Python of each version, where it is installed; pyenv hides its own from the path."""
    folders = sorted(
        Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/*/bin")
    )
    for version in VERSIONS:
        names = [folder / f"python{version}" for folder in folders]
        found = [str(name) for name in names if name.exists()] or [shutil.which(f"python{version}")]
        yield pytest.param(
            found[0], marks=pytest.mark.skipif(found[0] is None, reason="not installed"), id=version
        )


@pytest.fixture(scope="module")
def uv():
    found = os.environ.get("UV") or shutil.which("uv")
    if found is None:
        pytest.skip("there is no uv")
    return found


@pytest.fixture(scope="module")
def built(uv, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([uv, "build", "-q", "--out-dir", folder], check=True, cwd=ROOT)
    return folder


@pytest.mark.tier("slow")
def test_what_is_in_them(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = next(name for name in names if name.endswith("/METADATA"))
        assert f"Version: {jaxformer.__version__}" in archive.read(metadata).decode()
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "jaxformer").rglob("*.py")}
    assert modules <= names
    assert {"jaxformer/py.typed", "torch_ref/config.py"} <= names
    sources = {p.relative_to(ROOT).as_posix() for p in (ROOT / "jaxformer").rglob("*.[ch]")}
    assert len(sources) > 3
    assert {"jaxformer/parity/report/html/page/page.js", *sources} <= names
    tops = {name.partition("/")[0].partition("-")[0] for name in names}
    assert tops == {"jaxformer", "torch_ref"}
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/packaging/test_packages.py", "parity_tests/cases.py", "train.py"} <= files
    assert {
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "docs/explanation/faults.md",
    } <= files


@pytest.mark.tier("slow")
@pytest.mark.parametrize("python", list(interpreters()))
def test_the_wheel_works_in_an_empty_environment(built, uv, python, tmp_path):
    (wheel,) = built.glob("*.whl")
    subprocess.run([uv, "venv", "-q", "--python", python, tmp_path / "env"], check=True)
    inside = tmp_path / "env/bin/python"
    subprocess.run([uv, "pip", "install", "-q", "--python", inside, wheel], check=True)
    removed = ("PYTHONPATH", "XLA_FLAGS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in removed}
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on a mat and saw two big dogs run home.\n" * 60)
    for command in (
        [inside, "-c", TRY, text],
        [inside.with_name("jaxformer"), "sample", "run", "--tokens", "5"],
        [inside.with_name("jaxformer"), "port", "nano.pt", "model.safetensors"],
        [inside.with_name("jaxformer"), "completions", "bash"],
        [inside, "-m", "jaxformer", "--version"],
    ):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == f"{jaxformer.__version__}\n"
