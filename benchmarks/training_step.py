"""Times one optimizer step of jaxformer and of torch_ref in turn, in one process.

    uv run --group test python benchmarks/training_step.py --preset nano

Both sides take the same windows of the same random tokens, from the same weights; a turn is some
steps of jaxformer, in the calls that training would make, and as many of torch_ref, after one to
five that are not timed: training does not pause, and a pause costs memory that the machine takes
back. Where dropout is on, torch's fused attention on a CPU is its plain implementation: no other
kernel of its has dropout there. Peak memory is that of a process that runs only one side.
"""

import argparse
import functools
import json
import sys
from collections.abc import Mapping
from typing import Any

import measure
import numpy as np
import sides
from limits import measure_limits, products_for, stated_peak

from jaxformer.training.config import TrainConfig

CPU_STEPS = {"nano": 20, "baby": 4, "char-lm": 3, "gpt2-small": 1}
PRODUCTS = "matrix products"


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=15)
    sides.add_arguments(parser)
    parser.add_argument("--steps", type=int, help="in a turn; default what takes some seconds")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    config = sides.make_config(arguments)
    steps = arguments.steps or (10 if measure.on_gpu() else CPU_STEPS.get(arguments.preset, 1))
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (steps, config.batch_size), np.int32)
    if arguments.only is not None:
        side = sides.make_side(arguments.only, config, ids)
        batches = side.prepare(starts)
        for _ in range(2):
            side.train(batches)
        print(json.dumps(measure.peak_memory()))
        return

    limits = measure_limits(sorted({"float32", config.dtype}))
    running, work, compiling, failed = {}, {}, {}, {}
    for name in sides.side_names(arguments):
        side = sides.make_side(name, config, ids)
        work[name] = side.prepare(starts)
        try:
            compiling[name] = measure.seconds_of(functools.partial(side.compile, work[name]))
        except Exception as error:
            if name in (sides.JAXFORMER, sides.EAGER):
                raise
            # What torch cannot compile here is noted in the result; the other sides still run.
            failed[name] = str(error).splitlines()[0]
            continue
        running[name] = side
    losses: dict[str, float] = {}

    def call(name: str, steps: int) -> None:
        losses[name] = running[name].train(work[name][:steps])

    calls = {name: functools.partial(call, name, steps) for name in running}
    untimed = max(1, steps // 4)
    before = {name: functools.partial(call, name, untimed) for name in running}
    dtype = config.dtype if config.dtype in limits["matmul"] else "float32"
    products = limits["matmul"][dtype]
    calls[PRODUCTS], operations = products_for(products["tried"], dtype)
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
    if not arguments.no_memory:
        for row in results:
            only = ["--only", str(row["side"])]
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
        steps_per_turn=steps,
        untimed_steps_per_turn=untimed,
        speedup=sides.speedup(results, "seconds_per_step"),
        failed=failed,
    )


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
