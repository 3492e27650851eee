"""Times a comparison of GPT-2's size, forward and backward, and its largest memory.

    uv run --group test python benchmarks/verify.py --out benchmarks/results/verify-cpu.json

12 layers of width 768 with 256 positions, random weights. It is compared with one pass
forward and backward of only transformers' model in float64, in a process of its own. With
``--operators`` the candidate is a plain function of its parameters, as anybody's port may be, and
nothing is known of its modules.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def make(layers: int, positions: int) -> tuple[Any, Any]:
    """Returns the model and its token ids."""
    import numpy as np
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=layers)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model, np.random.default_rng(0).integers(0, config.vocab_size, (1, positions))


def as_function(module: Any) -> tuple[Any, Any]:
    """Returns an NNX module as a function of its parameters, and these."""
    from flax import nnx

    definition, parameters = nnx.split(module)
    return lambda parameters, ids: nnx.merge(definition, parameters)(ids), parameters


def plain_pass(layers: int, positions: int) -> dict[str, float]:
    """Returns the seconds of one pass forward and backward of the reference in float64."""
    import torch

    model, ids = make(layers, positions)
    model = model.double()
    wall, cpu = time.perf_counter(), time.process_time()
    model(torch.from_numpy(ids)).logits.sum().backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {"seconds": round(wall, 1), "cpu_seconds": round(cpu, 1)}


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32", help="dtype under test, beside float64")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--operators", action="store_true", help="as a function, by operators")
    parser.add_argument("--plain", action="store_true", help="only the reference model")
    parser.add_argument("--out", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    if arguments.plain:
        print(json.dumps(plain_pass(arguments.layers, arguments.positions)))
        return

    import jax
    import torch
    import transformers

    from jaxformer.parity import compare
    from jaxformer.porting import from_torch

    model, ids = make(arguments.layers, arguments.positions)
    config = model.config
    parameters = sum(parameter.numel() for parameter in model.parameters())
    backward = not arguments.forward
    candidate = as_function(from_torch(model)) if arguments.operators else None
    wall, cpu = time.perf_counter(), time.process_time()
    if candidate is None:
        report = compare(
            model, None, [ids], dialect="gpt2", dtype=arguments.dtype, backward=backward
        )
    else:
        report = compare(model, candidate, [ids], backward=backward)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    # In kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    sizes = ["--layers", str(arguments.layers), "--positions", str(arguments.positions)]
    plain = subprocess.run(
        [sys.executable, __file__, "--plain", *sizes], check=True, capture_output=True, text=True
    )

    result = {
        "model": {
            "layers": arguments.layers, "width": config.n_embd, "heads": config.n_head,
            "vocabulary": config.vocab_size, "positions": arguments.positions,
            "parameters": parameters,
        },
        "mode": report.mode,
        "segments": "operators" if arguments.operators else "operators of known modules",
        "dtype": report.dtype,
        "verdict": report.verdict,
        "nodes": len(report.nodes),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gib": round(peak, 2),
        "torch_float64_pass": json.loads(plain.stdout.splitlines()[-1]),
        "load_average": round(os.getloadavg()[0], 1),
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


if __name__ == "__main__":
    main()
