"""Rows of T targets that hold whole documents, each of which is trained on as if it were alone."""

import bisect

import numpy as np

from jaxformer.errors import TextError
from jaxformer.token_data import IGNORED, TokenSplit


class PackedRows:
    """Packs the documents of a split into rows of T = ``block_size`` places.

    A document of n tokens takes n - 1 places: each of its tokens but the last is an input, whose
    target is the one that follows it. One that is longer than a row is cut into pieces of T
    targets, and the rest; every piece is then a document of its own. So every token but the first
    of a document is the target of exactly one place.

    Args:
        split: the ids, which says where its documents begin.
        block_size: T, in tokens.
        limit: take only the first so many ids; default all.

    Attributes:
        stride: see ``Rows``.
        documents: how many there are, pieces of long ones counted each.
        fill: the share of the places that hold a token.

    Raises:
        TextError: the split does not say where documents begin, or no document has two tokens.
    """

    stride = 1

    def __init__(self, split: TokenSplit, block_size: int, limit: int | None = None):
        self.split = split
        self.block_size = block_size
        starts = split.document_starts()
        end = len(split) if limit is None else min(limit, len(split))
        begins, lengths = cut_documents(starts[starts < end], end, block_size)
        if not len(begins):
            raise TextError(f"no document of {split.paths[0].parent} has two tokens or more")
        rows = pack_lengths(lengths, block_size)
        order = np.lexsort((begins, rows))
        self._begins, self._lengths = begins[order], lengths[order]
        self._ends = np.cumsum(np.bincount(rows))
        self.documents = len(begins)
        self.fill = float(lengths.sum() / (len(self) * block_size))

    def __len__(self) -> int:
        """Returns how many rows there are."""
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns inputs, targets and segments of a row, int32 (T,) each.

        Segments count the documents of the row from 1 on. What is left of the row has segment 0,
        and its targets are ``IGNORED``.
        """
        first = int(self._ends[index - 1]) if index else 0
        inputs, segments = np.zeros((2, self.block_size), np.int32)
        targets = np.full(self.block_size, IGNORED, np.int32)
        place = 0
        for number, document in enumerate(range(first, int(self._ends[index])), 1):
            begin, length = int(self._begins[document]), int(self._lengths[document])
            taken = slice(place, place + length)
            ids = self.split.read(begin, length + 1)
            inputs[taken], targets[taken] = ids[:-1], ids[1:]
            if self.split.has_answers:
                targets[taken] = self.split.read_targets(begin + 1, length)
            segments[taken] = number
            place += length
        return inputs, targets, segments


def cut_documents(starts: np.ndarray, end: int, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the pieces of documents begin, and how many targets each has, int64.

    Args:
        starts: where documents begin.
        end: of the last.
        block_size: the most targets of a piece.

    >>> begins, lengths = cut_documents(np.array([0, 3, 4]), 13, 5)
    >>> begins.tolist(), lengths.tolist()
    ([0, 4, 9], [2, 5, 3])
    """
    targets = np.diff(starts, append=end) - 1
    counts = -(-targets // block_size)
    begins = np.repeat(starts, counts)
    number = np.arange(len(begins)) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(np.repeat(targets, counts) - number * block_size, block_size)
    return begins + number * block_size, lengths


def pack_lengths(lengths: np.ndarray, size: int) -> np.ndarray:
    """Returns a row for each length, int64, so that those of a row add up to at most ``size``.

    The longest come first, each into the row that has the least room for it (best fit decreasing,
    Johnson, 1974); all of one length are placed together.

    >>> pack_lengths(np.array([3, 4, 1, 2]), 5).tolist()
    [1, 0, 0, 1]
    """
    found = np.empty(len(lengths), np.int64)
    order = np.argsort(-lengths, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(lengths[order])) + 1)
    free: dict[int, np.ndarray] = {}
    rooms: list[int] = []
    count = 0

    def offer(room: int, rows: np.ndarray) -> None:
        if room and len(rows):
            if room not in free:
                bisect.insort(rooms, room)
            free[room] = np.concatenate([free.get(room, rows[:0]), rows])

    for waiting in groups:
        length = int(lengths[waiting[0]])
        while len(waiting):
            place = bisect.bisect_left(rooms, length)
            if place < len(rooms):
                room = rooms.pop(place)
                rows = free.pop(room)
                taken = rows[: len(waiting)]
                found[waiting[: len(taken)]] = taken
                waiting = waiting[len(taken) :]
                offer(room, rows[len(taken) :])
                offer(room - length, taken)
                continue
            # As many of this length as fit share a new row.
            each = size // length
            found[waiting] = count + np.arange(len(waiting)) // each
            full, rest = divmod(len(waiting), each)
            offer(size - each * length, np.arange(count, count + full))
            if rest:
                offer(size - rest * length, np.array([count + full]))
            count += full + bool(rest)
            break
    return found
