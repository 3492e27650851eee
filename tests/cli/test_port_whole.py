"""A port is whole or not at all, holds one array at a time, and needs no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from hashlib import sha256

import pytest
import torch

from tests.support.memory import ROOT, run_python
from tests.support.ported import CONFIG, gpt2_state, hugging_face, port, run_rejected, same
from tests.support.tiers import first_of_each


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return hugging_face(tmp_path_factory.mktemp("source") / "hf", gpt2_state())


@pytest.mark.tier("full")
def test_a_port_holds_one_array_at_a_time(tmp_path):
    """600 MB in nine arrays, of 151 MB at most: 200 MB more than that are allowed."""
    size = {"D": 3072, "V": 12000, "T": 64}
    growth, largest = run_python(PORT_LARGE, tmp_path, json.dumps(size))
    assert largest == 4 * 3072 * 3072 * 4
    assert growth < largest + 200e6


PORT_LARGE = """
import numpy as np
from jaxformer.cli.main import main
from jaxformer.porting.formats.safetensors_files import write_safetensors
from jaxformer.porting.formats.tensors import StoredTensor
import jaxformer.porting.port, jaxformer.porting.dialects.nanogpt
import jaxformer.porting.dialects.torch_ref
folder, D, V, T = sys.argv[1], *json.loads(sys.argv[2]).values()
shapes = {"transformer.wte.weight": (V, D), "transformer.wpe.weight": (T, D)}
for name, shape in {"ln_1": (D,), "attn.c_attn": (3 * D, D), "attn.c_proj": (D, D),
                    "ln_2": (D,), "mlp.c_fc": (4 * D, D), "mlp.c_proj": (D, 4 * D)}.items():
    shapes[f"transformer.h.0.{name}.weight"] = shape
shapes["transformer.ln_f.weight"] = (D,)
config = {"n_layer": 1, "n_head": 24, "n_embd": D, "block_size": T, "bias": False,
          "vocab_size": V, "dropout": 0.0}
def stored(shape):
    dtype = np.dtype(np.float32)
    return StoredTensor(shape, dtype, lambda: np.full(shape, 0.5, dtype))
tensors = {name: stored(shape) for name, shape in shapes.items()}
record = json.dumps({"dialect": "nanogpt", "class": "GPT", "config": config})
write_safetensors(f"{folder}/in.safetensors", tensors, {"jaxformer": record})
before = reset()
code = main(["port", f"{folder}/in.safetensors", f"{folder}/out.safetensors", "--as", "torch_ref"])
assert code == 0
print(json.dumps([status("VmHWM") - before, max(t.nbytes for t in tensors.values())]))
"""


@pytest.mark.tier("full")
def test_safetensors_are_ported_where_there_is_no_torch(source, tmp_path):
    for target, flags in (("out.safetensors", []), ("run", []), ("out.pt", []), ("hf", ["hf"])):
        to = ["--to", *flags] if flags else []
        run_python(WITHOUT_TORCH, source, tmp_path / target, *to)
    port(tmp_path / "out.pt", tmp_path / "back", "--to", "hf")
    same(tmp_path / "back", gpt2_state())
    same(tmp_path / "hf", gpt2_state())


WITHOUT_TORCH = """
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "torch_ref", "safetensors", "transformers"):
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
from jaxformer.cli.main import main
assert main(["port", *sys.argv[1:]]) == 0
assert "torch" not in sys.modules
print("[]")
"""


@pytest.mark.parametrize(
    ("target", "flags"),
    first_of_each(
        [("out.safetensors", []), ("out.pt", []), ("run", []), ("hf", ["--to", "hf"])],
        lambda *_: "all",
    ),
)
def test_a_port_killed_in_the_middle_leaves_no_target(large, empty_folder, target, flags):
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxformer", "port", str(large), target, *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    while not any(p.stat().st_size for p in empty_folder.rglob("*") if p.is_file()):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not os.path.lexists(target)
    left = [path.name for path in empty_folder.iterdir()]
    assert len(left) == 1
    assert left[0].startswith(f".{target}.")
    port(large, target, *flags)
    assert os.path.lexists(target)


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Large enough to be cut off while it is written."""
    folder = tmp_path_factory.mktemp("large")
    state = gpt2_state()
    state["transformer.wte.weight"] = torch.randn(400_000, CONFIG["n_embd"])
    return hugging_face(folder / "hf", state, config={**CONFIG, "vocab_size": 400_000})


@pytest.mark.parametrize("target", ["deep/out.safetensors", "deep/er/out.pt", "deep/run"])
def test_a_full_disk_leaves_nothing(source, empty_folder, monkeypatch, target):
    full = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    if target.endswith("run"):

        def fail(*_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("jaxformer.storage.durable_files.atomic_write_text", fail)
    code, line = run_rejected("port", source, target)
    assert code == 7
    assert target in line
    assert list(empty_folder.iterdir()) == []


def test_a_disk_that_lies_is_caught(source, empty_folder, monkeypatch):
    from jaxformer.porting.formats import tensors

    whole = tensors.as_bytes
    monkeypatch.setattr(tensors, "as_bytes", lambda a: whole(a * 0 if a.size == 31 * 24 else a))
    monkeypatch.setattr(tensors, "digest", lambda a: sha256(whole(a)).hexdigest())
    for target in ("out.safetensors", "out.pt"):
        code, line = run_rejected("port", source, target)
        assert code == 7
        assert "did not give back what was written" in line
    assert list(empty_folder.iterdir()) == []
