"""The README's GPT is as short as it says; tests/docs/test_pages.py runs all of its blocks."""

from tests.support.pages import README, blocks


def test_the_gpt_takes_fifteen_lines():
    code = next(block.code for block in blocks(README) if "nnx.jit" in block.code)
    lines = [line for line in code.splitlines() if line and "import" not in line]
    assert len(lines) <= 15
