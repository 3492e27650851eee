"""Times ``jaxformer port`` on a checkpoint of GPT-2 small's size, beside the disk and PyTorch.

    uv run --group test python benchmarks/porting.py

A Hugging Face folder with 124 M random float32 weights is ported to a safetensors file with
torch_ref's names (every matrix of which is transposed, and queries, keys and values taken apart),
to a PyTorch file and to a run's folder. Each turn is a process of its own that starts with the
source out of the page cache; the turns of all sides alternate. ``disk`` reads and writes as
many bytes, and waits for the disk, in plain Python; ``transformers`` and ``torch`` only read.
"""

import os
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

import measure

CONFIG: dict[str, Any] = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 50257,
    "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "embd_pdrop": 0.1,
    "attn_pdrop": 0.1, "resid_pdrop": 0.1, "tie_word_embeddings": True,
}  # fmt: skip

METER = """
import json, os, sys, time
started = time.perf_counter()
def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
def measure(work):
    ready = time.perf_counter()
    open("/proc/self/clear_refs", "w").write("5")
    before, used = status("VmRSS"), time.process_time()
    work()
    done, used = time.perf_counter(), time.process_time() - used
    print(json.dumps({"seconds": done - ready, "imports": ready - started, "cpu": used,
                      "peak": status("VmHWM") - before}))
source, target = sys.argv[1:3]
"""
PORT = """
from jaxformer.cli.main import main
import jaxformer.porting.port, jaxformer.porting.dialects.gpt
import jaxformer.porting.dialects.torch_ref, orbax.checkpoint
def work():
    assert main(["port", source, target, *sys.argv[3:]]) == 0
measure(work)
"""
DISK = """
def work():
    with open(f"{source}/model.safetensors", "rb") as file, open(target, "wb") as copy:
        while piece := file.read(1 << 20):
            copy.write(piece)
        copy.flush()
        os.fsync(copy.fileno())
        os.posix_fadvise(copy.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with open(target, "rb") as file:
        while file.read(1 << 20):
            pass
measure(work)
"""
TRANSFORMERS = """
import torch, transformers
def work():
    model = transformers.GPT2LMHeadModel.from_pretrained(source)
    # Mapped weights are read when they are used.
    float(sum(parameter.sum() for parameter in model.parameters()))
measure(work)
"""
TORCH = """
import torch
def work():
    state = torch.load(f"{source}/../weights.pt", weights_only=True)
    float(sum(tensor.sum() for tensor in state.values()))
measure(work)
"""
CONTESTANTS = {
    "disk: read, write, read back": (DISK, "copy.bin"),
    "port to safetensors, torch_ref's names": (PORT, "out.safetensors", "--as", "torch_ref"),
    "port to .pt, torch_ref's names": (PORT, "out.pt", "--as", "torch_ref"),
    "port to a run folder": (PORT, "out"),
    "transformers from_pretrained, read only": (TRANSFORMERS, "nothing"),
    "torch.load, read only": (TORCH, "nothing"),
}


def main() -> None:
    """Measures, and writes the result."""
    arguments = measure.parser(__doc__, turns=5).parse_args()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(Path(folder))
        for _ in range(arguments.turns):
            for name, (code, target, *flags) in CONTESTANTS.items():
                turns[name].append(run(code, source, Path(folder) / target, flags))
        size = (source / "model.safetensors").stat().st_size
    results = [
        {
            "side": name,
            "seconds": measure.spread([turn["seconds"] for turn in found]),
            "cpu_seconds": measure.rounded(statistics.median(turn["cpu"] for turn in found)),
            "imports_seconds": measure.rounded(
                statistics.median(turn["imports"] for turn in found)
            ),
            "peak_bytes_beyond_imports": max(turn["peak"] for turn in found),
        }
        for name, found in turns.items()
    ]
    measure.write(
        "porting", arguments, results, COLUMNS,
        checkpoint="gpt2 small, 124.4 M parameters, float32, random", checkpoint_bytes=size,
    )  # fmt: skip


def make_source(folder: Path) -> Path:
    """Writes the folder, and the same weights as a PyTorch file beside it."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    model.save_pretrained(folder / "hf")
    torch.save(model.state_dict(), folder / "weights.pt")
    return folder / "hf"


def run(code: str, source: Path, target: Path, flags: list[str]) -> dict[str, float]:
    """Runs one turn in a process of its own, without the source in memory or an old target."""
    for path in target.parent.glob(f"{target.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
    for path in (*source.iterdir(), source.parent / "weights.pt"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    return measure.child(["-c", METER + code, str(source), str(target), *flags])


COLUMNS = {
    "side": lambda row: row["side"],
    "median": lambda row: f"{row['seconds']['median']:.2f} s",
    "fastest": lambda row: f"{row['seconds']['min']:.2f} s",
    "slowest": lambda row: f"{row['seconds']['max']:.2f} s",
    "processor": lambda row: f"{row['cpu_seconds']:.2f} s",
    "memory": lambda row: f"{row['peak_bytes_beyond_imports'] / 1e6:.0f} MB",
}

if __name__ == "__main__":
    measure.run(main)
