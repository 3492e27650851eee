"""Times a comparison of GPT-2's size, forward and backward, and its largest memory.

    uv run --group test python benchmarks/verify.py --out benchmarks/results/verify-cpu.json

12 layers of width 768 with 256 positions, random weights, all in a process of its own. Beside it
stands one pass forward and backward of transformers' model alone in float64.
"""

import argparse
import json
import os
import platform
import resource
import time
from pathlib import Path


def main() -> None:
    """Prints the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--dtype", default="float32", help="dtype under test, beside float64")
    parser.add_argument("--forward", action="store_true", help="without gradients")
    parser.add_argument("--out", type=Path, help="file for the figures")
    arguments = parser.parse_args()

    import jax
    import numpy as np
    import torch
    import transformers

    from jaxformer.parity import compare

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=arguments.layers)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (1, arguments.positions))
    parameters = sum(parameter.numel() for parameter in model.parameters())

    wall, cpu = time.perf_counter(), time.process_time()
    report = compare(
        model, None, [ids], dialect="gpt2", dtype=arguments.dtype, backward=not arguments.forward,
    )  # fmt: skip
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    # In kilobytes on Linux; before the pass below is made.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    wide = model.double()
    plain_wall, plain_cpu = time.perf_counter(), time.process_time()
    wide(torch.from_numpy(ids)).logits.sum().backward()
    plain_wall, plain_cpu = time.perf_counter() - plain_wall, time.process_time() - plain_cpu

    result = {
        "model": {
            "layers": arguments.layers, "width": config.n_embd, "heads": config.n_head,
            "vocabulary": config.vocab_size, "positions": arguments.positions,
            "parameters": parameters,
        },
        "mode": report.mode,
        "dtype": arguments.dtype,
        "verdict": report.verdict,
        "nodes": len(report.nodes),
        "seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "peak_gib": round(peak, 2),
        "torch_float64_pass": {"seconds": round(plain_wall, 1), "cpu_seconds": round(plain_cpu, 1)},
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
