"""Times what saving costs a run: steps during a save, and steps without one, in turn.

    uv run --group test python benchmarks/checkpointing.py --preset baby

A turn with a save begins it as training does (all numbers are looked at, the state is copied off
the device), makes as many steps as a turn without one, and waits until the step is on the disk.
What it takes longer is the cost of a save: the time for which training is blocked, and what the
writing beside it takes from the steps. ``share_of_training`` sets it against the steps between two
saves.
"""

import functools
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import measure
import numpy as np
import sides

CPU_STEPS = {"nano": 100, "baby": 4}


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=9)
    sides.add_arguments(parser)
    parser.add_argument("--steps", type=int, help="in a turn; a save should end before them")
    parser.add_argument("--interval", type=int, default=100, help="steps between saves")
    parser.add_argument("--folder", type=Path, help="where to save; default a temporary folder")
    arguments = parser.parse_args()

    config = sides.make_config(arguments)
    steps = arguments.steps or (100 if measure.on_gpu() else CPU_STEPS.get(arguments.preset, 2))
    ids = sides.random_ids(config, 200_000)
    last = len(ids) - config.model.context_length
    starts = np.random.default_rng(1).integers(0, last, (steps, config.batch_size), np.int32)
    side = sides.Jaxformer(config, ids)
    folder = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=arguments.folder))
    saver = Saver(side, folder)

    def train() -> None:
        # Calls as short as those of training, between which a signal is heard.
        for start in np.array_split(starts, max(1, steps // 10)):
            side.train(start)

    def train_and_save() -> None:
        saver.save()
        train()
        saver.checkpoints.wait()

    try:
        calls = {"without": train, "with a save": train_and_save}
        times = measure.interleave(calls, arguments.turns, warm_up=2)
        size = saver.size()
    finally:
        saver.checkpoints.settle()
        shutil.rmtree(folder, ignore_errors=True)
    step = times["without"]["seconds"]["median"] / steps
    cost = times["with a save"]["seconds"]["median"] - times["without"]["seconds"]["median"]
    row = {
        "preset": arguments.preset,
        "seconds_per_step": measure.rounded(step),
        "blocking_seconds": measure.spread(saver.blocking[-arguments.turns :]),
        "seconds_until_durable": measure.spread(saver.durable[-arguments.turns :]),
        "cost_seconds": measure.rounded(cost),
        "share_of_training": measure.rounded(cost / (arguments.interval * step)),
        "bytes": size,
        "turns": {name: found["seconds"] for name, found in times.items()},
    }
    measure.write(
        "checkpointing", arguments, [row], COLUMNS,
        batch_size=config.batch_size, steps_per_turn=steps, interval=arguments.interval,
    )  # fmt: skip


class Saver:
    """Saves a side's state as training does, and records how long each part takes.

    Attributes:
        blocking: seconds for which training was held up, by save.
        durable: seconds from its beginning until the step counts, by save.
    """

    def __init__(self, side: sides.Jaxformer, folder: Path):
        from jaxformer.checkpoints import CheckpointFolder

        self.side = side
        self.checkpoints = CheckpointFolder(folder / "checkpoints")
        self.step = 0
        self.blocking: list[float] = []
        self.durable: list[float] = []

    def save(self) -> None:
        """Begins a save, as ``training.loop`` does."""
        from jaxformer.training.divergence import all_finite

        self.step += 1
        parallel, state = self.side.parallel, self.side.state
        about: dict[str, Any] = {"config": {}, "vocabulary": "", "corpus": None, "val_loss": None}
        begin = time.perf_counter()
        if not all_finite(state):
            raise ValueError("the state is not finite")
        self.checkpoints.save(self.step, parallel.state_arrays(state), about, keep=2)
        self.blocking.append(time.perf_counter() - begin)
        watch = functools.partial(self._watch, self.checkpoints.folder / str(self.step), begin)
        threading.Thread(target=watch, daemon=True).start()

    def size(self) -> int:
        """The bytes of the newest step on the disk."""
        newest = self.checkpoints.folder / str(self.step)
        return sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())

    def _watch(self, target: Path, begin: float) -> None:
        while not target.exists():
            time.sleep(0.005)
        self.durable.append(time.perf_counter() - begin)


COLUMNS = {
    "preset": lambda row: row["preset"],
    "step": lambda row: f"{1000 * row['seconds_per_step']:.4g} ms",
    "blocked": lambda row: measure.milliseconds(row["blocking_seconds"]),
    "durable after": lambda row: measure.milliseconds(row["seconds_until_durable"]),
    "cost": lambda row: f"{1000 * row['cost_seconds']:.4g} ms",
    "of training": lambda row: f"{row['share_of_training']:.2%}",
    "size": lambda row: f"{row['bytes'] / 1e6:.1f} MB",
}

if __name__ == "__main__":
    measure.run(main)
