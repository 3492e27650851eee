"""What it takes to train llama-style at 1B, 7B and 70B, as ``jaxformer plan`` finds it.

    uv run --group test --extra tpu python benchmarks/scale.py --out benchmarks/results/scale.json

For TPU slices the steps are compiled ahead of time, which takes minutes for each and no TPU; the
model's estimate stands beside it, for GPUs and the largest slices alone. Nothing is measured: step
times are rooflines. ``--only NAME`` takes the rows whose preset or topology has that name.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

import measure

GIB = 2**30
DAY = 86400
COMMON = "--strategy mesh --dtype bfloat16 --remat full --scan-layers"
# Preset, topology, mesh and batch, and whether it is compiled.
ROWS = [
    ("llama-1b", "v5e:4x4", "--fsdp 16 --batch-size 64", True),
    ("llama-1b", "v5p:2x2x1", "--fsdp 4 --batch-size 64", False),
    ("llama-1b", "v6e:2x4", "--fsdp 8 --batch-size 64", True),
    ("llama-1b", "H100:8", "--fsdp 8 --batch-size 128", False),
    ("llama-7b", "v5e:8x8", "--fsdp 64 --batch-size 64", True),
    ("llama-7b", "v5p:2x2x4", "--fsdp 16 --batch-size 64", True),
    ("llama-7b", "v6e:4x8", "--fsdp 32 --batch-size 64", True),
    ("llama-7b", "H100:8", "--fsdp 8 --batch-size 16", False),
    ("llama-7b", "H100:64", "--fsdp 64 --batch-size 128", False),
    ("llama-70b", "v5e:16x16", "--fsdp 256 --batch-size 256", True),
    ("llama-70b", "v5p:4x4x8", "--fsdp 128 --batch-size 128", True),
    ("llama-70b", "v5p:8x8x16", "--fsdp 1024 --batch-size 1024", False),
    ("llama-70b", "v6e:16x16", "--fsdp 256 --batch-size 256", True),
    ("llama-70b", "H100:64", "--fsdp 64 --batch-size 64", False),
    ("llama-70b", "H100:512", "--fsdp 512 --batch-size 512", False),
]


def main() -> None:
    """Plans every row."""
    parser = measure.parser(__doc__, turns=1)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    arguments = parser.parse_args()
    rows = []
    for preset, topology, flags, compiles in ROWS:
        if arguments.only and not {preset, topology} & set(arguments.only):
            continue
        command = f"--preset {preset} --topology {topology} {COMMON} {flags}"
        row: dict[str, Any] = {"preset": preset, "topology": topology, "command": command}
        row["model"] = plan(command + " --model-only")
        if compiles:
            row["compiled"] = plan(command)
        rows.append(row)
    measure.write("scale", arguments, rows, COLUMNS)


def plan(flags: str) -> dict[str, Any]:
    """What ``jaxformer plan`` says, and the seconds that it took."""
    print(f"jaxformer plan {flags}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "jaxformer", "plan", "--json", *flags.split()],
        cwd=measure.ROOT,
        env={**os.environ, "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    needs: dict[str, Any] = json.loads(done.stdout)
    del needs["fits"]
    return {**needs, "seconds_to_plan": round(time.perf_counter() - begin, 1)}


def best(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The compiled plan of a row, or else the model's."""
    needs: Mapping[str, Any] = row.get("compiled") or row["model"]
    return needs


def _memory(row: Mapping[str, Any]) -> str:
    needs = best(row)
    verdict = "" if needs["total"] <= needs["capacity"] else " **does not fit**"
    return f"{needs['total'] / GIB:.1f} of {needs['capacity'] / GIB:.0f} GiB{verdict}"


def _mesh(row: Mapping[str, Any]) -> str:
    return " × ".join(f"{a} {n}" for a, n in best(row)["mesh"].items() if n > 1)


def _step(row: Mapping[str, Any]) -> str:
    roofline = best(row)["roofline"]
    return f"{roofline['seconds']:.2f} s, {roofline['bound']}"


COLUMNS = {
    "model": lambda row: row["preset"],
    "on": lambda row: row["topology"],
    "mesh": _mesh,
    "source": lambda row: "compiled" if "compiled" in row else "model",
    "memory of a device": _memory,
    "by the model": lambda row: f"{row['model']['total'] / GIB:.1f} GiB",
    "tokens a step": lambda row: f"{best(row)['tokens_per_step'] / 1e6:.1f} M",
    "step, no faster than": _step,
    "MFU, at most": lambda row: f"{100 * best(row)['roofline']['utilization']:.0f}%",
    "tokens a day, at most": lambda row: f"{best(row)['tokens_per_second'] * DAY / 1e9:.1f} G",
}


if __name__ == "__main__":
    measure.run(main)
