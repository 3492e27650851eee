"""Losses of training on an accelerator beside a CPU's; a part of ``accelerator_checks.py``."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np

Row = dict[str, Any]
Arrays = dict[str, np.ndarray]

# What a process of a check runs, with --part.
CHECKS_SCRIPT = str(Path(__file__).with_name("accelerator_checks.py"))

# Windows a step, steps, and orders of the data: how far one run strays is a matter of chance, so
# that a small model has several.
TRAINED = {"nano": (12, 50, 6), "gpt2-small": (2, 3, 1)}
LOSS_DTYPES = ("float64", "float32", "bfloat16")


def check_losses(turns: int, futures: Mapping[Any, Any]) -> Iterator[Row]:
    """Trains on the accelerator, and compares losses with those of a CPU from equal weights.

    What is judged are the losses of each token of a batch after the last step.
    """
    import jax

    cpu: dict[Any, Arrays] = {}
    combinations = [
        (preset, dtype, precision)
        for preset in dict.fromkeys(preset for preset, _ in futures)
        for dtype, precision in (
            ("float32", "highest"), ("float32", "default"), ("bfloat16", "default"),
        )
    ]  # fmt: skip

    def compile_one(preset: str, dtype: str, precision: str) -> Callable[[], Arrays]:
        with jax.default_matmul_precision(precision):
            return compile_training(preset, dtype)

    # Nearly all of the time goes into compiling, for which a GPU's machine has many cores. Programs
    # run one after the other: a thread that records a CUDA graph lets no other launch one.
    with ThreadPoolExecutor(len(combinations)) as pool:
        compiled = list(pool.map(compile_one, *zip(*combinations, strict=True)))
    for (preset, dtype, precision), train in zip(combinations, compiled, strict=True):
        found = train()
        cpu |= {(preset, d): futures[preset, d].result() for d in LOSS_DTYPES}
        exact = cpu[preset, "float64"]
        is_tf32 = precision == "default" and dtype == "float32" and measure.on_gpu()
        reference = cpu[preset, "bfloat16" if is_tf32 else dtype]
        candidate_error, reference_error = (
            np.sqrt(np.mean((run["tokens"] - exact["tokens"]) ** 2, axis=-1))
            for run in (found, reference)
        )
        ratio = float(np.exp(np.mean(np.log(candidate_error / reference_error))))
        same = cpu[preset, dtype]["losses"]
        yield {
            "name": f"{preset} {dtype}, precision {precision}",
            "steps": TRAINED[preset][1],
            "orders_of_data": TRAINED[preset][2],
            "largest_relative_difference": largest(found["losses"] / same - 1),
            "largest_relative_error": largest(found["losses"] / exact["losses"] - 1),
            "of_the_cpu": largest(same / exact["losses"] - 1),
            "error": measure.rounded(float(np.sqrt(np.mean(candidate_error**2)))),
            "reference_error": measure.rounded(float(np.sqrt(np.mean(reference_error**2)))),
            "reference": f"CPU, {'bfloat16' if is_tf32 else dtype}",
            "ratio": measure.rounded(ratio),
            "allowed": 1 if is_tf32 else 2,
            "holds": ratio <= (1 if is_tf32 else 2),
            "first_losses": found["losses"][0, :3].tolist(),
            "last_losses": found["losses"][0, -3:].tolist(),
        }


def cpu_losses(folder: Path, preset: str, dtype: str) -> Arrays:
    """Returns the losses of a process that has a CPU alone, or of an earlier one."""
    path = folder / f"{preset}-{dtype}.npz"
    if not path.exists():
        measure.child(
            [CHECKS_SCRIPT, "--part", f"losses:{preset}:{dtype}:{path}"], JAX_PLATFORMS="cpu"
        )
    with np.load(path) as file:
        return dict(file)


def save_losses(preset: str, dtype: str, path: str) -> str:
    """Computes and saves the losses of a training."""
    import jax

    with (
        jax.enable_x64(dtype == "float64"),
        jax.default_matmul_precision("highest"),
        # One device: numbers depend on how a batch is divided.
        jax.default_device(jax.devices()[0]),
    ):
        found = compile_training(preset, dtype)()
    partial = Path(path).with_suffix(f".{os.getpid()}.npz")
    np.savez(partial, **found)
    partial.rename(path)
    return path


def compile_training(preset: str, dtype: str) -> Callable[[], Arrays]:
    """Compiles a training, which computes nothing yet.

    Returns:
        What trains, and returns the mean loss of each step and those of each token of a batch after
        the last: ``losses`` is (orders, steps), ``tokens`` (orders, tokens), both float64. Weights
        are drawn by numpy, so that they are the same on each machine.
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
    text = np.frombuffer((measure.ROOT / "LICENSE").read_bytes(), np.uint8)
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

    def initial_state() -> TrainState:
        return TrainState.create({n: jnp.asarray(a) for n, a in weights.items()}, spec.optimizer)

    def batch(order: int, number: int) -> tuple[np.ndarray, ...]:
        return tuple(x[None] for x in windows(order, number))

    shapes = jax.eval_shape(initial_state)
    make_step = step.lower(shapes, batch(0, 0), None).compile()
    measure_tokens = evaluate.lower(shapes.parameters, *windows(0, 0)).compile()

    def train() -> Arrays:
        losses, tokens = [], []
        for order in range(orders):
            state = initial_state()
            for number in range(steps):
                state, metrics = make_step(state, batch(order, number), None)
                losses.append(float(metrics["train_loss"]))
            found = measure_tokens(state.parameters, *windows(order, steps))
            tokens.append(np.asarray(found, np.float64).ravel())
        return {"losses": np.reshape(losses, (orders, steps)), "tokens": np.stack(tokens)}

    return train


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


def largest(values: np.ndarray) -> float:
    """Returns the largest magnitude."""
    return measure.rounded(float(np.abs(values).max()))
