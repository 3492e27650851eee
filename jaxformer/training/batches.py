"""The rows of each call of the compiled steps: where they are, and how they get to the devices.

Ids that fit lie on the devices, and a call gets the places where windows begin. All else stays on
the disk, and a call gets the rows themselves: each process reads those of its own devices, in a
thread, while the call before computes.
"""

import abc
import concurrent.futures
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jaxformer.char_data import window_starts
from jaxformer.sampling import Rows, draw_rows, epoch_starts
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import Strategy


class Batches(abc.ABC):
    """Gives the rows of steps, which are a function of (seed, step).

    Args:
        config: of the run.
    """

    def __init__(self, config: TrainConfig):
        self._config = config

    @abc.abstractmethod
    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """Returns where the windows of a step begin, or which rows it has."""

    @abc.abstractmethod
    def take(self, step: int, count: int) -> tuple[Array | None, Any]:
        """Returns what ``Strategy.train`` takes for ``count`` steps from ``step`` on."""

    def close(self) -> None:  # noqa: B027 (there may be nothing)
        """Ends what runs beside the steps."""


class ResidentBatches(Batches):
    """Windows of ids that lie on the devices.

    Args:
        strategy: on whose devices they lie.
        config: of the run.
        ids: (C,).
    """

    def __init__(self, strategy: Strategy, config: TrainConfig, ids: np.ndarray):
        super().__init__(config)
        self._num_ids = len(ids)
        self._tokens = strategy.place_tokens(ids)

    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """See ``Batches``."""
        config = self._config
        if config.sampling == "epoch":
            return epoch_starts(config.seed, step, config.batch_size, self._num_ids, config.window)
        return window_starts(config.seed, step, config.batch_size, self._num_ids - config.window)

    def take(self, step: int, count: int) -> tuple[Array, Int[np.ndarray, "n B"]]:
        """See ``Batches``."""
        config = self._config
        starts = np.zeros((config.steps_per_call, config.batch_size), np.int32)
        for i in range(count):
            starts[i] = self.starts(step + i)
        return self._tokens, starts


class StreamedBatches(Batches):
    """Rows that stay on the disk.

    Args:
        strategy: on whose devices rows are placed.
        config: of the run.
        rows: all of them.
    """

    def __init__(self, strategy: Strategy, config: TrainConfig, rows: Rows):
        super().__init__(config)
        self._strategy = strategy
        self._rows = rows
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "windows")
        self._next: tuple[int, int, concurrent.futures.Future[Array]] | None = None

    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """See ``Batches``."""
        config = self._config
        return draw_rows(self._rows, config.sampling, config.seed, step, config.batch_size)

    def take(self, step: int, count: int) -> tuple[None, Array]:
        """See ``Batches``; begins to read what the call after this one is likely to want."""
        following = self._next
        if following is not None and following[0] == step and following[1] >= count:
            placed = following[2].result()
        else:
            placed = self._read(step, count)
        if count:
            after = (step + count, count)
            self._next = (*after, self._reader.submit(self._read, *after))
        return None, placed

    def close(self) -> None:
        """See ``Batches``."""
        self._reader.shutdown(cancel_futures=True)

    def _read(self, step: int, count: int) -> Array:
        spec = self._strategy.spec
        starts = [self.starts(step + i) for i in range(count)]

        def read_rows(rows: Int[np.ndarray, "R"]) -> Int[np.ndarray, "n R _"]:
            shape = (self._config.steps_per_call, len(rows), spec.row_length)
            found = np.zeros(shape, np.int32)
            for i in range(count):
                for place, row in enumerate(rows):
                    arrays = self._rows[int(starts[i][row])]
                    if spec.row == "ids":
                        # Targets are the inputs' successors: only the last of them is new.
                        arrays = (arrays[0], arrays[1][-1:])
                    found[i, place] = np.concatenate(arrays)
            return found

        return self._strategy.place_windows(read_rows, self._config.steps_per_call)


def make_batches(experiment: Experiment, strategy: Strategy) -> Batches:
    """Returns the batches of a run."""
    ids, rows = experiment.train_ids, experiment.train_rows
    if ids is not None:
        return ResidentBatches(strategy, experiment.config, ids)
    assert rows is not None
    return StreamedBatches(strategy, experiment.config, rows)
