"""Times training steps on tokens from the disk and on the devices in turn, and their memory.

    uv run --group test python benchmarks/token_folders.py --preset nano --gigabytes 10

A folder of random ids is written to a temporary folder, which is removed. Both sides run the step
that ``train`` runs, in calls of ``--calls-of`` steps, and read their windows as it does; those on
the devices are drawn from the beginning of the same ids.
"""

import hashlib
import json
import tempfile
from pathlib import Path

import measure
import numpy as np

RESIDENT = 1 << 24
SHARD = 1 << 26


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=15)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--calls-of", type=int, default=10, help="steps of one call")
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        path = Path(name)
        tokens = write_folder(path, int(arguments.gigabytes * 1e9) // 2)
        results, memory = time_steps(arguments, path)
    ratio = results[0]["seconds"]["median"] / results[1]["seconds"]["median"]
    measure.write(
        "token_folders", arguments, results, COLUMNS,
        tokens=tokens, disk_over_devices=measure.rounded(ratio), memory=memory,
    )  # fmt: skip


def write_folder(path: Path, tokens: int) -> int:
    """Writes shards of random ids of a vocabulary of 65; returns how many ids there are."""
    block = np.random.default_rng(0).integers(0, 65, SHARD, dtype=np.uint16)
    shards = []
    for number in range(max(1, -(-tokens // SHARD))):
        # No two shards are the same, or a disk may keep one of them.
        block[:8] = np.arange(number, number + 8) % 65
        ids = block[: min(SHARD, tokens - number * SHARD)]
        file = f"train-{number:05}.bin"
        ids.tofile(path / file)
        digest = hashlib.sha256(ids).hexdigest() if number == 0 else ""
        shards.append({"file": file, "tokens": len(ids), "sha256": digest})
    block[:100_000].tofile(path / "val-00000.bin")
    splits = {
        "train": {"shards": shards},
        "val": {"shards": [{"file": "val-00000.bin", "tokens": 100_000, "sha256": ""}]},
    }
    index = {"format": "jaxformer-tokens", "version": 1, "dtype": "uint16", "vocab_size": 65}
    (path / "index.json").write_text(json.dumps({**index, "splits": splits}))
    return tokens


def time_steps(arguments, path: Path) -> tuple[list[dict], dict[str, int]]:
    """Times calls of both sides in turn; returns rows, and what reading from the disk added."""
    import dataclasses

    from jaxformer.data.token_folders import open_tokens
    from jaxformer.training.batches import ResidentBatches, StreamedBatches
    from jaxformer.training.experiment import Experiment
    from jaxformer.training.initial_state import plan_parameters
    from jaxformer.training.parallel import StepSpec, make_strategy
    from jaxformer.training.parallel.devices import choose_devices
    from jaxformer.training.presets import PRESETS

    config = PRESETS[arguments.preset]()
    config = dataclasses.replace(
        config,
        data=str(path),
        steps_per_call=arguments.calls_of,
        batch_size=arguments.batch_size or config.batch_size,
        resident_tokens=1,
    )
    experiment = Experiment.prepare(config, open_tokens(path))
    config, split = experiment.config, experiment.train_rows.split
    strategy = make_strategy(config, StepSpec.from_config(config), choose_devices(config))
    state = strategy.initial_state(plan_parameters(config.model, config.seed))
    ids = split.read(0, min(len(split), RESIDENT))
    resident = ResidentBatches(strategy, config, ids)
    del ids
    streamed = StreamedBatches(strategy, config, experiment.train_rows)
    step = {"disk": 0, "devices": 0}

    def call(side: str, batches) -> None:
        nonlocal state
        windows = batches.take(step[side], arguments.calls_of)
        state, _ = strategy.train(state, *windows, arguments.calls_of)
        step[side] += arguments.calls_of

    call("devices", resident)
    call("disk", streamed)
    before = resident_bytes()
    calls = {"disk": lambda: call("disk", streamed), "devices": lambda: call("devices", resident)}
    times = measure.interleave(calls, arguments.turns)
    memory = {"before": before, "added": resident_bytes() - before}
    streamed.close()
    tokens = config.batch_size * config.window * arguments.calls_of
    return [
        {
            "side": name,
            **found,
            "tokens_per_second": measure.rounded(tokens / found["seconds"]["median"]),
        }
        for name, found in times.items()
    ], memory


def resident_bytes() -> int:
    """Returns the memory that this process has now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(x.split()[1]) * 1024 for x in lines if x.startswith("VmRSS:"))


COLUMNS = {
    "ids": lambda row: row["side"],
    "ms a call": lambda row: f"{1000 * row['seconds']['median']:.2f}",
    "at least": lambda row: f"{1000 * row['seconds']['min']:.2f}",
    "tokens/s": lambda row: f"{row['tokens_per_second']:,.0f}",
}

if __name__ == "__main__":
    measure.run(main)
