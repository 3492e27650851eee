"""docs/reference/wild.md is what wild.json beside it says, and its scripts stand."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.wild.page import page

ROOT = Path(__file__).parents[2]
DATA = json.loads((ROOT / "docs" / "reference" / "wild.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "reference" / "wild.md").read_text(encoding="utf-8")


def test_the_page_is_what_was_measured():
    assert page(DATA) == PAGE


def test_no_comparison_contradicts_the_models():
    """Without the debugger, equal models are equal in float32, and the others are not."""
    for row in DATA["rows"]:
        where = row["family"], row["setting"], row["mode"]
        if row["verdict"] in ("exact", "rounding"):
            assert row["effect"] < 1e-5, where
        if row["verdict"] == "bug" and row["effect"] is not None:
            assert row["effect"] > 1e-6, where


def test_a_row_is_put_in_the_place_of_an_older_one():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import write_wild
    finally:
        sys.path.pop(0)
    data = {"rows": [{**row} for row in DATA["rows"][:3]]}
    new = {name: data["rows"][1][name] for name in write_wild.KEY} | {"verdict": "new"}
    write_wild.put(data, {**new}, "1234567")
    write_wild.put(data, {**new, "setting": "another"}, "1234567")
    assert [row["verdict"] for row in data["rows"]][1::2] == ["new", "new"]
    assert len(data["rows"]) == 4
    assert data["rows"][1]["revision"] == "1234567"


def test_the_scripts_are_there():
    scripts = sorted((ROOT / "docs" / "reference" / "wild").glob("*.py"))
    assert len(scripts) == 2
    for script in scripts:
        assert f"(wild/{script.name})" in PAGE
        ast.parse(script.read_text(encoding="utf-8"))


@pytest.mark.tier("slow")
def test_one_library_is_measured_again(tmp_path):
    """Makes an environment, compares one library and finds what the page says."""
    environment = Path(os.environ.get("WILD_ENVIRONMENT", tmp_path / "wild"))
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import write_wild
    finally:
        sys.path.pop(0)
    data = {"made": {}, "rows": []}
    write_wild.measure(environment, ["equimo"], data, None, lambda data: None)
    found = data["rows"]
    known = [row for row in DATA["rows"] if row["library"] == "equimo"]
    assert [(r["setting"], r["verdict"]) for r in found] == [
        (r["setting"], r["verdict"]) for r in known
    ]
    done = subprocess.run([sys.executable, "docs/write_wild.py", "--check"], cwd=ROOT, check=False)
    assert done.returncode == 0
