"""Times one optimizer step of jaxformer and of torch_ref in turn, in one process.

    uv run --group test python benchmarks/training_step.py --preset nano

Both sides take the same windows of the same random tokens, from the same weights; a turn is some
steps of jaxformer, in the calls that training would make, and as many of torch_ref, after one to
five that are not timed: training does not pause, and a pause costs memory that the machine takes
back. Where dropout is on, torch's fused attention on a CPU is its plain implementation: no other
kernel of its has dropout there. Peak memory is that of a process that runs only one side; on a GPU
it is what a side adds to this one when it is made, compiled and run. ``--profile`` traces some
more steps of each side, and writes which kernels took how long.
"""

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kernels
import measure
import numpy as np
import sides
from limits import measure_limits, products_for, stated_peak

from jaxformer.training.config import TrainConfig

CPU_STEPS = {"nano": 20, "baby": 4, "char-lm": 3, "gpt2-small": 1}
# About as many as one call makes in training.
GPU_STEPS = {"gpt2-small": 15}
PROFILED_STEPS = 3
PRODUCTS = "matrix products"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=15)
    sides.add_arguments(parser)
    parser.add_argument("--steps", type=int, help="in a turn; default what takes some seconds")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--profile", type=Path, help="folder for traces and tables of kernels")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    config = sides.make_config(arguments)
    known, most = (GPU_STEPS, config.steps_per_call) if measure.on_gpu() else (CPU_STEPS, 1)
    steps = arguments.steps or known.get(arguments.preset, most)
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (steps, config.batch_size), np.int32)
    if arguments.memory_of is not None:
        side = sides.make_side(arguments.memory_of, config, ids)
        batches = side.prepare(starts)
        for _ in range(2):
            side.train(batches)
        print(json.dumps(measure.peak_memory()))
        return

    running, work, compiling, failed, peaks = {}, {}, {}, {}, {}

    def start(name: str) -> None:
        side = sides.make_side(name, config, ids)
        work[name] = side.prepare(starts)
        compiling[name] = measure.seconds_of(functools.partial(side.compile, work[name]))
        running[name] = side
        if measure.on_gpu():
            side.train(work[name], min(2, steps))

    # Before the limits, whose arrays are larger than a small model's.
    for name in sides.side_names(arguments):
        framework = "jax" if name == sides.JAXFORMER else "torch"
        try:
            peaks[name] = measure.device_peak(functools.partial(start, name), framework)
        except Exception as error:
            if name in (sides.JAXFORMER, sides.EAGER):
                raise
            # What torch cannot compile here is noted in the result; the other sides still run.
            failed[name] = str(error).splitlines()[0]
            running.pop(name, None)
    # A GPU's time is short, and its float32 is another than its bfloat16.
    dtypes = {config.dtype} if measure.on_gpu() else {"float32", config.dtype}
    limits = measure_limits(sorted(dtypes))
    losses: dict[str, float] = {}

    def call(name: str, steps: int) -> None:
        losses[name] = running[name].train(work[name], steps)

    calls = {name: functools.partial(call, name, steps) for name in running}
    untimed = max(1, steps // 4)
    before = {name: functools.partial(call, name, untimed) for name in running}
    dtype = config.dtype if config.dtype in limits["matmul"] else "float32"
    products = limits["matmul"][dtype]
    seconds = 0.2 if measure.on_gpu() else 1.0
    calls[PRODUCTS], operations = products_for(products["tried"], dtype, seconds)
    times = measure.interleave(calls, arguments.turns, warm_up=2, before=before)
    products["meanwhile"] = measure.rounded(operations / times.pop(PRODUCTS)["seconds"]["median"])
    results = [
        {
            "side": name,
            **speed(config, measure.scaled(found["seconds"], 1 / steps), products),
            "compile_seconds": measure.rounded(compiling[name]),
            "last_loss": losses[name],
        }
        for name, found in times.items()
    ]
    for row in results:
        if (peak := peaks[row["side"]]) is not None:
            row["peak_memory"] = {"device": peak}
        elif not arguments.no_memory and not measure.on_gpu():
            only = ["--memory-of", str(row["side"])]
            row["peak_memory"] = measure.child([__file__, *sys.argv[1:], *only])
    measure.write(
        "training_step",
        arguments,
        results,
        COLUMNS,
        limits=limits,
        stated_peak=stated_peak(config.dtype),
        flops_per_step=sides.training_flops(config),
        batch_size=config.batch_size,
        products=config.products,
        steps_per_turn=steps,
        untimed_steps_per_turn=untimed,
        speedup=sides.speedup(results, "seconds_per_step"),
        failed=failed,
    )
    if arguments.profile is not None:
        for name, side in running.items():
            trace = kernels.trace_jax if name == sides.JAXFORMER else kernels.trace_torch
            count = min(PROFILED_STEPS, steps)
            profiled = functools.partial(side.train, work[name], count)
            kernels.write(name, trace, profiled, count, arguments.profile)


def speed(
    config: TrainConfig, seconds: dict[str, float], products: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the figures that follow from the seconds of a step and the speed of products."""
    tokens, stated = config.batch_size * config.model.context_length, stated_peak(config.dtype)
    reached = sides.training_flops(config) / seconds["median"]
    figures = {
        "tokens_per_second": tokens / seconds["median"],
        "flops": reached,
        "share_of_measured_peak": reached / products["flops"],
        "share_of_products_meanwhile": reached / products["meanwhile"],
    }
    if stated is not None:
        figures["model_flops_utilization"] = reached / stated
    rounded = {name: measure.rounded(value) for name, value in figures.items()}
    return {"seconds_per_step": seconds, **rounded}


def _share(row: Mapping[str, Any]) -> str:
    text = f"{row['share_of_measured_peak']:.0%}"
    if "share_of_products_meanwhile" in row:
        text += f" ({row['share_of_products_meanwhile']:.0%} of products meanwhile)"
    if "model_flops_utilization" in row:
        text += f" ({row['model_flops_utilization']:.1%} of the stated)"
    return text


COLUMNS = {
    "side": lambda row: row["side"],
    "step": lambda row: measure.milliseconds(row["seconds_per_step"]),
    "compiling": lambda row: f"{row['compile_seconds']:.1f} s",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "GFLOP/s": lambda row: f"{row['flops'] / 1e9:,.0f}",
    "of the measured peak": _share,
    "memory": measure.most_memory,
    "last loss": lambda row: f"{row['last_loss']:.4f}",
}

if __name__ == "__main__":
    measure.run(main)
