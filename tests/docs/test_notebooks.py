"""The notebooks run in a kernel of Jupyter, with fewer steps, and are kept without outputs."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.pages import ROOT
from tests.support.quick_compiling import flags_for_devices
from tests.support.tiers import SLOW, full_except

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# What a notebook must have shown.
SHOWN = {
    "train": ("training loss", "data:image/png;base64", "nano.pt"),
    "port_and_back": ("the same greedy text: True", "the same bits: True"),
    "verify_your_port": ("the candidate computes the tanh form of GELU", "down.bias is missing"),
    "finetune_lora": ("lora/adapter", "differs by at most 0.0"),
}
FEWER = {"STEPS = 300": "STEPS = 3", "STEPS = 200": "STEPS = 3"}
EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_there_are_four():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_installs_itself(path):
    cells = code_cells(json.loads(path.read_text(encoding="utf-8")))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    first = "".join(cells[0]["source"])
    assert 'find_spec("jaxformer") is None' in first
    assert '%pip install -q "jaxformer[' in first


# Examples and pages run much of what the other two have.
@pytest.mark.parametrize(
    "path",
    full_except(NOTEBOOKS, lambda path: path.stem in ("train", "verify_your_port"), SLOW),
    ids=lambda path: path.stem,
)
@pytest.mark.tier("full")
def test_a_notebook_runs(path, empty_folder):
    pytest.importorskip("nbclient")
    text = path.read_text(encoding="utf-8")
    assert any(many in text for many in FEWER) or "jf.train(" not in text
    for many, few in FEWER.items():
        text = text.replace(many, few)
    copy = empty_folder / path.name
    copy.write_text(text, encoding="utf-8")
    # A newcomer has one device.
    flags = flags_for_devices(1)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        environment[name] = str(empty_folder / "jupyter")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, copy], cwd=empty_folder, env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-5000:]
    outputs = [cell["outputs"] for cell in code_cells(json.loads(copy.read_text("utf-8")))]
    shown = "".join(map(printed, outputs)) + json.dumps(outputs)
    for words in SHOWN[path.stem]:
        assert words in shown


def printed(outputs: list[dict]) -> str:
    """Returns what a cell has printed; a remark on standard error may stand between its pieces."""
    streams = [output for output in outputs if output.get("name") == "stdout"]
    return "".join("".join(output["text"]) for output in streams)
