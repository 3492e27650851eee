"""ARCHITECTURE.md and CONTRIBUTING.md say what the code is: their picture, paths and names."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = ["ARCHITECTURE.md", "CONTRIBUTING.md"]
PACKAGES = ("jaxformer", "torch_ref", "tests", "parity_tests")


def quoted(document: str) -> list[str]:
    """Returns what stands between backticks in a document, outside of its blocks."""
    text = re.sub(r"```.*?```", "", (ROOT / document).read_text("utf-8"), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def blocks(document: str) -> str:
    """Returns the text of a document's blocks."""
    return "\n".join(
        re.findall(r"```\w*\n(.*?)```", (ROOT / document).read_text("utf-8"), re.DOTALL)
    )


def resolve(name: str) -> None:
    """Imports the longest part of a dotted name that is a module, and takes the rest from it."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return
    raise AssertionError(f"{name} is no module")


@pytest.mark.parametrize("script", ["draw_architecture.py", "draw_walks.py"])
def test_the_pictures_are_those_of_todays_imports_and_lists(script):
    subprocess.run([sys.executable, ROOT / "docs" / script, "--check"], check=True, cwd=ROOT)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_exists(document):
    paths = [name for name in quoted(document) if "/" in name and " " not in name]
    paths = [name for name in paths if not re.search(r"[<>*]|\.\.\.|^-", name)]
    assert paths
    assert [name for name in paths if not (ROOT / name).exists()] == []


def test_every_name_of_the_walks_exists():
    dotted = re.compile(rf"\b((?:{'|'.join(PACKAGES)})(?:\.\w+)+)")
    names = set(dotted.findall(blocks("ARCHITECTURE.md") + "\n".join(quoted("ARCHITECTURE.md"))))
    names = {name for name in names if not (ROOT / name).is_file()}
    assert len(names) > 20
    for name in names:
        resolve(name)


def test_the_commands_for_contributors_are_those_that_exist():
    commands = re.findall(r"^(?:uv run .*|\.ci/run)", blocks("CONTRIBUTING.md"), flags=re.MULTILINE)
    tiers = {match for command in commands for match in re.findall(r"--tier (\w+)", command)}
    from tests.support.tiers import TIERS

    assert tiers <= set(TIERS)
    assert (ROOT / ".ci/run").exists()
