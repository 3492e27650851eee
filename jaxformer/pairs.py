"""Rows that hold a source and its target each, for an encoder and a decoder."""

from collections.abc import Sequence

import numpy as np

from jaxformer.errors import Setting, TextError
from jaxformer.token_data import IGNORED, TokenSplit


class Pairs:
    """Finds the sources and the targets of a split: what stands before an answer, and the answer.

    A source is the prompt between ``before`` and ``after``; a target is ``begin`` and the answer,
    which has the end of the text as its last id.

    Args:
        split: the ids, which says where documents begin and which ids belong to answers.
        begin: ids that every target begins with, at least one.
        before: ids before every source.
        after: ids after every source.
        opening: how many ids every document begins with that are not of its prompt.
        limit: take only the documents that begin in the first so many ids; default all.

    Attributes:
        longest_source: in tokens, with ``before`` and ``after``.
        longest_target: how many targets the longest has: its ids but the first of ``begin``.

    Raises:
        TextError: the split does not say what answers are, or a document is not a prompt and one
            answer.
    """

    def __init__(
        self,
        split: TokenSplit,
        *,
        begin: Sequence[int],
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        opening: int = 0,
        limit: int | None = None,
    ):
        if not begin:
            raise ValueError("begin must have the id that targets begin with: got none")
        self.split = split
        self.folder = split.paths[0].parent
        self.begin = np.array(begin, np.int32)
        self.before, self.after = np.array(before, np.int32), np.array(after, np.int32)
        starts, self._answers, self._ends = find_answers(split, limit)
        self._starts = starts + opening
        self.source_lengths = self._answers - self._starts + len(before) + len(after)
        self.target_lengths = self._ends - self._answers + len(begin) - 1
        empty = np.flatnonzero((self._answers < self._starts) | (self.source_lengths < 1))
        if len(empty):
            raise TextError(f"document {empty[0] + 1} of {self.folder} has an answer and no prompt")

    def __len__(self) -> int:
        """Returns how many pairs there are."""
        return len(self._starts)

    @property
    def longest_source(self) -> int:
        """The tokens of the longest source."""
        return int(self.source_lengths.max())

    @property
    def longest_target(self) -> int:
        """The tokens of the longest target, but the first."""
        return int(self.target_lengths.max())

    def source(self, index: int, length: int) -> np.ndarray:
        """Returns the ids of a source, int32; of a prompt that is too long its first ids."""
        room = length - len(self.before) - len(self.after)
        first, last = int(self._starts[index]), int(self._answers[index])
        prompt = self.split.read(first, min(last - first, room))
        return np.concatenate([self.before, prompt, self.after])

    def target(self, index: int, length: int) -> np.ndarray:
        """Returns the ids of a target, int32, ``length`` + 1 at most.

        Of an answer that is too long these are its first ids and its last, which ends it.
        """
        room = length - len(self.begin) + 1
        first, last = int(self._answers[index]), int(self._ends[index])
        answer = self.split.read(first, min(last - first, room))
        if last - first > room:
            answer[-1:] = self.split.read(last - 1, 1)
        return np.concatenate([self.begin, answer])


class PairRows:
    """Holds pairs as rows of one form: T inputs and targets of the decoder, S ids of the source.

    Args:
        pairs: sources and targets.
        source_length: S, in tokens.
        target_length: T, in tokens.
        truncate: whether longer sources and targets are cut.

    Attributes:
        stride: see ``Rows``.

    Raises:
        TextError: a source or target is longer, and is not to be cut.
        ValueError: there is no room for one token beside those that every source or target has.
    """

    stride = 1

    def __init__(
        self, pairs: Pairs, source_length: int, target_length: int, *, truncate: bool = False
    ):
        least = len(pairs.before) + len(pairs.after) + 1, len(pairs.begin)
        if source_length < least[0] or target_length < least[1]:
            raise ValueError(
                f"sources need at least {least[0]} tokens and targets {least[1]}: got "
                f"{source_length} and {target_length}"
            )
        self.pairs = pairs
        self.source_length, self.target_length = source_length, target_length
        if truncate:
            return
        found = []
        for name, lengths, most in (
            ("sources", pairs.source_lengths, source_length),
            ("targets", pairs.target_lengths, target_length),
        ):
            if count := int((lengths > most).sum()):
                found.append(
                    f"{count:,} of {len(lengths):,} {name} of {pairs.folder} have more than "
                    f"{most:,} tokens, the longest {int(lengths.max()):,}"
                )
        if found:
            raise TextError(
                f"{'; '.join(found)}: make room with ",
                Setting("source_length"),
                " and ",
                Setting("block_size"),
                ", leave them out, or cut them with ",
                Setting("truncate"),
            )

    def __len__(self) -> int:
        """Returns how many rows there are."""
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns inputs (T,), targets (T,) and source (S,), int32.

        Behind the last id inputs are 0, and targets and sources ``IGNORED``.
        """
        inputs = np.zeros(self.target_length, np.int32)
        targets = np.full(self.target_length, IGNORED, np.int32)
        source = np.full(self.source_length, IGNORED, np.int32)
        ids = self.pairs.target(index, self.target_length)
        inputs[: len(ids) - 1], targets[: len(ids) - 1] = ids[:-1], ids[1:]
        ids = self.pairs.source(index, self.source_length)
        source[: len(ids)] = ids
        return inputs, targets, source


def find_answers(
    split: TokenSplit, limit: int | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns where each document begins, where its answer does, and where it ends, int64.

    Args:
        split: the ids.
        limit: take only the documents that begin in the first so many ids; default all.

    Raises:
        TextError: the split does not know its documents or answers, or a document has no answer,
            several, or something after it.
    """
    folder = split.paths[0].parent
    starts = split.document_starts()
    if not split.has_answers:
        raise TextError(
            f"{folder} does not say which tokens are answers: make it of records of a prompt and "
            "an answer, with jaxformer tokenize"
        )
    ends = np.append(starts[1:], len(split))
    if limit is not None:
        starts, ends = starts[starts < limit], ends[starts < limit]
    counts = split.read_targets(0, int(ends[-1])) >= 0
    answers = ends - np.add.reduceat(counts, starts, dtype=np.int64)
    # An answer ends where the next token counts no more, which only another document may have.
    breaks = np.flatnonzero(counts[:-1] & ~counts[1:]) + 1
    broken = np.setdiff1d(breaks, starts)
    wrong = [*np.searchsorted(starts, broken, side="right"), *np.flatnonzero(answers == ends) + 1]
    if wrong:
        raise TextError(
            f"document {min(wrong)} of {folder} is not a prompt and its answer: an encoder and "
            "decoder learns from records of one prompt and one answer"
        )
    return starts, answers, ends
