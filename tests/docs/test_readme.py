"""The README's blocks of Python run, and its links work from a package index."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
# Fewer steps and a shorter text show the same.
STEPS = {
    "range(1000)": "range(3)",
    "steps=2000": "steps=1, sample_tokens=0, devices=1, data='README.md'",
}


def shortened(code):
    """A block with fewer steps; each has a number of them."""
    found = [long for long in STEPS if long in code]
    assert found
    for long in found:
        code = code.replace(long, STEPS[long])
    return code


@pytest.mark.tier("full")
def test_the_python_runs(empty_folder, capsys):
    (empty_folder / "README.md").write_text(README, encoding="utf-8")
    names = {}
    for block in CODE:
        exec(shortened(block), names)
    assert "loss" in capsys.readouterr().out
    assert (empty_folder / "nano.pt").is_file()


def test_the_gpt_takes_fifteen_lines():
    block = next(block for block in CODE if "nnx.jit" in block)
    lines = [line for line in block.splitlines() if line and "import" not in line]
    assert len(lines) <= 15
