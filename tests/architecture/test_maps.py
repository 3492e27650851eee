"""The map in a package's docstring: it names each file of the package, and no other."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIRROR = ROOT / "jaxformer"
# The root is the mirror, and a dialect's file has the name of its family.
WITHOUT_MAP = {MIRROR, MIRROR / "porting/dialects"}
PACKAGES = {path.parent for path in MIRROR.rglob("__init__.py")} - WITHOUT_MAP
ENTRY = re.compile(r"^(?:-|\d\.) (``.*?)(?:: |$)", re.MULTILINE)


def names_in(text: str) -> set[str]:
    return {name.rstrip("/") for name in re.findall(r"``([\w/]+)``", text)}


@pytest.mark.parametrize("package", sorted(PACKAGES), ids=lambda it: str(it.relative_to(ROOT)))
def test_a_map_names_each_file_and_no_other(package):
    text = ast.get_docstring(ast.parse((package / "__init__.py").read_text("utf-8"))) or ""
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    files = modules | {path.parent.name for path in package.glob("*/*.*")} - {"__pycache__"}
    assert sorted(files - names_in(text)) == []
    entries = set().union(*map(names_in, ENTRY.findall(text)))
    assert sorted(entries - files) == []
