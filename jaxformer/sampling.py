"""The order in which rows of data are drawn, a function of (seed, step).

A row is a window of ids (``TokenWindows``), or holds whole documents (``PackedRows``). Rows are
drawn at random, with repetition, or in epochs, each once before any is drawn again.
"""

import functools
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from jaxformer.char_data import window_starts

FEISTEL_ROUNDS = 6
# Rows of a mixture in which each source has its share exactly.
MIXTURE_BLOCK = 1 << 16
Sampling = Literal["random", "epoch"]


class Rows(Protocol):
    """Rows to draw batches from.

    Attributes:
        stride: an epoch has every so many-th row: those that share no target.
    """

    stride: int

    def __len__(self) -> int:
        """Returns how many rows there are."""
        ...

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Returns the arrays (T,) of a row: inputs, targets and perhaps segments."""
        ...


def draw_rows(rows: Rows, sampling: Sampling, seed: int, step: int, batch_size: int) -> np.ndarray:
    """Returns which rows make the batch of a step, (B,)."""
    if isinstance(rows, MixedRows):
        return rows.draw(sampling, seed, step, batch_size)
    if sampling == "random":
        return window_starts(seed, step, batch_size, len(rows))
    return epoch_order(seed, step, batch_size, epoch_length(rows)) * rows.stride


class MixedRows:
    """Rows of several sources, of which each gives its share.

    Of every 65,536 rows that follow each other, a source gives its share to the nearest whole
    number, at places that a permutation chooses. So it is known how many rows a source has given
    before any step, and in epochs each source goes through all of its own rows, in its own time.

    Args:
        parts: the rows of each source; row 0 of the mixture is the first of the first source.
        shares: of each source, above 0; they need not add up to 1.

    Raises:
        ValueError: a share is too small to give a row.
    """

    stride = 1

    def __init__(self, parts: Sequence[Rows], shares: Sequence[float]):
        self.parts = list(parts)
        self.counts = whole_shares(shares, MIXTURE_BLOCK)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        """Returns how many rows all sources have."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> tuple[np.ndarray, ...]:
        """Returns the arrays of a row."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part][index - (int(self._ends[part - 1]) if part else 0)]

    def draw(self, sampling: Sampling, seed: int, step: int, batch_size: int) -> np.ndarray:
        """Returns which rows make the batch of a step, int64 (B,)."""
        places = step * batch_size + np.arange(batch_size, dtype=np.int64)
        sources, numbers = np.empty((2, batch_size), np.int64)
        for block in np.unique(places // MIXTURE_BLOCK):
            chosen = places // MIXTURE_BLOCK == block
            known = _mixture_block(tuple(self.counts.tolist()), seed, int(block))
            sources[chosen], numbers[chosen] = (x[places[chosen] % MIXTURE_BLOCK] for x in known)
        found = np.empty(batch_size, np.int64)
        for source, part in enumerate(self.parts):
            chosen = sources == source
            if sampling == "random":
                inside = window_starts(seed, step, batch_size, len(part))[chosen].astype(np.int64)
            else:
                rows = _in_epochs(numbers[chosen], epoch_length(part), seed, 3 + source)
                inside = rows * part.stride
            found[chosen] = inside + (self._ends[source] - len(part))
        return found


@functools.lru_cache(maxsize=4)
def _mixture_block(counts: tuple[int, ...], seed: int, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The source of each row of a block, and how many rows that source has given before."""
    order = permute(np.arange(MIXTURE_BLOCK), MIXTURE_BLOCK, seed, block, 2)
    sources = np.searchsorted(np.cumsum(counts), order, side="right")
    numbers = np.empty(MIXTURE_BLOCK, np.int64)
    for source, count in enumerate(counts):
        numbers[sources == source] = block * count + np.arange(count)
    return sources, numbers


def whole_shares(shares: Sequence[float], total: int) -> np.ndarray:
    """Returns whole numbers in the ratio of ``shares`` that add up to ``total``, int64.

    Raises:
        ValueError: one of them would be 0.

    >>> whole_shares([1, 1, 4], 10).tolist()
    [2, 2, 6]
    """
    exact = np.asarray(shares, np.float64) / np.sum(shares) * total
    counts = np.floor(exact).astype(np.int64)
    left = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:left]] += 1
    if counts.min() < 1:
        raise ValueError(f"a share must be at least {1 / total:.2g} of all: got {min(shares)}")
    return counts


def batch_of(rows: Rows, chosen: np.ndarray) -> tuple[np.ndarray, ...]:
    """Returns the arrays of a batch, each (B, T).

    Args:
        rows: all of them.
        chosen: which, (B,).
    """
    found = [rows[int(index)] for index in chosen]
    return tuple(np.stack(arrays) for arrays in zip(*found, strict=True))


def epoch_length(rows: Rows) -> int:
    """Returns how many rows an epoch has."""
    return (len(rows) - 1) // rows.stride + 1


def epoch_starts(
    seed: int, step: int, batch_size: int, num_ids: int, block_size: int
) -> np.ndarray:
    """Returns where the windows of one batch begin, int64 (B,), in epochs without repetition.

    The ids are cut into windows that follow each other.
    """
    return epoch_order(seed, step, batch_size, (num_ids - 1) // block_size) * block_size


def epoch_order(seed: int, step: int, batch_size: int, count: int) -> np.ndarray:
    """Returns which of ``count`` rows make one batch, int64 (B,), in epochs without repetition.

    Every epoch goes through all of them in an order of its own.
    """
    places = step * batch_size + np.arange(batch_size, dtype=np.int64)
    return _in_epochs(places, count, seed, 1)


def _in_epochs(places: np.ndarray, count: int, seed: int, stream: int) -> np.ndarray:
    """What stands at places of permutations of [0, count) that follow each other, int64."""
    found = np.empty(len(places), np.int64)
    for epoch in np.unique(places // count):
        chosen = places // count == epoch
        found[chosen] = permute(places[chosen] % count, count, seed, int(epoch), stream)
    return found


def permute(places: np.ndarray, count: int, seed: int, epoch: int, stream: int = 1) -> np.ndarray:
    """Returns what stands at places of a permutation of [0, count), int64.

    It gives each place by itself: a Feistel network whose values outside of the range are permuted
    again (Black and Rogaway, 2002). Every seed, epoch and stream has a permutation of its own.
    """
    half = np.uint64(max(1, -(-(count - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, epoch]).random_raw(FEISTEL_ROUNDS)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        values[outside] = left << half | right
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Returns 64-bit numbers whose every bit depends on all bits of ``x`` (SplitMix64)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed
