"""Times how long each side trains until its validation loss reaches a target.

    uv run --group test python benchmarks/time_to_loss.py --preset nano --target 1.85

The same weights, windows and schedule on tiny-shakespeare, in one process; the sides take turns of
``--interval`` steps, and each leaves when an evaluation after its turn reaches the target, or when
the preset's steps are made. Only training is timed: neither evaluations, which go over the whole
validation split, nor compiling, which is stated beside it. Both make the preset's
``steps_per_call`` steps before a loss is read. A preset without a target makes all steps.
Each of ``--turns`` has a seed of its own, for weights, windows and dropout, as the number of steps
is a matter of chance. Shown is the turn whose training time is the median; all are in the result,
which is written after each turn, and when an interrupt (Ctrl-C) ends one.
"""

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import measure
import numpy as np
import sides

TARGETS = {"nano": 1.85, "baby": 1.47}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=1)
    sides.add_arguments(parser)
    parser.add_argument("--data", default="tiny-shakespeare", help="a corpus or a text file")
    parser.add_argument("--target", type=float, help="nats per token; of nano 1.85, baby 1.47")
    parser.add_argument("--interval", type=int, default=100, help="steps between evaluations")
    parser.add_argument("--steps", type=int, help="at most; default the preset's, of its schedule")
    arguments = parser.parse_args()

    from jaxformer.char_data import CharTokenizer, train_validation_split
    from jaxformer.data.corpora import load_corpus
    from jaxformer.training.presets import PRESETS

    if arguments.batch_size is None:
        # A smaller batch is another recipe, which does not reach the target.
        arguments.batch_size = PRESETS[arguments.preset]().batch_size
    text = load_corpus(arguments.data).text
    tokenizer = CharTokenizer.train_from_text(text)
    config = sides.make_config(arguments, tokenizer.vocabulary_size())
    train_ids, validation_ids = train_validation_split(
        tokenizer.encode(text), config.model.context_length
    )
    target = arguments.target or TARGETS.get(arguments.preset, 0.0)
    steps = min(config.steps, arguments.steps or config.steps)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in sides.side_names(arguments)}
    for turn in range(arguments.turns):
        seeded = dataclasses.replace(config, seed=config.seed + turn)
        racers = [Racer(name, seeded, train_ids, validation_ids) for name in turns]
        try:
            while running := [r for r in racers if not r.arrived(target) and r.step < steps]:
                for racer in running:
                    racer.go(min(arguments.interval, steps - racer.step))
                    print(racer, file=sys.stderr, flush=True)
        finally:
            for racer in racers:
                turns[racer.name].append(racer.row(target))
            results = [summarize(rows) for rows in turns.values()]
            measure.write("time_to_loss", arguments, results, COLUMNS, target=target)


class Racer:
    """One side on its way to the target."""

    def __init__(self, name: str, config: Any, ids: np.ndarray, validation_ids: np.ndarray):
        from jaxformer.char_data import evaluation_windows

        self.name, self.config, self.ids = name, config, ids
        self.side = sides.make_side(name, config, ids)
        self.step, self.seconds, self.losses = 0, 0.0, [np.inf]
        self.windows = evaluation_windows(len(validation_ids), config.model.context_length)
        self.validation = (
            self.side.parallel.place_tokens(validation_ids)
            if isinstance(self.side, sides.Jaxformer)
            else validation_ids
        )
        prepared = self.side.prepare(self._starts(config.steps_per_call))
        self.compile_seconds = measure.seconds_of(lambda: self.side.compile(prepared))

    def _starts(self, count: int) -> np.ndarray:
        """Where the windows of the next steps begin, as ``train.py`` draws them."""
        from jaxformer.char_data import window_starts

        windows = len(self.ids) - self.config.model.context_length
        seed, batch_size = self.config.seed, self.config.batch_size
        steps = range(self.step, self.step + count)
        return np.stack([window_starts(seed, step, batch_size, windows) for step in steps])

    def arrived(self, target: float) -> bool:
        """Whether the last evaluation was at the target."""
        return self.losses[-1] <= target

    def go(self, steps: int) -> None:
        """Makes steps, and evaluates."""
        end = self.step + steps
        while self.step < end:
            count = min(self.config.steps_per_call, end - self.step)
            # Always as many, which is what was compiled for.
            prepared = self.side.prepare(self._starts(self.config.steps_per_call))
            begin = time.perf_counter()
            self.side.train(prepared, count)
            self.seconds += time.perf_counter() - begin
            self.step += count
        self.losses.append(self.side.evaluate(self.validation, self.windows))

    def __str__(self) -> str:
        return f"{self.name}: step {self.step}, {self.losses[-1]:.4f}, {self.seconds:.1f} s"

    def row(self, target: float) -> dict[str, Any]:
        """What it took."""
        return {
            "side": self.name,
            "seed": self.config.seed,
            "seconds": measure.rounded(self.seconds),
            "compile_seconds": measure.rounded(self.compile_seconds),
            "steps": self.step,
            "arrived": self.arrived(target),
            "best_validation_loss": round(min(self.losses), 4),
            "validation_losses": [round(loss, 4) for loss in self.losses[1:]],
        }


def summarize(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the row of the turn that took the median time, with the others in ``turns``.

    A side has arrived if it did so in every turn.
    """
    ordered = sorted(turns, key=lambda row: row["seconds"])
    # Of an even number the longer one of the two in the middle.
    median = ordered[len(ordered) // 2]
    return {**median, "arrived": all(row["arrived"] for row in turns), "turns": list(turns)}


def _loss(row: Mapping[str, Any]) -> str:
    losses = row["validation_losses"] or [float("nan")]
    return f"{losses[-1]:.4f}" + ("" if row["arrived"] else " (not there)")


def _seconds(row: Mapping[str, Any]) -> str:
    shown, turns = f"{row['seconds']:.1f} s", [turn["seconds"] for turn in row.get("turns", [])]
    if len(turns) < 2:
        return shown
    return f"{shown} ({min(turns):.1f} to {max(turns):.1f} with {len(turns)} seeds)"


COLUMNS = {
    "side": lambda row: row["side"],
    "training": _seconds,
    "compiling": lambda row: f"{row['compile_seconds']:.1f} s",
    "steps": lambda row: str(row["steps"]),
    "validation loss": _loss,
}

if __name__ == "__main__":
    measure.run(main)
