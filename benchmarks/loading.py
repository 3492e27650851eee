"""Times the reading of batches from a folder of tokens: jaxformer's own thread, and Grain, in turn.

    uv run --group test --with grain python benchmarks/loading.py --gigabytes 2

A folder of random ids is written to a temporary folder, which is removed. Every side gives windows
of the same folder in epochs, shuffled, ready for the devices but not placed on them. jaxformer's
side is the class that ``train`` uses, with its one thread; Grain reads the same windows by its
``MapDataset``, on its own, in one thread and in four.
"""

import importlib.metadata
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import measure
import numpy as np
from token_folders import write_folder


def main() -> None:
    """Measures, and writes the result."""
    parser = measure.parser(__doc__, turns=15)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=12)
    parser.add_argument("--calls-of", type=int, default=100, help="steps that are read at a time")
    parser.add_argument("--calls", type=int, default=20, help="of so many steps, in one turn")
    parser.add_argument("--folder", type=Path, help="where the temporary folder is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        path = Path(name)
        tokens = write_folder(path, int(arguments.gigabytes * 1e9) // 2)
        times = measure.interleave(sides(arguments, path), arguments.turns)
    windows = arguments.batch_size * arguments.calls_of * arguments.calls
    results = [
        {
            "side": name,
            **found,
            "windows_per_second": measure.rounded(windows / found["seconds"]["median"]),
        }
        for name, found in times.items()
    ]
    measure.write(
        "loading", arguments, results, COLUMNS,
        tokens=tokens, grain=importlib.metadata.version("grain"),
    )  # fmt: skip


def sides(arguments: Any, path: Path) -> dict[str, Any]:
    """Returns what each side does in a turn: it begins, reads its batches, and ends.

    So nothing is read ahead while another side has its turn.
    """
    import grain

    from jaxformer.token_data import TokenFolder, TokenWindows
    from jaxformer.training.batches import StreamedBatches

    length, batch, steps = arguments.block_size, arguments.batch_size, arguments.calls_of
    config: Any = SimpleNamespace(
        sampling="epoch", seed=1337, batch_size=batch, window=length, steps_per_call=steps
    )
    rows = TokenWindows(TokenFolder(path).train, length)
    strategy: Any = Unplaced(batch, length)
    turn = 0

    def read_streamed() -> None:
        nonlocal turn
        turn += 1
        streamed = StreamedBatches(strategy, config, rows)
        first = turn * arguments.calls * steps
        for call in range(arguments.calls):
            _, windows = streamed.take(first + call * steps, steps)
            assert windows.shape == (steps, batch, length + 1)
        streamed.close()

    def read_grain(threads: int) -> Any:
        source = Windows(path, length)
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * steps)

        def read() -> None:
            dataset = grain.MapDataset.source(source).shuffle(seed=turn).repeat()
            batches = iter(dataset.batch(batch).to_iter_dataset(options))
            for _ in range(arguments.calls):
                windows = np.stack([next(batches) for _ in range(steps)])
                assert windows.shape == (steps, batch, length + 1)

        return read

    return {
        "jaxformer, 1 thread": read_streamed,
        "grain, 1 thread": read_grain(1),
        "grain, 4 threads": read_grain(4),
    }


class Unplaced:
    """Stands for a strategy; its windows stay where they were read."""

    def __init__(self, batch: int, length: int):
        self.spec = SimpleNamespace(row="ids", row_length=length + 1)
        self._rows = np.arange(batch)

    def place_windows(self, read: Any, steps: int) -> np.ndarray:
        """Returns the windows of a call."""
        windows: np.ndarray = read(self._rows)
        return windows


class Windows:
    """The windows of an epoch, as Grain takes them."""

    def __init__(self, path: Path, length: int):
        from jaxformer.token_data import TokenFolder

        self._split = TokenFolder(path).train
        self._length = length

    def __len__(self) -> int:
        """Returns how many there are."""
        return (len(self._split) - 1) // self._length

    def __getitem__(self, index: int) -> np.ndarray:
        """Returns one, int32 (T+1,)."""
        return self._split.read(index * self._length, self._length + 1)


COLUMNS = {
    "side": lambda row: row["side"],
    "ms a turn": lambda row: f"{1000 * row['seconds']['median']:.1f}",
    "at least": lambda row: f"{1000 * row['seconds']['min']:.1f}",
    "windows/s": lambda row: f"{row['windows_per_second']:,.0f}",
}

if __name__ == "__main__":
    measure.run(main)
