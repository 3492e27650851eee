"""Checks on an accelerator what the test suite proves on a CPU, and writes what it finds.

    python benchmarks/accelerator_checks.py --out accelerator.json

Each check is a row, or several. A row ``holds``, does not, or is only reported (null). An error
costs its own check alone, the file is written again after each, and the exit code is 1 if anything
does not hold. ``JAX_PLATFORMS`` must leave JAX its CPU, with which numbers are compared.

Nobody picks a tolerance. As in ``parity_tests/verdict.py`` an error is a root mean square against
float64, and may be at most twice that of a reference in the same dtype: for attention that of the
plain core or of torch's own fused kernel, for training that of a CPU, for products that of torch.
Products in TensorFloat-32 round to 11 bits, more than bfloat16's 8, and so training with them may
err at most as much as a CPU does in bfloat16.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
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

Row = dict[str, Any]
Arrays = dict[str, np.ndarray]

# Windows a step, steps, and orders of the data: how far one run strays is a matter of chance, so
# that a small model has several.
TRAINED = {"nano": (12, 50, 6), "gpt2-small": (2, 3, 1)}
LOSS_DTYPES = ("float64", "float32", "bfloat16")
PATTERNS = {"causal": (True, None), "causal, window": (True, 100), "not causal": (False, None)}
DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
# Makes steps past its last checkpoint, and then dies as if the machine had.
KILLED = """
import os, signal, sys
from jaxformer.cli.main import main
from jaxformer.training.loop import TrainingLoop
train = TrainingLoop._train
def train_or_die(loop, count):
    if loop.step >= 40:
        loop.folder.checkpoints.wait()
        os.kill(os.getpid(), signal.SIGKILL)
    train(loop, count)
TrainingLoop._train = train_or_die
sys.exit(main(["train", *sys.argv[1:]]))
"""


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
            begin, start = len(results), time.perf_counter()
            try:
                for row in CHECKS[name](arguments.turns, futures):
                    results.append({"check": name, **row})
            except Exception as error:
                traceback.print_exc()
                lines = str(error).splitlines() or [""]
                shown = f"{type(error).__name__}: {' | '.join(lines[-3:])}"
                results.append({"check": name, "name": "error", "holds": False, "error": shown})
            for row in results[begin:]:
                row["seconds_of_check"] = measure.rounded(time.perf_counter() - start)
                print(_line(row), file=sys.stderr, flush=True)
            if arguments.out is not None:
                _write(arguments, results)
    if arguments.out is None:
        _write(arguments, results)
    sys.exit(any(row["holds"] is False for row in results))


def check_losses(turns: int, futures: Mapping[Any, Any]) -> Iterator[Row]:
    """Trains on the accelerator, and compares losses with those of a CPU from equal weights.

    What is judged are the losses of each token of a batch after the last step.
    """
    import jax

    cpu: dict[Any, Arrays] = {}
    for preset, dtype, precision in [
        (preset, dtype, precision)
        for preset in dict.fromkeys(preset for preset, _ in futures)
        for dtype, precision in (
            ("float32", "highest"), ("float32", "default"), ("bfloat16", "default"),
        )
    ]:  # fmt: skip
        with jax.default_matmul_precision(precision):
            found = train_losses(preset, dtype)
        cpu |= {(preset, d): futures[preset, d].result() for d in LOSS_DTYPES}
        exact = cpu[preset, "float64"]
        is_tf32 = precision == "default" and dtype == "float32" and measure.on_gpu()
        reference = cpu[preset, "bfloat16" if is_tf32 else dtype]
        ours, theirs = (
            np.sqrt(np.mean((run["tokens"] - exact["tokens"]) ** 2, axis=-1))
            for run in (found, reference)
        )
        ratio = float(np.exp(np.mean(np.log(ours / theirs))))
        same = cpu[preset, dtype]["losses"]
        yield {
            "name": f"{preset} {dtype}, precision {precision}",
            "steps": TRAINED[preset][1],
            "orders_of_data": TRAINED[preset][2],
            "largest_relative_difference": largest(found["losses"] / same - 1),
            "largest_relative_error": largest(found["losses"] / exact["losses"] - 1),
            "of_the_cpu": largest(same / exact["losses"] - 1),
            "error": measure.rounded(float(np.sqrt(np.mean(ours**2)))),
            "reference_error": measure.rounded(float(np.sqrt(np.mean(theirs**2)))),
            "reference": f"CPU, {'bfloat16' if is_tf32 else dtype}",
            "ratio": measure.rounded(ratio),
            "allowed": 1 if is_tf32 else 2,
            "holds": ratio <= (1 if is_tf32 else 2),
            "first_losses": found["losses"][0, :3].tolist(),
            "last_losses": found["losses"][0, -3:].tolist(),
        }


def largest(values: np.ndarray) -> float:
    """Returns the largest magnitude."""
    return measure.rounded(float(np.abs(values).max()))


def cpu_losses(folder: Path, preset: str, dtype: str) -> Arrays:
    """Returns ``train_losses`` of a process that has a CPU alone, or of an earlier one."""
    path = folder / f"{preset}-{dtype}.npz"
    if not path.exists():
        measure.child([__file__, "--part", f"losses:{preset}:{dtype}:{path}"], JAX_PLATFORMS="cpu")
    with np.load(path) as file:
        return dict(file)


def save_losses(preset: str, dtype: str, path: str) -> str:
    """Computes and saves ``train_losses``."""
    import jax

    with (
        jax.enable_x64(dtype == "float64"),
        jax.default_matmul_precision("highest"),
        # One device: numbers depend on how a batch is divided.
        jax.default_device(jax.devices()[0]),
    ):
        found = train_losses(preset, dtype)
    partial = Path(path).with_suffix(f".{os.getpid()}.npz")
    np.savez(partial, **found)
    partial.rename(path)
    return path


def train_losses(preset: str, dtype: str) -> Arrays:
    """Returns the mean loss of each step, and those of each token of a batch after the last.

    ``losses`` is (orders, steps), ``tokens`` (orders, tokens), both float64. Weights are drawn by
    numpy, so that they are the same on each machine.
    """
    import jax
    import jax.numpy as jnp

    from jaxformer.char_data import window_starts
    from jaxformer.losses import token_losses
    from jaxformer.parameters import merge
    from jaxformer.train_step import TrainState, train_step
    from jaxformer.training.parallel import StepSpec

    config = comparable(preset)
    spec, (batch_size, steps, orders) = StepSpec.from_config(config), TRAINED[preset]
    kept = "float64" if dtype == "float64" else "float32"
    compute = jnp.dtype(jnp.bfloat16) if dtype == "bfloat16" else None
    weights = {name: a.astype(kept) for name, a in drawn_weights(spec.shapes).items()}
    text = np.frombuffer((measure.ROOT / "README.md").read_bytes(), np.uint8)
    ids = text.astype(np.int32) % config.model.vocab_size
    offsets = np.arange(config.model.context_length + 1)

    def windows(order: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        starts = window_starts(order, step, batch_size, len(ids) - len(offsets))
        rows = ids[starts[:, None] + offsets]
        return rows[:, :-1], rows[:, 1:]

    step = jax.jit(
        functools.partial(
            train_step,
            definition=spec.definition,
            optimizer=spec.optimizer,
            compute_dtype=compute,
        ),
        donate_argnums=0,
    )

    @jax.jit
    def evaluate(parameters: Any, inputs: Any, targets: Any) -> Any:
        cast = {n: p if compute is None else p.astype(compute) for n, p in parameters.items()}
        model = merge(spec.definition, cast)
        model.eval()
        return token_losses(model(inputs), targets)

    losses, tokens = [], []
    for order in range(orders):
        state = TrainState.create({n: jnp.asarray(a) for n, a in weights.items()}, spec.optimizer)
        for number in range(steps):
            batch = tuple(x[None] for x in windows(order, number))
            state, metrics = step(state, batch, None)
            losses.append(float(metrics["train_loss"]))
        found = evaluate(state.parameters, *windows(order, steps))
        tokens.append(np.asarray(found, np.float64).ravel())
    return {"losses": np.reshape(losses, (orders, steps)), "tokens": np.stack(tokens)}


def comparable(preset: str) -> Any:
    """Returns a preset without dropout, whose steps do not amplify rounding.

    At nano's own learning rate without warm-up, float32 is 40 % from float64 after 50 steps.
    """
    from jaxformer.training.presets import PRESETS

    config = PRESETS[preset]()
    rates = [name for name in config.model.settings() if name.endswith("_dropout")]
    size = config.model.vocab_size or 65
    schedule = {"learning_rate": 1e-4, "min_learning_rate": 1e-5, "warmup_steps": 0}
    return config.replace(**dict.fromkeys(rates, 0.0), **schedule, vocab_size=size)


def drawn_weights(shapes: Mapping[str, Any]) -> Arrays:
    """Returns weights of these shapes, float64: matrices and biases of std 0.02, norms near 1."""
    random = np.random.default_rng(0)
    return {
        name: 0.02 * random.standard_normal(shape.shape) + name.endswith(".scale")
        for name, shape in sorted(shapes.items())
    }


def check_attention(turns: int, _: Any) -> Iterator[Row]:
    """Compares cuDNN's attention with the plain core and with torch's, forward and backward.

    Fused kernels round the weights and their gradients, which the plain core does not. torch's
    flash attention has no window: there its memory-efficient kernel, with a mask, takes its place.
    """
    import jax
    import jax.numpy as jnp

    from jaxformer.attention_core import scaled_dot_product_attention
    from jaxformer.execution.attention_backends import MaskPattern
    from jaxformer.execution.fused_attention import fused_attention
    from parity_tests.verdict import measure_rounding

    if not measure.on_gpu():
        yield {"name": "cuDNN's kernel", "holds": None, "skipped": "needs an NVIDIA GPU"}
        return
    batch, length, heads, kv_heads, width = 2, 512, 8, 2, 64
    cpu, scale = jax.devices("cpu")[0], width**-0.5

    def both_passes(attend: Callable[..., Any]) -> Callable[..., Arrays]:
        def loss(inputs: Any, cotangent: Any) -> Any:
            out = attend(*inputs)
            wide = jnp.promote_types(out.dtype, jnp.float32)
            return jnp.sum(out.astype(wide) * cotangent.astype(wide)), out

        compiled = jax.jit(jax.value_and_grad(loss, has_aux=True))

        def run(*given: np.ndarray) -> Arrays:
            *inputs, cotangent = map(jnp.asarray, given)
            (_, out), gradients = compiled(tuple(inputs), cotangent)
            return named(out, *gradients)

        return run

    for name, (causal, window) in PATTERNS.items():
        pattern = MaskPattern(causal, window)
        seen = np.ones((length, length), bool)
        if causal:
            seen = np.tril(seen)
        if window is not None:
            seen &= ~np.tril(seen, -window)
        mask = None if seen.all() else seen[None, None]
        for_torch = None if window is None else seen
        plain = both_passes(
            lambda q, k, v, mask=mask: scaled_dot_product_attention(q, k, v, mask=mask)[0]
        )
        fused = both_passes(
            functools.partial(fused_attention, "cudnn", pattern=pattern, scale=scale)
        )
        for dtype in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
            by_plain, by_torch, failed = [], [], None
            for draw in range(turns):
                random = np.random.default_rng(draw)
                counts = (heads, kv_heads, kv_heads, heads)
                given = [
                    random.standard_normal((batch, length, n, width)).astype(dtype) for n in counts
                ]
                with jax.enable_x64(True), jax.default_device(cpu):
                    exact = plain(*(x.astype(np.float64) for x in given))
                found = fused(*given)
                by_plain.append((found, plain(*given), exact))
                try:
                    theirs = torch_attention(given, causal, for_torch)
                    by_torch.append((found, theirs, exact))
                except RuntimeError as error:
                    failed = str(error).splitlines()[0]
            row: Row = {"name": f"{name}, {dtype.name}", "torch_failed": failed}
            ratios: dict[str, list[float]] = {}
            for reference, draws in (("plain", by_plain), ("torch", by_torch)):
                for kind, judged in (measure_rounding(draws, dtype) if draws else {}).items():
                    ratios.setdefault(kind, []).append(judged.ratio)
                    row.setdefault(kind, {"error": measure.rounded(judged.candidate)})
                    row[kind] |= {
                        f"{reference}_error": measure.rounded(judged.reference),
                        f"ratio_to_{reference}": measure.rounded(judged.ratio),
                    }
            row["holds"] = all(min(found) <= 2 for found in ratios.values())
            yield row


def named(out: Any, *gradients: Any) -> Arrays:
    """Returns an output and gradients of inputs by name, float64."""
    arrays = {"output": out, **{f"input.{i}": g for i, g in zip("qkv", gradients, strict=True)}}
    return {name: np.asarray(a).astype(np.float64) for name, a in arrays.items()}


def torch_attention(given: Sequence[np.ndarray], causal: bool, seen: np.ndarray | None) -> Arrays:
    """Returns what a fused kernel of torch gives for queries, keys, values and a cotangent.

    Args:
        given: these four, (B, T, N, H).
        causal: whether a query is kept from later keys.
        seen: (T, T), where a rule is not enough: the memory-efficient kernel then computes it.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    dtype = getattr(torch, given[0].dtype.name)
    q, k, v, cotangent = (
        torch.from_numpy(x.astype(np.float32)).to("cuda", dtype).transpose(1, 2) for x in given
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    backend, rule = SDPBackend.FLASH_ATTENTION, {"is_causal": causal, "enable_gqa": True}
    if seen is not None:
        backend, rule = SDPBackend.EFFICIENT_ATTENTION, {"attn_mask": torch.tensor(seen).cuda()}
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    with sdpa_kernel(backend):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, **rule)
    gradients = torch.autograd.grad((out.float() * cotangent.float()).sum(), leaves)
    return named(*(x.detach().transpose(1, 2).double().cpu() for x in (out, *gradients)))


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
                ours = by_jax(ids, "float32")
            with torch.inference_mode():
                logits = twin(torch.from_numpy(ids).long().to(device))
            draws.append((ours, {"output": logits.double().cpu().numpy()}, exact))
        found = measure_rounding(draws, np.dtype(np.float32))["output"]
        yield {
            "name": f"logits of baby, precision {precision}",
            "error": measure.rounded(found.candidate),
            "torch_error": measure.rounded(found.reference),
            "torch_precision": for_torch,
            "ratio": measure.rounded(found.ratio),
            "holds": found.ratio <= 2,
        }


def check_resume(turns: int, _: Any) -> Iterator[Row]:
    """Compares runs in one go with each other and with one that was killed, bit for bit.

    XLA chooses among a GPU's kernels by timing them, and some add in any order. So bits are
    demanded of deterministic kernels, and on a CPU; those of others are reported.
    """
    variants = {"kept programs": ("", True), "programs compiled anew": ("", False)}
    if measure.on_gpu():
        variants["deterministic, compiled anew"] = (DETERMINISTIC, False)
    with tempfile.TemporaryDirectory(prefix="jaxformer-resume-") as folder:
        with ThreadPoolExecutor(len(variants)) as pool:
            pending = {
                name: pool.submit(_resume_rows, Path(folder, str(i)), *given)
                for i, (name, given) in enumerate(variants.items())
            }
        for name, rows in pending.items():
            demanded = not measure.on_gpu() or variants[name][0] == DETERMINISTIC
            for what, row in rows.result().items():
                yield {
                    "name": f"{what}: {name}",
                    **row,
                    "holds": row["bit_exact"] or (False if demanded else None),
                }


def check_price(turns: int, _: Any) -> Iterator[Row]:
    """Compares the time of a step with that of deterministic kernels."""
    name = "deterministic kernels: baby"
    if not measure.on_gpu():
        yield {"name": name, "holds": None, "skipped": "needs an NVIDIA GPU"}
        return
    usual, deterministic = (
        measure.child([__file__, "--part", "step:baby"], XLA_FLAGS=flags)["seconds_per_step"]
        for flags in (_flags(""), _flags(DETERMINISTIC))
    )
    yield {
        "name": name,
        "holds": None,
        "seconds_per_step": usual,
        "deterministic": deterministic,
        "ratio": measure.rounded(deterministic["median"] / usual["median"]),
    }


def _flags(more: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()


def _resume_rows(folder: Path, flags: str, keeps: bool) -> dict[str, Row]:
    """Trains nano in one go, once more, and killed and resumed."""
    folder.mkdir()
    text = folder / "text.txt"
    text.write_bytes((measure.ROOT / "README.md").read_bytes())
    environment = {
        **os.environ,
        "XLA_FLAGS": _flags(flags),
        "PYTHONPATH": measure.python_path(),
        "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    settings = [
        "--preset", "nano", "--data", text, "--steps", 60, "--checkpoint-interval", 30,
        "--eval-interval", 60, "--sample-tokens", 0, "--seed", 5, "--dtype", "float32",
    ]  # fmt: skip
    cache = "--compilation-cache" if keeps else "--no-compilation-cache"

    def train(out: str, *arguments: Any, start: Sequence[Any] = ("train.py",)) -> int:
        command = [sys.executable, *start, *arguments, cache, "--out", folder / out]
        done = subprocess.run(
            [str(part) for part in command],
            cwd=measure.ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode not in (0, -signal.SIGKILL):
            raise RuntimeError("\n".join(done.stderr.splitlines()[-3:]))
        return done.returncode

    train("whole", *settings)
    train("again", *settings)
    code = train("killed", *settings, start=("-c", KILLED))
    saved = sorted(path.parent.name for path in folder.glob("killed/checkpoints/*/MANIFEST.json"))
    if code != -signal.SIGKILL or saved != ["30"]:
        raise RuntimeError(f"the run was to be killed after step 30: code {code}, saved {saved}")
    train("killed", "--resume")
    return {
        "two runs": _difference(folder / "whole", folder / "again"),
        "killed and resumed": _difference(folder / "whole", folder / "killed"),
    }


def _difference(one: Path, other: Path) -> Row:
    """How the last checkpoints of two runs differ, and their losses."""
    hashes, losses = [], []
    for folder in (one, other):
        manifest = json.loads((folder / "checkpoints/60/MANIFEST.json").read_text())
        hashes.append({name: about["sha256"] for name, about in manifest["arrays"].items()})
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        # The steps of a killed run after its checkpoint are made again: the later line counts.
        losses.append({x["step"]: x["train_loss"] for x in lines if "train_loss" in x})
    first, second = (np.array([run[step] for step in sorted(run)]) for run in losses)
    differ = [name for name in hashes[0] if hashes[0][name] != hashes[1].get(name)]
    other_steps = np.flatnonzero(first != second)
    return {
        "bit_exact": hashes[0] == hashes[1] and not len(other_steps),
        "arrays": len(hashes[0]),
        "arrays_that_differ": len(differ),
        "first_step_that_differs": int(other_steps[0]) + 1 if len(other_steps) else None,
        "largest_relative_difference": largest(first / second - 1),
    }


def time_steps(preset: str) -> Row:
    """Returns the seconds of a step of a preset, as training makes them."""
    from jaxformer.training.presets import PRESETS

    config = PRESETS[preset]()
    config = config.replace(vocab_size=config.model.vocab_size or 65)
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (50, config.batch_size), np.int32)
    side = sides.make_side(sides.JAXFORMER, config, ids)
    call = functools.partial(side.train, starts)
    times = measure.interleave({"steps": call}, 7, warm_up=2)["steps"]["seconds"]
    return {"seconds_per_step": measure.scaled(times, 1 / len(starts))}


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
