"""Shares work on large arrays among the cores: numpy computes with one, and waits for memory."""

import functools
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from jaxformer.execution.cores import count_cores

T = TypeVar("T")

# Of fewer numbers a share is computed sooner than a thread begins.
FEWEST = 1 << 18


def share(count: int, size: int, work: Callable[[slice], T]) -> list[T]:
    """Calls a function with ranges that make up a whole, each on a core of its own.

    Args:
        count: how many rows there are.
        size: how many numbers they have.
        work: computes what a range of rows gives; numpy lets others compute meanwhile.

    Returns:
        what each range gave, in order.
    """
    parts = min(count_cores(), count, size // FEWEST)
    # What computes a share already may not wait for others of its kind.
    if parts < 2 or getattr(_thread, "has_share", False):
        return [work(slice(0, count))]
    ends = [count * n // parts for n in range(parts + 1)]
    first, *others = (slice(*pair) for pair in itertools.pairwise(ends))
    waiting = [_pool().submit(work, part) for part in others]
    return [work(first), *(one.result() for one in waiting)]


def copy_to(target: np.ndarray, source: np.ndarray) -> None:
    """Copies numbers into an array of the same shape, cast to its dtype."""

    def copy(rows: slice) -> None:
        np.copyto(target[rows], source[rows], casting="unsafe")

    if target.ndim:
        share(len(target), target.size, copy)
    else:
        target[...] = source


def widened(array: np.ndarray) -> np.ndarray:
    """Returns a copy of an array of real numbers in float64, laid out as the array."""
    if array.size < 2 * FEWEST:
        return array.astype(np.float64)
    made = np.empty_like(array, np.float64)
    copy_to(made, array)
    return made


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(
        count_cores() - 1,
        thread_name_prefix="jaxformer-parity",
        initializer=lambda: setattr(_thread, "has_share", True),
    )


_thread = threading.local()


if hasattr(os, "register_at_fork"):
    # A forked process has the pool, but none of its threads.
    os.register_at_fork(after_in_child=_pool.cache_clear)
