"""The rows of each call of the compiled steps: where they are, and how they get to the devices.

Ids that fit lie on the devices, and a call gets the places where windows begin. All else stays on
the disk, and a call gets the rows themselves: each process reads those of its own devices, in a
thread, while the call before computes. Folders that are too large to be compared with their hashes
before the run are compared beside it.
"""

import abc
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int

from jaxformer.char_data import window_starts
from jaxformer.data.token_folders import check_hashes
from jaxformer.distributed import processes
from jaxformer.sampling import Rows, draw_rows, epoch_starts
from jaxformer.token_data import TokenFolder
from jaxformer.training.config import TrainConfig
from jaxformer.training.experiment import Experiment
from jaxformer.training.parallel import Strategy


class HashCheck:
    """Compares folders with their hashes in a thread of the lowest priority, beside the steps.

    Args:
        folders: of tokens.
    """

    def __init__(self, folders: Sequence[TokenFolder]):
        self._is_closing = threading.Event()
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "hashes")
        self._done = self._thread.submit(self._compare, folders)

    def raise_if_damaged(self) -> None:
        """Raises what the thread has found by now.

        Raises:
            TextError: a file is damaged.
        """
        if self._done.done():
            self._done.result()

    def close(self) -> None:
        """Ends the thread, after the file that it reads."""
        self._is_closing.set()
        self._thread.shutdown()

    def _compare(self, folders: Sequence[TokenFolder]) -> None:
        # Linux gives each thread a priority of its own; elsewhere the thread keeps that of all.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        for folder in folders:
            check_hashes(folder, self._is_closing.is_set)


class Batches(abc.ABC):
    """Gives the rows of steps, which are a function of (seed, step).

    Args:
        config: of the run.
        check: finds damage in what the rows are read from.
    """

    def __init__(self, config: TrainConfig, check: HashCheck):
        self._config = config
        self._check = check

    @abc.abstractmethod
    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """Returns where the windows of a step begin, or which rows it has."""

    def take(self, step: int, count: int) -> tuple[Array | None, Any]:
        """Returns what ``Strategy.train`` takes for ``count`` steps from ``step`` on.

        Raises:
            TextError: what the rows are read from is damaged.
        """
        self._check.raise_if_damaged()
        return self._take(step, count)

    @abc.abstractmethod
    def _take(self, step: int, count: int) -> tuple[Array | None, Any]: ...

    def close(self) -> None:
        """Ends what runs beside the steps."""
        self._check.close()


class ResidentBatches(Batches):
    """Windows of ids that lie on the devices.

    Args:
        strategy: on whose devices they lie.
        config: of the run.
        check: see ``Batches``.
        ids: (C,).
    """

    def __init__(self, strategy: Strategy, config: TrainConfig, check: HashCheck, ids: np.ndarray):
        super().__init__(config, check)
        self._num_ids = len(ids)
        self._tokens = strategy.place_tokens(ids)

    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """See ``Batches``."""
        config = self._config
        if config.sampling == "epoch":
            return epoch_starts(config.seed, step, config.batch_size, self._num_ids, config.window)
        return window_starts(config.seed, step, config.batch_size, self._num_ids - config.window)

    def _take(self, step: int, count: int) -> tuple[Array, Int[np.ndarray, "n B"]]:
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
        check: see ``Batches``.
        rows: all of them.
    """

    def __init__(self, strategy: Strategy, config: TrainConfig, check: HashCheck, rows: Rows):
        super().__init__(config, check)
        self._strategy = strategy
        self._rows = rows
        self._reader = concurrent.futures.ThreadPoolExecutor(1, "windows")
        self._next: tuple[int, int, concurrent.futures.Future[Array]] | None = None

    def starts(self, step: int) -> Int[np.ndarray, "B"]:
        """See ``Batches``."""
        config = self._config
        return draw_rows(self._rows, config.sampling, config.seed, step, config.batch_size)

    def _take(self, step: int, count: int) -> tuple[None, Array]:
        """Also begins to read what the call after this one is likely to want."""
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
        super().close()
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
    check = HashCheck(experiment.unchecked_folders if processes.is_primary() else ())
    if ids is not None:
        return ResidentBatches(strategy, experiment.config, check, ids)
    assert rows is not None
    return StreamedBatches(strategy, experiment.config, check, rows)
