"""Checks on an accelerator what the test suite proves on a CPU, and writes what it finds.

    python benchmarks/accelerator_checks.py --out accelerator.json

Each check is a row, or several. A row ``holds``, does not, or is only reported (null). An error
costs its own check alone, the file is written again after each row, and the exit code is 1 if
anything does not hold. ``JAX_PLATFORMS`` must leave JAX its CPU, with which numbers are compared.

Nobody picks a tolerance. As in ``parity_tests/verdict.py`` an error is a root mean square against
float64, and may be at most twice that of a reference in the same dtype: for attention that of the
plain core, for training that of a CPU, for products that of torch.
Products in TensorFloat-32 round to 11 bits, more than bfloat16's 8, and so training with them may
err at most as much as a CPU does in bfloat16.
"""

import contextlib
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np
import sides
from accelerator_attention import check_attention
from accelerator_losses import (
    LOSS_DTYPES,
    TRAINED,
    Arrays,
    Row,
    check_losses,
    comparable,
    cpu_losses,
    drawn_weights,
    save_losses,
)
from accelerator_resuming import check_price, check_resume, time_steps


def main() -> None:
    """Runs the checks."""
    parser = measure.parser(__doc__, turns=4)
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK")
    parser.add_argument("--presets", nargs="+", choices=TRAINED, default=list(TRAINED))
    parser.add_argument(
        "--references", type=Path, help="folder that keeps a CPU's losses; default none is kept"
    )
    parser.add_argument("--part", help="what a process of a check computes")
    arguments = parser.parse_args()
    if arguments.part is not None:
        name, *given = arguments.part.split(":")
        print(json.dumps(PARTS[name](*given)))
        return

    results: list[Row] = []

    def add(check: str, start: float, row: Row) -> None:
        seconds = measure.rounded(time.perf_counter() - start)
        results.append({"check": check, **row, "seconds_since_start_of_check": seconds})
        print(_line(results[-1]), file=sys.stderr, flush=True)
        if arguments.out is not None:
            _write(arguments, results)

    with contextlib.ExitStack() as stack:
        if arguments.references is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxformer-losses-"))
            arguments.references = Path(folder)
        arguments.references.mkdir(parents=True, exist_ok=True)
        futures = {}
        if "losses" in arguments.only:
            # They take a CPU's time while other checks take the accelerator's.
            pool = stack.enter_context(ThreadPoolExecutor(len(TRAINED) * len(LOSS_DTYPES)))
            futures = {
                (preset, dtype): pool.submit(cpu_losses, arguments.references, preset, dtype)
                for preset in arguments.presets
                for dtype in LOSS_DTYPES
            }
        for name in arguments.only:
            start = time.perf_counter()
            try:
                for row in CHECKS[name](arguments.turns, futures):
                    add(name, start, row)
            except Exception as error:
                traceback.print_exc()
                lines = str(error).splitlines() or [""]
                shown = f"{type(error).__name__}: {' | '.join(lines[-3:])}"
                add(name, start, {"name": "error", "holds": False, "error": shown})
    if arguments.out is None:
        _write(arguments, results)
    sys.exit(any(row["holds"] is False for row in results))


def check_matmul(turns: int, _: Any) -> Iterator[Row]:
    """Compares a model's logits at both precisions of float32 products with torch's."""
    import jax
    import jax.numpy as jnp
    import torch

    import torch_ref.config
    import torch_ref.transformer_lm
    from jaxformer.parameters import merge
    from jaxformer.porting import export_arrays
    from jaxformer.training.parallel import StepSpec
    from parity_tests.verdict import measure_rounding

    config = comparable("baby")
    spec = StepSpec.from_config(config)
    weights = {name: a.astype(np.float32) for name, a in drawn_weights(spec.shapes).items()}
    twin = torch_ref.transformer_lm.TransformerLM(
        torch_ref.config.TransformerLMConfig(**config.model.settings())
    )
    twin.load_state_dict({n: torch.from_numpy(a.copy()) for n, a in export_arrays(weights).items()})
    twin.to(device := "cuda" if measure.on_gpu() else "cpu").eval()

    @jax.jit
    def run(parameters: Any, ids: Any) -> Any:
        model = merge(spec.definition, parameters)
        model.eval()
        return model(ids)

    def by_jax(ids: np.ndarray, dtype: str) -> Arrays:
        given = {name: jnp.asarray(a.astype(dtype)) for name, a in weights.items()}
        return {"output": np.asarray(run(given, jnp.asarray(ids)), np.float64)}

    for precision, for_torch in (("highest", "highest"), ("default", "high")):
        torch.set_float32_matmul_precision(for_torch)
        draws = []
        for draw in range(turns):
            shape = (4, config.model.context_length)
            ids = np.random.default_rng(draw).integers(0, 65, shape).astype(np.int32)
            with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
                exact = by_jax(ids, "float64")
            with jax.default_matmul_precision(precision):
                candidate = by_jax(ids, "float32")
            with torch.inference_mode():
                logits = twin(torch.from_numpy(ids).long().to(device))
            draws.append((candidate, {"output": logits.double().cpu().numpy()}, exact))
        found = measure_rounding(draws, np.dtype(np.float32))["output"]
        yield {
            "name": f"logits of baby, precision {precision}",
            "error": measure.rounded(found.candidate),
            "torch_error": measure.rounded(found.reference),
            "torch_precision": for_torch,
            "ratio": measure.rounded(found.ratio),
            "holds": found.ratio <= 2,
        }


def check_memory(turns: int, _: Any) -> Iterator[Row]:
    """Compares the peak memory of training with the plan's; a process of its own measures it."""
    preset = "gpt2-small" if measure.on_gpu() else "nano"
    found = measure.child([__file__, "--part", f"memory:{preset}"])
    row: Row = {"name": f"{preset}, batch {found['batch_size']}", "holds": None, **found}
    if found["measured"] is None:
        row["skipped"] = "the device does not say how much memory is used"
    else:
        row["ratio"] = measure.rounded(found["planned"] / found["measured"])
    yield row


def measure_memory(preset: str) -> Row:
    """Returns the peak memory of training steps, and what the plan says, in bytes."""
    import jax

    from jaxformer.planning.plan import find_plan

    config = comparable(preset).replace(batch_size=16, dtype="bfloat16")
    with tempfile.TemporaryDirectory(prefix="jaxformer-memory-") as folder:
        text = Path(folder, "text.txt")
        characters = bytes(range(48, 112)).decode()
        text.write_text(characters * 2000, encoding="utf-8")
        # Of one device, as it is measured.
        plan = find_plan(config.replace(data=str(text), devices=1))
    ids = sides.random_ids(config, 115_200)
    starts = np.zeros((config.steps_per_call, 16), np.int32)
    side = sides.make_side(sides.JAXFORMER, config.replace(devices=1), ids)
    loss = side.train(starts)
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "batch_size": 16,
        "measured": peak,
        "planned": plan.parameters + plan.moments + plan.corpus + plan.training,
        "planned_with_evaluation": plan.total,
        "planned_parts": {
            name: getattr(plan, name)
            for name in ("parameters", "moments", "corpus", "gradients", "activations", "training")
        },
        "last_loss": loss,
    }


CHECKS: dict[str, Callable[[int, Any], Iterator[Row]]] = {
    "attention": check_attention,
    "matmul": check_matmul,
    "losses": check_losses,
    "memory": check_memory,
    "resume": check_resume,
    "price": check_price,
}
PARTS: dict[str, Callable[..., Any]] = {
    "losses": save_losses,
    "step": time_steps,
    "memory": measure_memory,
}


def _verdict(row: Row) -> str:
    if "error" in row and isinstance(row["error"], str):
        return row["error"]
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    return {True: "holds", False: "DOES NOT HOLD", None: "reported"}[row["holds"]]


def _figures(row: Row) -> str:
    names = ("ratio", "largest_relative_difference", "bit_exact", "measured", "planned")
    found = {name: row[name] for name in names if name in row}
    for kind in ("output", "input"):
        ratios = {n: value for n, value in row.get(kind, {}).items() if n.startswith("ratio")}
        found |= {f"{kind} {name}": value for name, value in ratios.items()}
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in found.items())


def _line(row: Row) -> str:
    return f"{row['check']}: {row['name']}: {_verdict(row)}; {_figures(row)}"


def _write(arguments: Any, results: Sequence[Row]) -> None:
    measure.write("accelerator_checks", arguments, results, COLUMNS)


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "check": lambda row: row["check"],
    "name": lambda row: row["name"],
    "figures": lambda row: _figures(dict(row)),
    "verdict": lambda row: _verdict(dict(row)),
}

if __name__ == "__main__":
    measure.run(main)
