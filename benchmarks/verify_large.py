"""Measures ``jaxformer verify`` block by block: time and largest memory, by the model's geometry.

    uv run --group test python benchmarks/verify_large.py llama-3.2-1b --folder FOLDER \
        --out benchmarks/results/verify-llama-3.2-1b.json

A Hugging Face folder with random weights in bfloat16 is written shard by shard, so that the model
is never held; ``jaxformer port`` makes the candidate of it, or with ``--same`` the folder itself is
the candidate, run in JAX. Then both are compared, forward and backward, in a process of its own.
The files are removed at the end.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False,
    "num_key_value_heads": 8, "num_attention_heads": 32, "pretraining_tp": 1,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
LLAMA3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
GEOMETRIES: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        **LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "max_position_embeddings": 8192, "tie_word_embeddings": False,
    },
    "llama-3.2-1b": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "head_dim": 64,
        "rope_scaling": LLAMA3_ROPE,
    },
}  # fmt: skip
SHARD_BYTES = 2 << 30


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the arrays of a Llama."""
    width, hidden = config["hidden_size"], config["intermediate_size"]
    keys = width // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (width,), "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (keys, width), "self_attn.v_proj": (keys, width),
            "self_attn.o_proj": (width, width), "post_attention_layernorm": (width,),
            "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width),
            "mlp.down_proj": (width, hidden),
        }.items():  # fmt: skip
            yield f"model.layers.{layer}.{name}.weight", shape
    yield "model.norm.weight", (width,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], width)


def write_folder(config: dict[str, Any], folder: Path) -> int:
    """Writes a folder of random weights, a shard at a time; returns the number of parameters."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}
    shard: dict[str, Any] = {}
    count = size = 0

    def flush() -> None:
        nonlocal size
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()
        size = 0

    for name, shape in shapes(config):
        tensor = torch.randn(shape, generator=generator, dtype=torch.bfloat16)
        tensor.mul_(0.02 if len(shape) > 1 else 0.1)
        shard[name] = tensor.add_(1.0) if len(shape) == 1 else tensor
        count, size = count + tensor.numel(), size + 2 * tensor.numel()
        if size > SHARD_BYTES:
            flush()
    flush()
    index = {"metadata": {"total_size": 2 * count}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return count


def measure(command: list[str], log: Path) -> dict[str, Any]:
    """Runs a command; returns its exit code, seconds and largest resident memory."""
    peak = 0
    began = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)

        def watch() -> None:
            nonlocal peak
            while process.poll() is None:
                try:
                    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
                    found = [line.split()[1] for line in lines if line.startswith("VmHWM")]
                    peak = max(peak, *(int(value) * 1024 for value in found), 0)
                except OSError:
                    pass
                time.sleep(0.5)

        thread = threading.Thread(target=watch)
        thread.start()
        usage_before = os.times()
        process.wait()
        thread.join()
        usage = os.times()
    cpu = usage.children_user + usage.children_system
    cpu -= usage_before.children_user + usage_before.children_system
    return {
        "exit_code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gib": round(peak / 2**30, 2),
    }


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("geometry", choices=GEOMETRIES)
    parser.add_argument("--folder", type=Path, required=True, help="a new folder for the files")
    parser.add_argument("--length", type=int, default=128, help="tokens")
    parser.add_argument("--layers", type=int, help="fewer than the geometry has, to try it")
    parser.add_argument("--same", action="store_true", help="one folder for both sides")
    parser.add_argument("--stream", default="always", choices=["auto", "always", "never"])
    parser.add_argument("--keep", action="store_true", help="keep the files, or use those there")
    parser.add_argument("--out", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    config = dict(GEOMETRIES[arguments.geometry])
    if arguments.layers:
        config["num_hidden_layers"] = arguments.layers
    folder = arguments.folder
    reference, log, found = folder / "reference", folder / "verify.log", folder / "report.json"
    candidate = reference if arguments.same else folder / "candidate.safetensors"
    run = [sys.executable, "-m", "jaxformer"]
    if not (folder / "count.txt").exists():
        (folder / "count.txt").write_text(str(write_folder(config, reference)))
    if not candidate.exists():
        port = [*run, "port", str(reference), str(candidate), "--as", "jaxformer"]
        subprocess.run(port, check=True, stdout=subprocess.DEVNULL)
    load = os.getloadavg()[0]
    command = [
        *run, "verify", str(reference), str(candidate), "--length", str(arguments.length),
        "--stream", arguments.stream, "--json", str(found), "--state", str(folder / "state"),
    ]  # fmt: skip
    figures = measure(command, log)
    print(log.read_text()[-3000:], file=sys.stderr)
    report = json.loads(found.read_text())
    import jax
    import torch
    import transformers

    result = {
        "geometry": arguments.geometry,
        "layers": config["num_hidden_layers"],
        "parameters": int((folder / "count.txt").read_text()),
        "tokens": arguments.length,
        "verdict": report["verdict"],
        "nodes": len(report["nodes"]),
        "compared": report["about"]["compared"],
        **figures,
        "load_average": [round(load, 1), round(os.getloadavg()[0], 1)],
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "python": platform.python_version(), "jax": jax.__version__,
            "torch": torch.__version__, "transformers": transformers.__version__,
        },
    }  # fmt: skip
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    if not arguments.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
