"""Times a training step and a text of a ported T5 and a ported Mixtral beside transformers.

    uv run --group test python benchmarks/families.py

Both sides have the same random weights and take the same random ids: transformers builds the
model, ``jaxformer.from_torch`` ports it. A step is a forward and a backward pass, clipping at a
norm of 1 and AdamW, fused in torch, whose passes are run as they are and under ``torch.compile``.
Dropout is off, as Mixtral has none. jaxformer makes its steps as ``train.py`` does. Texts are
greedy and written with a cache, transformers' by its own ``generate``. Right before each timed
turn a side makes one step, or its texts, untimed: XLA takes memory for temporary arrays anew in
each call, and while the others had their turns the machine took back what it had. Peak memory is
that of a process that knows only one side, and so reads the weights from a folder and imports
nothing of the other: ten steps, or the texts of one call.
"""

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import measure
import numpy as np
import sides

STEP, TEXT = "training step", "text"
TRANSFORMERS, COMPILED = "transformers", "transformers compiled"
STEPS_IN_A_PROCESS = 10
# t5-small's own geometry; Mixtral's ratios, with a tenth of its width.
T5 = {
    "vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6,
    "num_heads": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0,
}  # fmt: skip
MIXTRAL = {
    "vocab_size": 8_000, "hidden_size": 384, "intermediate_size": 1344, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 1024, "output_router_logits": True,
    "router_aux_loss_coef": 0.02, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# The rows of a step, the tokens of a source (of T5 alone), and those of a row or a target.
SHAPES = {"t5": (8, 128, 32), "mixtral": (4, 0, 256)}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=7)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 16], help="written at a time")
    parser.add_argument("--tokens", type=int, default=64, help="to write")
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--no-memory", action="store_true", help="leave peak memory out")
    parser.add_argument("--only", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    if arguments.only is not None:
        model, folder, kind, name, rows = arguments.only
        run_once(Family(model, folder, name), kind, name, int(rows), arguments.tokens)
        print(json.dumps(measure.peak_memory()))
        return
    results: list[dict[str, Any]] = []
    speedups: dict[str, Any] = {}
    for model in arguments.models:
        family = Family(model)
        rows = time_steps(family, arguments)
        for count in arguments.texts:
            rows += time_texts(family, count, arguments)
        if not arguments.no_memory:
            with tempfile.TemporaryDirectory() as folder:
                family.reference.save_pretrained(folder)
                for row in rows:
                    only = [model, folder, row["kind"], row["side"], str(row["rows"])]
                    row["peak_memory"] = measure.child([__file__, *sys.argv[1:], "--only", *only])
        speedups[model] = speedups_of(rows)
        results += rows
    measure.write("families", arguments, results, COLUMNS, shapes=SHAPES, speedup=speedups)


class Family:
    """A model of transformers, the same ported, and random ids.

    Args:
        name: t5 or mixtral.
        folder: where transformers has written the model; None makes a new one.
        side: the one side to read from the folder.

    Attributes:
        rows: of a step.
        reference: of transformers, if this side was asked for.
        candidate: of jaxformer, likewise.
    """

    def __init__(self, name: str, folder: str | None = None, side: str | None = None):
        self.name = name
        self.rows, self.source_length, self.length = SHAPES[name]
        self.vocabulary = (T5 if name == "t5" else MIXTRAL)["vocab_size"]
        self.reference: Any = None
        self.candidate: Any = None
        if folder is not None and side == sides.JAXFORMER:
            import jaxformer

            self.candidate = jaxformer.load(folder).module
            return
        self.reference = _reference(name, folder)
        if folder is None:
            from jaxformer.porting import from_torch

            self.candidate = from_torch(self.reference)

    def ids(self, seed: int, *shape: int) -> np.ndarray:
        """Returns random ids, int32; 0 is T5's padding, and 1 its end of a text."""
        drawn = np.random.default_rng(seed).integers(2, self.vocabulary, shape)
        return drawn.astype(np.int32)

    def batch(self) -> tuple[np.ndarray, ...]:
        """Returns a step's ids: sources (B, S) and targets (B, T), or rows (B, T + 1)."""
        if self.source_length:
            return self.ids(1, self.rows, self.source_length), self.ids(2, self.rows, self.length)
        return (self.ids(1, self.rows, self.length + 1),)


def _reference(name: str, folder: str | None) -> Any:
    """The model of transformers, read from a folder or with random weights."""
    import torch
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    kind: Any = T5ForConditionalGeneration if name == "t5" else MixtralForCausalLM
    if folder is not None:
        return kind.from_pretrained(folder)
    torch.manual_seed(0)
    return kind(T5Config(**T5) if name == "t5" else MixtralConfig(**MIXTRAL))


def time_steps(family: Family, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each side: the time of a step, and the loss of the last one."""
    losses: dict[str, float] = {}
    calls: dict[str, Callable[[], None]] = {}
    before: dict[str, Callable[[], Any]] = {}
    for name in (sides.JAXFORMER, TRANSFORMERS, COMPILED):
        step = make_step(family, name)

        def call(name: str = name, step: Callable[[int], float] = step) -> None:
            losses[name] = step(arguments.steps)

        calls[name], before[name] = call, functools.partial(step, 1)
    times = measure.interleave(calls, arguments.turns, warm_up=2, before=before)
    return [
        {
            "model": family.name,
            "kind": STEP,
            "side": name,
            "rows": family.rows,
            "seconds": measure.scaled(found["seconds"], 1 / arguments.steps),
            "first_call": found["first_call"],
            "last_loss": losses[name],
        }
        for name, found in times.items()
    ]


def make_step(family: Family, name: str) -> Callable[[int], float]:
    """Returns a function that makes so many steps and returns the loss of the last one."""
    return _jax_step(family) if name == sides.JAXFORMER else _torch_step(family, name == COMPILED)


def _jax_step(family: Family) -> Callable[[int], float]:
    import jax

    from jaxformer.config import OptimizerConfig
    from jaxformer.parameters import split
    from jaxformer.train_step import TrainState
    from jaxformer.training.parallel import PmapStrategy, StepSpec
    from jaxformer.training.product_choice import fastest_library

    config = family.candidate.config
    definition, parameters = split(family.candidate)
    shapes = jax.eval_shape(lambda: parameters)
    if family.reference is None:
        family.candidate = None  # nothing else is done in this process
    optimizer = OptimizerConfig(
        learning_rate=1e-4, min_learning_rate=1e-4, warmup_steps=0, decay_steps=1_000_000
    )
    batch = family.batch()
    devices = jax.local_devices()[:1]
    # As a run chooses them.
    shape = family.rows * family.length, config.d_model, config.feed_forward_width
    spec = StepSpec(
        definition=definition, shapes=shapes, optimizer=optimizer, seed=0,
        batch_size=family.rows, context_length=family.length, uses_dropout=False,
        row="pairs" if family.source_length else "ids", source_length=family.source_length,
        products=fastest_library(*shape, devices),
    )  # fmt: skip
    parallel = PmapStrategy(spec, devices)
    # Copies, as steps write over their state.
    state = parallel.place(TrainState.create(jax.tree.map(np.asarray, parameters), optimizer))
    del parameters
    if family.source_length:
        sources, targets = batch
        inputs = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
        rows = np.concatenate((inputs, targets, sources), axis=1)
    else:
        (rows,) = batch

    def step(count: int) -> float:
        nonlocal state
        placed = parallel.place_windows(lambda chosen: np.stack([rows[chosen]] * count), count)
        state, history = parallel.train(state, None, placed, count)
        return float(history["train_loss"][-1])

    return step


def _torch_step(family: Family, is_compiled: bool) -> Callable[[int], float]:
    import copy

    import torch

    # Steps write over their model; texts are written by the one before them.
    model = family.reference if family.candidate is None else copy.deepcopy(family.reference)
    model = model.train()
    batch = [torch.from_numpy(ids).long() for ids in family.batch()]
    if family.source_length:
        given = {"input_ids": batch[0], "labels": batch[1]}
    else:
        # ``labels`` are shifted inside: of T + 1 ids, T targets.
        given = {"input_ids": batch[0], "labels": batch[0]}
    forward = torch.compile(model) if is_compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = forward(**given).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return float(loss.detach())

    return step


def time_texts(family: Family, count: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each side: the time of texts, and how many of their tokens are equal."""
    texts: dict[str, np.ndarray] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name in (sides.JAXFORMER, TRANSFORMERS):
        write = make_writer(family, name, count)

        def call(name: str = name, write: Callable[[int], np.ndarray] = write) -> None:
            texts[name] = write(arguments.tokens)

        calls[name] = call
    times = measure.interleave(calls, arguments.turns, before=calls)
    return [
        {
            "model": family.name,
            "kind": TEXT,
            "side": name,
            "rows": count,
            "seconds": found["seconds"],
            "first_call": found["first_call"],
            "tokens_per_second": measure.rounded(
                count * arguments.tokens / found["seconds"]["median"]
            ),
            "same_tokens": float(np.mean(texts[name] == texts[sides.JAXFORMER])),
        }
        for name, found in times.items()
    ]


def make_writer(family: Family, name: str, count: int) -> Callable[[int], np.ndarray]:
    """Returns a function from a number of tokens to those tokens, (texts, tokens)."""
    prompt = family.ids(3, count, 32)
    if name == sides.JAXFORMER:
        from jaxformer.generation import generate
        from jaxformer.sequence_generation import generate_target

        if family.source_length:
            start = np.zeros((count, 1), np.int32)
            return lambda tokens: generate_target(
                family.candidate, prompt, tokens, start_BT=start, greedy=True
            )
        return lambda tokens: generate(family.candidate, prompt, tokens, greedy=True)

    import torch

    ids = torch.from_numpy(prompt).long()
    model = family.reference.eval()
    asked = {"do_sample": False, "use_cache": True, "eos_token_id": None, "pad_token_id": 0}

    def write(tokens: int) -> np.ndarray:
        with torch.inference_mode():
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, **asked
            )
        return np.asarray(found[:, -tokens:])

    return write


def run_once(family: Family, kind: str, name: str, rows: int, tokens: int) -> None:
    """Makes some steps, or writes so many texts, on one side."""
    if kind == STEP:
        make_step(family, name)(STEPS_IN_A_PROCESS)
    else:
        make_writer(family, name, rows)(tokens)


def speedups_of(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns how many times as long as jaxformer each side takes, by what is done."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        what = f"{row['kind']}, {row['rows']} rows"
        own = next(
            r
            for r in rows
            if (r["kind"], r["rows"], r["side"]) == (row["kind"], row["rows"], sides.JAXFORMER)
        )
        if row is not own:
            ratio = row["seconds"]["median"] / own["seconds"]["median"]
            found.setdefault(what, {})[row["side"]] = measure.rounded(ratio)
    return found


def _agreement(row: Mapping[str, Any]) -> str:
    if row["kind"] == STEP:
        return f"loss {row['last_loss']:.4f}"
    return f"{row['same_tokens']:.0%} of the tokens"


COLUMNS = {
    "model": lambda row: row["model"],
    "what": lambda row: f"{row['kind']}, {row['rows']} rows",
    "side": lambda row: row["side"],
    "time": lambda row: measure.milliseconds(row["seconds"]),
    "memory": lambda row: measure.most_memory(row) if "peak_memory" in row else "",
    "agreement": _agreement,
}

if __name__ == "__main__":
    measure.run(main)
