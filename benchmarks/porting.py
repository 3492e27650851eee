"""Times ``jaxformer port`` on a checkpoint of GPT-2 small's size, beside the disk and PyTorch.

    uv run --group test python benchmarks/porting.py

A Hugging Face folder with 124 M random float32 weights is ported to a safetensors file with
torch_ref's names (every matrix of which is transposed, and queries, keys and values taken apart),
to a PyTorch file and to a run's folder. Each turn is a process of its own that starts with the
source out of the page cache; the turns of all contestants alternate. ``disk`` reads and writes as
many bytes, and waits for the disk, in plain Python; ``transformers`` and ``torch`` only read.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CONFIG = {
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
                      "peak_mb": (status("VmHWM") - before) / 1e6}))
source, target = sys.argv[1:3]
"""
PORT = """
from jaxformer.cli import main
import jaxformer.porting.command, jaxformer.porting.dialects.gpt2
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
    """Prints medians and spreads as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    with tempfile.TemporaryDirectory() as folder:
        source = make_source(Path(folder))
        for _ in range(arguments.turns):
            for name, (code, target, *flags) in CONTESTANTS.items():
                turns[name].append(run(code, source, Path(folder) / target, flags))
        size = (source / "model.safetensors").stat().st_size
    results = {}
    for name, found in turns.items():
        seconds = [turn["seconds"] for turn in found]
        results[name] = {
            "seconds": round(statistics.median(seconds), 2),
            "spread": [round(min(seconds), 2), round(max(seconds), 2)],
            "cpu_seconds": round(statistics.median(turn["cpu"] for turn in found), 2),
            "imports_seconds": round(statistics.median(turn["imports"] for turn in found), 2),
            "peak_mb_beyond_imports": round(max(turn["peak_mb"] for turn in found)),
        }
    packages = ("jax", "flax", "orbax-checkpoint", "numpy", "torch", "transformers", "safetensors")
    report = {
        "checkpoint": "gpt2 small, 124.4 M parameters, float32, random",
        "bytes": size,
        "turns": arguments.turns,
        "results": results,
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "load_average_at_the_end": round(os.getloadavg()[0], 1),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in packages},
        },
    }
    print(json.dumps(report, indent=1))


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
    """One turn in a process of its own, with the source out of memory and the target gone."""
    for path in target.parent.glob(f"{target.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.sync()
    for path in (*source.iterdir(), source.parent / "weights.pt"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    done = subprocess.run(
        [sys.executable, "-c", METER + code, str(source), str(target), *flags],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def processor() -> str:
    """What the machine calls its processor."""
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    return platform.machine()


if __name__ == "__main__":
    main()
