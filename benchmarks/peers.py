"""Times jaxformer beside the other ways to run the same GPT, on a CPU, in turn.

    uv run --group test --group peers python benchmarks/peers.py --preset nano

The sides are a plain PyTorch program, eager and under torch.compile; transformers' GPT-2, with the
cache that it takes by itself and with its static cache, compiled; torchax and torch2jax, which run
the plain program in JAX under ``jax.jit``; and Flax NNX's own layers. All have the same weights,
windows, rates of dropout, AdamW and batch; float32. Each runs in a process of its own, which waits
while another has its turn. A first step is timed from the start of a process, with all caches of
compiled programs empty; it includes imports. Peak memory is the process's after training.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import measure
import numpy as np
import sides
from peer_sides import Jaxformer, NaiveNNX, Side, Task, UnableError
from peer_torch import Torch, Transformers
from peer_traced import Torch2Jax, Torchax
from peer_worker import Worker, environment, worker_command

from jaxformer.hardware.memory import release_freed
from jaxformer.training.config import TrainConfig
from jaxformer.training.presets import PRESETS

JAXFORMER = sides.JAXFORMER
SIDES: dict[str, Callable[[Task], Side]] = {
    JAXFORMER: Jaxformer,
    "torch": Torch,
    "torch.compile": functools.partial(Torch, compiles=True),
    "transformers": Transformers,
    "transformers, static cache": functools.partial(Transformers, compiles=True),
    "torchax": Torchax,
    "torch2jax": Torch2Jax,
    "naive NNX": NaiveNNX,
}
STEPS = {"nano": 20, "baby": 3, "gpt2-small": 1}
WINDOWS = {"nano": 512, "baby": 32, "gpt2-small": 4}
# Between float32 programs that sum in other orders; measured apart by 1e-6.
LARGEST_DIFFERENCE = 1e-4


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=7)
    parser.add_argument("--preset", choices=list(STEPS), default="nano")
    parser.add_argument("--batch-size", type=int, help="windows; default one that fits the machine")
    parser.add_argument("--no-dropout", action="store_true", help="on all sides")
    parser.add_argument("--steps", type=int, help="in a turn; default what takes some seconds")
    parser.add_argument("--starts", type=int, default=3, help="processes for the first step")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--weights", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    config = make_config(arguments)
    if arguments.worker is not None:
        work(arguments, config)
        return

    steps = arguments.steps or STEPS[arguments.preset]
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.npz"
        measure.child(worker_command("weights", weights), **environment(Path(folder) / "draw"))
        rows: dict[str, dict[str, Any]] = {name: {"side": name} for name in arguments.only}
        workers, cannot = start_workers(arguments, Path(folder), weights, rows)
        try:
            train(workers, rows, cannot, steps, arguments.turns)
            evaluate(workers, rows, cannot, WINDOWS[arguments.preset], arguments.turns)
            generate(workers, rows, cannot, config, arguments.turns)
        finally:
            for worker in workers.values():
                worker.end()
    for row in rows.values():
        _add_rates(row, config, WINDOWS[arguments.preset])
    del arguments.worker, arguments.weights
    measure.write(
        "peers", arguments, list(rows.values()), COLUMNS,
        batch_size=config.batch_size, steps_per_turn=steps,
        untimed_steps_per_turn=max(1, steps // 4), texts=1, cannot=cannot,
        dropout=config.model.embedding.embedding_dropout,
        speedup={what: _speedup(rows, field) for what, field in MEASURED.items()},
    )  # fmt: skip


def make_config(arguments: argparse.Namespace) -> TrainConfig:
    """Returns the preset, with a learning rate that stays, without importing JAX."""
    config = PRESETS[arguments.preset]()
    model = config.model.replace(vocab_size=config.model.vocab_size or 65)
    if arguments.no_dropout:
        model = model.replace(**dict.fromkeys(sides.DROPOUT, 0.0))
    optimizer = dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0)
    return dataclasses.replace(
        config, model=model, optimizer=optimizer, seed=sides.SEED,
        batch_size=arguments.batch_size or sides.CPU_BATCHES[arguments.preset],
    )  # fmt: skip


def start_workers(
    arguments: argparse.Namespace, folder: Path, weights: Path, rows: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, Worker], dict[str, dict[str, str]]]:
    """Returns a worker of each side, and what sides cannot do; first steps go into the rows."""
    workers: dict[str, Worker] = {}
    cannot: dict[str, dict[str, str]] = {name: {} for name in rows}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for turn in range(arguments.starts):
        for name in rows:
            if name in workers:
                workers.pop(name).end()
            try:
                workers[name] = Worker(name, weights, folder / f"{turn}-{name}".replace(" ", "-"))
            except UnableError as why:
                cannot[name]["training"] = str(why)
                continue
            times[name].append(workers[name].first_step)
    losses = {}
    for name, worker in workers.items():
        if worker.first is None:  # it writes alone, and makes no step
            continue
        rows[name] |= {
            "first_step_seconds": measure.spread(times[name]),
            "first_loss": worker.first,
        }
        losses[name] = worker.first
    if not make_config(arguments).model.embedding.embedding_dropout:
        check_same(losses)
    return workers, cannot


def check_same(losses: Mapping[str, float]) -> None:
    """Checks that all sides compute the same.

    Raises:
        SystemExit: a loss differs from jaxformer's.
    """
    first = losses.get(JAXFORMER, next(iter(losses.values()), 0.0))
    for name, loss in losses.items():
        if not abs(loss - first) <= LARGEST_DIFFERENCE * first:
            sys.exit(f"{name} computes something else: a loss of {loss}, not {first}")


Workers = Mapping[str, Worker]
Cannot = Mapping[str, dict[str, str]]


def train(
    workers: Workers, rows: Mapping[str, Any], cannot: Cannot, steps: int, turns: int
) -> None:
    """Times training steps."""
    calls, before = {}, {}
    for name in _able(workers, cannot, "training", lambda w: w.ask("train", steps=steps)):
        calls[name] = functools.partial(workers[name].ask, "train", steps=steps)
        untimed = max(1, steps // 4)
        before[name] = functools.partial(workers[name].ask, "train", steps=untimed, goes_on=True)
    for name, found in measure.interleave(calls, turns, before=before).items():
        rows[name]["seconds_per_step"] = measure.scaled(found["seconds"], 1 / steps)
        rows[name]["peak_memory"] = workers[name].ask("memory")


def evaluate(
    workers: Workers, rows: Mapping[str, Any], cannot: Cannot, windows: int, turns: int
) -> None:
    """Times the scoring of windows by the first weights, and checks that all say the same."""
    losses: dict[str, float] = {}
    batches: dict[str, int] = {}

    def call(name: str, goes_on: bool = False) -> None:
        settings = {"windows": windows, "batch": batches[name], "goes_on": goes_on}
        losses[name] = workers[name].ask("evaluate", **settings)

    def first(worker: Worker) -> None:
        batches[worker.name] = worker.ask("reset", windows=windows)
        call(worker.name)

    calls = {
        name: functools.partial(call, name) for name in _able(workers, cannot, "evaluation", first)
    }
    before = {name: functools.partial(call, name, goes_on=True) for name in calls}
    for name, found in measure.interleave(calls, turns, before=before).items():
        rows[name] |= {
            "evaluation_seconds": found["seconds"],
            "evaluation_batch": batches[name],
            "loss": losses[name],
        }
    check_same(losses)


def generate(
    workers: Workers, rows: Mapping[str, Any], cannot: Cannot, config: TrainConfig, turns: int
) -> None:
    """Times the writing of one text, greedily, by the first weights."""
    length = config.model.context_length
    settings = {"length": min(length // 4, 64), "count": min(length // 2, 128)}
    texts: dict[str, list[list[int]]] = {}

    def call(name: str, goes_on: bool = False) -> None:
        texts[name] = workers[name].ask("write", goes_on=goes_on, **settings)

    able = _able(workers, cannot, "generation", lambda worker: call(worker.name))
    calls = {name: functools.partial(call, name) for name in able}
    before = {name: functools.partial(call, name, goes_on=True) for name in able}
    for name, found in measure.interleave(calls, turns, before=before).items():
        same = np.mean(np.array(texts[name]) == np.array(texts.get(JAXFORMER, texts[name])))
        rows[name] |= {
            "generation_seconds": found["seconds"],
            "generation_tokens_per_second": measure.rounded(
                settings["count"] / found["seconds"]["median"]
            ),
            "same_tokens": float(same),
        }


def _able(
    workers: Workers, cannot: Cannot, what: str, try_it: Callable[[Worker], Any]
) -> list[str]:
    """Returns who can do something; why the others cannot is noted."""
    able = []
    for name, worker in workers.items():
        if what in cannot[name]:
            continue
        try:
            try_it(worker)
        except UnableError as why:
            cannot[name][what] = str(why)
        else:
            able.append(name)
    return able


def work(arguments: argparse.Namespace, config: TrainConfig) -> None:
    """Is a side: makes a first step, then does what standard input asks for, a line each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    if arguments.worker == "weights":
        _draw_weights(arguments.weights, config)
        answers.write("{}\n")
        return

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    task = Task(config, sides.random_ids(config, 200_000), arguments.weights)
    last = len(task.ids) - config.model.context_length
    draw = np.random.default_rng(1).integers
    starts = draw(0, last, (200, config.batch_size), np.int32)
    scored = draw(0, last, max(WINDOWS.values()), np.int32)
    prompt = draw(0, config.model.vocab_size, (1, config.model.context_length))
    try:
        side = SIDES[arguments.worker](task)
        try:
            first = side.train(starts[:1])
        except UnableError:
            first = None
    except Exception as error:
        answer(cannot=_in_one_line(error))
        return
    answer(done=first)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer(done=_do(side, asked, starts, scored, prompt))
        except Exception as error:
            answer(cannot=_in_one_line(error))
        if not asked.get("goes_on"):
            # What it used last is not needed while the others have their turns.
            release_freed()


def _do(
    side: Side, asked: Mapping[str, Any], starts: np.ndarray, scored: np.ndarray, prompt: np.ndarray
) -> Any:
    if asked["what"] == "memory":
        return measure.peak_memory()
    if asked["what"] == "write":
        return side.write(prompt[:, : asked["length"]], asked["count"]).tolist()
    if asked["what"] == "reset":
        side.reset()
        return _fastest_batch(side, scored[: asked["windows"]])
    if asked["what"] == "evaluate":
        return side.evaluate(scored[: asked["windows"]].reshape(-1, asked["batch"]))
    return side.train(starts[: asked["steps"]])


def _fastest_batch(side: Side, scored: np.ndarray) -> int:
    """Returns how many windows at a time a side scores fastest."""
    fitting = [size for size in side.evaluation_batches if size <= len(scored)]
    if len(fitting) == 1:
        return fitting[0]
    calls = {
        str(size): functools.partial(side.evaluate, scored.reshape(-1, size)) for size in fitting
    }
    times = measure.interleave(calls, 2)
    return min(fitting, key=lambda size: times[str(size)]["seconds"]["min"])


def _in_one_line(error: Exception) -> str:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return said if isinstance(error, UnableError) else f"{type(error).__name__}: {said[:160]}"


def _draw_weights(path: Path, config: TrainConfig) -> None:
    from jaxformer.porting import export_arrays
    from jaxformer.training.initial_state import draw_parameters

    np.savez(path, **export_arrays(draw_parameters(config.model, config.seed)))


MEASURED = {
    "training step": "seconds_per_step",
    "evaluation": "evaluation_seconds",
    "generation": "generation_seconds",
    "first step": "first_step_seconds",
}


def _speedup(rows: Mapping[str, Any], field: str) -> dict[str, float]:
    """Returns how many times as long as jaxformer each side takes, by medians."""
    medians = {name: row[field]["median"] for name, row in rows.items() if field in row}
    first = medians.pop(JAXFORMER, None)
    return {} if first is None else {n: measure.rounded(m / first) for n, m in medians.items()}


def _add_rates(row: dict[str, Any], config: TrainConfig, windows: int) -> None:
    length = config.model.context_length
    counts = {"seconds_per_step": config.batch_size, "evaluation_seconds": windows}
    for field, count in counts.items():
        if field in row:
            name = f"{field.partition('_seconds')[0]}_tokens_per_second"
            name = "training_tokens_per_second" if field == "seconds_per_step" else name
            row[name] = measure.rounded(length * count / row[field]["median"])


def _rate(what: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: (
        f"{row[f'{what}_tokens_per_second']:,.0f}"
        if f"{what}_tokens_per_second" in row
        else "cannot"
    )


def _shown(field: str, show: Callable[[Any], str]) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: show(row[field]) if field in row else ""


COLUMNS = {
    "side": lambda row: row["side"],
    "training, tokens/s": _rate("training"),
    "evaluation, tokens/s": _rate("evaluation"),
    "writing, tokens/s": _rate("generation"),
    "first step": _shown("first_step_seconds", lambda t: f"{t['median']:.1f} s"),
    "memory": measure.most_memory,
    "loss": _shown("loss", lambda loss: f"{loss:.5f}"),
    "same text": _shown("same_tokens", lambda share: f"{share:.0%}"),
}

if __name__ == "__main__":
    measure.run(main)
