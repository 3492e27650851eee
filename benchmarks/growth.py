"""Measures how a training step grows with depth, width, context and devices, beside torch_ref.

    uv run --group test python benchmarks/growth.py --out benchmarks/results/growth.json

Along each axis one size changes and all others stay, those of BASE. Every point is a process of its
own, which has one side, compiles, and makes some steps: its peak memory is that side's alone. A
turn is one such process for each point; a figure is the median over the turns. jaxformer has one
device of the CPU but along the last axis, where the CPU is divided into virtual ones: there its
cores stay the same, so a step of the same batch should take as long on 8 devices as on 1. A row's
``flops`` are the operations of a step's matrix products, which say how time ought to grow.
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import measure
import numpy as np
import sides

from jaxformer.config import OptimizerConfig, TransformerLMConfig
from jaxformer.execution.layer_scan import scanned_layers
from jaxformer.training.config import TrainConfig

BASE = {"layers": 4, "width": 128, "context": 128, "batch": 4, "devices": 1}
SCANNED, PMAP, MESH = "jaxformer, layers in a loop", "pmap", "mesh"
BOTH = (sides.JAXFORMER, sides.EAGER)
# Of each axis: its sizes, what else is not as in BASE, and its sides.
AXES: dict[str, tuple[tuple[int, ...], dict[str, int], tuple[str, ...]]] = {
    "layers": ((4, 8, 16, 32, 48), {}, (sides.JAXFORMER, SCANNED, sides.EAGER)),
    "width": ((64, 128, 256, 512, 1024), {}, BOTH),
    "context": ((256, 512, 1024, 2048, 4096, 8192), {"layers": 2, "batch": 1}, BOTH),
    "devices": ((1, 2, 4, 8), {"batch": 8}, (PMAP, MESH)),
}
HEAD_WIDTH = 32
SECONDS, MOST_STEPS = 2.0, 10


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=3)
    parser.add_argument("--only", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--largest", type=int, help="leave larger sizes of each axis out")
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.point is not None:
        print(json.dumps(run_point(arguments.point)))
        return

    points = [
        {**BASE, **others, axis: size, "axis": axis, "side": side}
        for axis in arguments.only
        for sizes, others, names in [AXES[axis]]
        for size in sizes
        if arguments.largest is None or size <= arguments.largest
        for side in names
    ]
    found: list[list[dict[str, Any]]] = [[] for _ in points]
    for _ in range(arguments.turns):
        for point, results in zip(points, found, strict=True):
            flags = f"--xla_force_host_platform_device_count={point['devices']}"
            print(json.dumps(point), file=sys.stderr, flush=True)
            results.append(
                measure.child(
                    [__file__, "--point", json.dumps(point)],
                    JAX_PLATFORMS="cpu", XLA_FLAGS=flags, JAX_ENABLE_COMPILATION_CACHE="false",
                )
            )  # fmt: skip
    rows = [_row(point, results) for point, results in zip(points, found, strict=True)]
    for row in rows:
        row |= _growth(row, rows)
    del arguments.point
    measure.write("growth", arguments, rows, COLUMNS)


def make_config(point: Mapping[str, Any]) -> TrainConfig:
    """Returns the run of a point."""
    return TrainConfig(
        model=TransformerLMConfig(
            vocab_size=65,
            num_layers=point["layers"],
            d_model=point["width"],
            num_heads=point["width"] // HEAD_WIDTH,
            context_length=point["context"],
        ),
        optimizer=OptimizerConfig(decay_steps=1000),
        batch_size=point["batch"],
        steps=1000,
        seed=sides.SEED,
        scan_layers=point["side"] == SCANNED,
        strategy="mesh" if point["side"] == MESH else "pmap",
        fsdp=point["devices"] if point["side"] == MESH else 1,
        devices=point["devices"],
    )


def run_point(point: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the seconds of compiling and of each step, peak memory and operations of a point."""
    config = make_config(point)
    ids = sides.random_ids(config, 4 * point["context"] + 200)
    starts = np.random.default_rng(1).integers(0, 100, (1, point["batch"]), np.int32)
    side = (
        sides.TorchRef(config, ids, sides.EAGER)
        if point["side"] == sides.EAGER
        else sides.Jaxformer(config, ids)
    )
    batches = side.prepare(starts)
    with scanned_layers(config.scan_layers):
        compiling = measure.seconds_of(lambda: side.compile(batches))
    seconds = [measure.seconds_of(lambda: side.train(batches))]
    while len(seconds) <= 3 or (sum(seconds) < SECONDS and len(seconds) < MOST_STEPS):
        seconds.append(measure.seconds_of(lambda: side.train(batches)))
    return {
        "compile_seconds": compiling,
        "seconds_per_step": statistics.median(seconds[1:]),
        "peak_memory": measure.peak_memory(),
        "flops": sides.training_flops(config),
    }


def _row(point: Mapping[str, Any], results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        "side": point["side"],
        "axis": point["axis"],
        "size": point[point["axis"]],
        "seconds_per_step": measure.spread([r["seconds_per_step"] for r in results]),
        "compile_seconds": measure.rounded(
            statistics.median(r["compile_seconds"] for r in results)
        ),
        "peak_memory": {
            kind: int(statistics.median(r["peak_memory"][kind] for r in results))
            for kind in results[0]["peak_memory"]
        },
        "flops": results[0]["flops"],
    }


def _growth(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the powers of the size with which time and operations grew from the size before."""
    same = [r for r in rows if (r["axis"], r["side"]) == (row["axis"], row["side"])]
    before = [r for r in same if r["size"] < row["size"]]
    if not before:
        return {}
    last = max(before, key=lambda r: r["size"])
    doublings = math.log(row["size"] / last["size"])
    times = [r["seconds_per_step"]["median"] for r in (row, last)]
    return {
        "power_of_time": measure.rounded(math.log(times[0] / times[1]) / doublings),
        "power_of_flops": measure.rounded(math.log(row["flops"] / last["flops"]) / doublings),
    }


def _powers(row: Mapping[str, Any]) -> str:
    if "power_of_time" not in row:
        return ""
    return f"{row['power_of_time']:.2f} ({row['power_of_flops']:.2f})"


COLUMNS = {
    "side": lambda row: row["side"],
    "axis": lambda row: row["axis"],
    "size": lambda row: f"{row['size']:,}",
    "step": lambda row: measure.milliseconds(row["seconds_per_step"]),
    "power of growth (of operations)": _powers,
    "GFLOP/s": lambda row: f"{row['flops'] / row['seconds_per_step']['median'] / 1e9:,.1f}",
    "compiling": lambda row: f"{row['compile_seconds']:.1f} s",
    "memory": measure.most_memory,
}

if __name__ == "__main__":
    measure.run(main)
