"""Reports in a terminal, in a notebook, as a table, and the plugin of pytest."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

from jaxformer.errors import UsageError
from jaxformer.parity import compare
from jaxformer.parity.pytest_plugin import page_name

pytestmark = pytest.mark.usefixtures("settings_of_jax")

TEST = """
import jax, numpy as np, torch

# Wide products are rounded on every processor; of four numbers they are exact on some.
LINEAR = torch.nn.Linear(300, 70)
PARAMS = {"w": LINEAR.weight.detach().numpy(), "b": LINEAR.bias.detach().numpy()}
X = np.random.default_rng(0).normal(size=(2, 300)).astype(np.float32)

def test_right(jaxformer_parity):
    report = jaxformer_parity(LINEAR, (lambda p, x: x @ p["w"].T + p["b"], PARAMS), X)
    assert report.verdict == "rounding"

def test_wrong(jaxformer_parity):
    jaxformer_parity(LINEAR, (lambda p, x: jax.nn.gelu(x @ p["w"].T + p["b"]), PARAMS), X)
"""


@pytest.fixture(scope="module")
def report():
    linear = torch.nn.Linear(4, 3)
    params = {"w": linear.weight.detach().numpy(), "b": linear.bias.detach().numpy()}
    x = np.random.default_rng(0).normal(size=(5, 4))
    with jax.numpy_rank_promotion("allow"):
        port = lambda p, x: 2 * (x @ p["w"].T) + p["b"]  # noqa: E731
        return compare(linear, (port, params), x, backward=False)


def test_a_page_has_the_cause_and_both_lines_of_code(report):
    page = report._repr_html_()
    assert "1 bug" in page
    assert "port = lambda p, x: 2 * (x @ p[&quot;w&quot;].T) + p[&quot;b&quot;]" in page
    assert "moves the results by" in page
    assert "<script" not in page


def test_root_causes_as_a_table(report):
    try:
        import pandas  # noqa: F401
    except ImportError:
        with pytest.raises(UsageError, match="needs pandas"):
            report.to_dataframe()
        return
    table = report.to_dataframe()
    assert len(table) == 1
    assert table.diagnosis[0] == report.root_causes[0].diagnosis


def test_no_two_tests_have_pages_of_one_name():
    tests = [
        f"{folder}test_{letter}.py::{test}"
        for folder in ("", "one/", "other/", "../")
        for letter in "xy"
        for test in ("test", "Test::test", "test[a/b]", "test[a_b]", "test[a::b]", "test[a.b]",
                     "test[é]", f"test[{'long' * 99}]", f"test[{'long' * 98}]")
    ]  # fmt: skip
    names = {page_name(test) for test in tests}
    assert len(names) == len(tests)
    assert not any(set(name) & set('/:"<>|*?\\') for name in names)
    assert max(map(len, names)) < 150


@pytest.mark.tier("full")
def test_the_plugin_gives_a_fixture_and_writes_pages(tmp_path):
    (tmp_path / "test_port.py").write_text(TEST)
    command = [
        sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--parity-html", "pages",
        "test_port.py",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "1 failed, 1 passed" in done.stdout
    assert "tanh form of GELU" in done.stdout
    pages = {path.name: path.read_text() for path in (tmp_path / "pages").iterdir()}
    assert sorted(pages) == ["test_port.test_right.html", "test_port.test_wrong.html"]
    assert "1 bug" in pages["test_port.test_wrong.html"]
