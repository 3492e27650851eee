r"""Times a training step with other options of XLA in turn, in one process.

    python benchmarks/compiler_options.py --preset gpt2-small --dtype bfloat16 \
        --options xla_gpu_triton_gemm_any=true --options xla_gpu_dot_merger_threshold_mb=32

Each ``--options`` is one variant, of one option or of several with commas between them: what it
says comes on top of the options that jaxformer compiles with (``OPTIONS`` in
``jaxformer/training/parallel/strategy.py``), and ``--options none`` leaves these out. All variants
are compiled at the same time. One that XLA rejects is a row with its message. A ratio is to the
first that is not rejected.
"""

import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import measure
import numpy as np
import sides

AS_IT_IS, NONE = "as it is", "none"
STEPS = {"nano": 20, "baby": 10, "char-lm": 10, "gpt2-small": 5}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=7)
    sides.add_arguments(parser)
    parser.add_argument("--options", action="append", default=[], metavar="NAME=VALUE,...")
    arguments = parser.parse_args()

    import jax

    from jaxformer.execution.attention_backends import CompilationTarget
    from jaxformer.training.parallel.strategy import OPTIONS

    config = sides.make_config(arguments)
    steps = STEPS.get(arguments.preset, 2) if measure.on_gpu() else 2
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (steps, config.batch_size), np.int32)
    side = sides.make_side(sides.JAXFORMER, config, ids)
    strategy, state = side.parallel, side.state
    usual = OPTIONS.get(CompilationTarget.here().platform, {})
    variants = {AS_IT_IS: usual}
    for text in arguments.options:
        variants[text] = {} if text == NONE else {**usual, **_parse(text)}

    shapes = strategy.step_shapes(strategy.spec.state_shapes(), len(ids), steps)
    lowered = strategy.lower_steps(*shapes)
    given = (side.tokens, starts.reshape(shapes[2].shape), np.int32(steps))

    def compile_variant(options: dict[str, Any]) -> tuple[Any, float] | str:
        start = time.perf_counter()
        try:
            program = lowered.compile(compiler_options=options)
        except jax.errors.JaxRuntimeError as error:
            return str(error).splitlines()[0]
        return program, time.perf_counter() - start

    with ThreadPoolExecutor(4) as pool:
        compiled = dict(zip(variants, pool.map(compile_variant, variants.values()), strict=True))
    losses: dict[str, float] = {}

    def run(name: str, program: Any) -> None:
        nonlocal state
        state, history, _ = program(state, *given)
        losses[name] = float(np.ravel(strategy.fetch(history["train_loss"]))[-1])

    calls = {
        name: lambda name=name, program=found[0]: run(name, program)
        for name, found in compiled.items()
        if not isinstance(found, str)
    }
    times = measure.interleave(calls, arguments.turns, warm_up=2)
    first = next(iter(times.values()))["seconds"]["median"]
    results: list[dict[str, Any]] = []
    for name, found in compiled.items():
        row: dict[str, Any] = {"variant": name, "options": variants[name]}
        if isinstance(found, str):
            row["error"] = found
        else:
            seconds = times[name]["seconds"]
            row["seconds_per_step"] = measure.scaled(seconds, 1 / steps)
            row["compile_seconds"] = measure.rounded(found[1])
            row["last_loss"] = losses[name]
            row["ratio"] = measure.rounded(seconds["median"] / first)
        results.append(row)
    measure.write("compiler_options", arguments, results, COLUMNS, batch_size=config.batch_size)


def _parse(text: str) -> dict[str, bool | str]:
    """Reads ``name=value,name=value``; true and false are booleans, as XLA wants them."""
    found: dict[str, bool | str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            sys.exit(f"error: --options wants NAME=VALUE or none, got {part!r}")
        found[name] = {"true": True, "false": False}.get(value.lower(), value)
    return found


def _step(row: Mapping[str, Any]) -> str:
    return row["error"] if "error" in row else f"{1e3 * row['seconds_per_step']['median']:.2f} ms"


COLUMNS = {
    "variant": lambda row: row["variant"],
    "step": _step,
    "ratio": lambda row: f"{row['ratio']:.3f}" if "ratio" in row else "",
}

if __name__ == "__main__":
    measure.run(main)
