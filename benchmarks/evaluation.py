"""Times the evaluation of a validation split by jaxformer and by torch_ref in turn.

    uv run --group test python benchmarks/evaluation.py --preset nano

The same weights score the same windows without dropout or gradients, torch_ref under
``torch.inference_mode``. jaxformer takes as many at a time as its trainer does, torch_ref as many
as it is fastest with, of BATCHES. A turn is one pass over all windows, after one that is not timed.
"""

import functools
import sys

import measure
import numpy as np
import sides
from limits import measure_limits

BATCHES = (1, 4, 16, 64)
# Between the losses of programs that sum in other orders: in float32 they were measured apart by
# 1e-6, and bfloat16 rounds each number to 4e-3.
LARGEST_DIFFERENCE = {"float32": 1e-4, "bfloat16": 1e-2}
CPU_WINDOWS = {"nano": 1024, "baby": 64, "char-lm": 16, "gpt2-small": 4}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=9)
    sides.add_arguments(parser)
    parser.add_argument("--windows", type=int, help="how many to score")
    arguments = parser.parse_args()

    config = sides.make_config(arguments)
    length = config.model.context_length
    count = arguments.windows or (1024 if measure.on_gpu() else CPU_WINDOWS[arguments.preset])
    ids = sides.random_ids(config, count * length + 1)
    windows = np.arange(count, dtype=np.int32) * length, np.ones((count, length), bool)

    limits = measure_limits(sorted({"float32", config.dtype}))
    losses, calls, batches = {}, {}, {}

    def call(name: str, side: sides.Side, tokens: object) -> None:
        losses[name] = side.evaluate(tokens, windows)

    for name in sides.side_names(arguments):
        side = sides.make_side(name, config, ids)
        tokens = side.tokens if isinstance(side, sides.Jaxformer) else ids
        if name == sides.EAGER:
            side.evaluation_batch = fastest_batch(side, ids, windows)
        elif name != sides.JAXFORMER:
            side.evaluation_batch = batches[sides.EAGER]
        batches[name] = side.evaluation_batch
        calls[name] = functools.partial(call, name, side, tokens)
    times = measure.interleave(calls, arguments.turns, warm_up=2, before=calls)
    largest = max(losses.values())
    if largest - min(losses.values()) > LARGEST_DIFFERENCE[config.dtype] * largest:
        sys.exit(f"the sides compute something else: losses of {losses}")

    flops = count / config.batch_size * sides.training_flops(config) / 3
    peak = limits["matmul"].get(config.dtype, limits["matmul"]["float32"])["flops"]
    results = [
        {
            "side": name,
            **found,
            "tokens_per_second": measure.rounded(count * length / found["seconds"]["median"]),
            "share_of_measured_peak": measure.rounded(flops / found["seconds"]["median"] / peak),
            "batch_size": batches[name],
            "loss": losses[name],
        }
        for name, found in times.items()
    ]
    measure.write(
        "evaluation", arguments, results, COLUMNS,
        limits=limits, windows=count, products=config.products,
        speedup=sides.speedup(results, "seconds"),
    )  # fmt: skip


def fastest_batch(side: sides.Side, ids: np.ndarray, windows: tuple[np.ndarray, np.ndarray]) -> int:
    """Returns the batch size with which a side scores the windows fastest."""
    calls = {}
    # A larger batch than all windows would be filled up.
    for size in (size for size in BATCHES if size <= len(windows[0])):

        def call(size: int = size) -> None:
            side.evaluation_batch = size
            side.evaluate(ids, windows)

        calls[size] = call
    times = measure.interleave(calls, 3)
    return min(times, key=lambda size: times[size]["seconds"]["median"])


COLUMNS = {
    "side": lambda row: row["side"],
    "pass": lambda row: measure.milliseconds(row["seconds"]),
    "first call": lambda row: f"{row['first_call']:.1f} s",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
    "windows at a time": lambda row: str(row["batch_size"]),
    "of the measured peak": lambda row: f"{row['share_of_measured_peak']:.0%}",
    "loss": lambda row: f"{row['loss']:.4f}",
}

if __name__ == "__main__":
    measure.run(main)
