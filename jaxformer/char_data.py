"""A character tokenizer, windows of ids, and batches that are a function of (seed, step)."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np

from jaxformer.checks import check_is_integer
from jaxformer.errors import Setting, TextError

Unknown = Literal["error", "skip", "replace"]


class CharTokenizer:
    """Turns characters into ids and back: id i is the i-th character of ``vocabulary``.

    Args:
        vocabulary: the characters, each once.

    Raises:
        TextError: the vocabulary is empty or holds a character twice.

    >>> tokenizer = CharTokenizer.train_from_text("hello")
    >>> tokenizer.encode("hole").tolist(), tokenizer.decode([1, 0])
    ([1, 3, 2, 0], 'he')
    """

    def __init__(self, vocabulary: Sequence[str]):
        self.vocabulary = tuple(vocabulary)
        self._ids = {character: i for i, character in enumerate(self.vocabulary)}
        if not self.vocabulary:
            raise TextError("the vocabulary is empty")
        if len(self._ids) < len(self.vocabulary) or any(len(c) != 1 for c in self.vocabulary):
            raise TextError("a vocabulary holds single characters, each once")

    @classmethod
    def train_from_text(cls, text: str) -> "CharTokenizer":
        """Returns the tokenizer whose vocabulary is the sorted set of the text's characters."""
        _check_text(text)
        return cls(sorted(set(text)))

    def vocabulary_size(self) -> int:
        """Returns the number of characters that it knows."""
        return len(self.vocabulary)

    def encode(self, text: str, *, unknown: Unknown = "error") -> np.ndarray:
        """Returns the ids of the text's characters, int32 (T,).

        Args:
            text: any text.
            unknown: what to do with a character outside the vocabulary: raise an error, leave it
                out, or put a space (the first character where there is no space) in its place.

        Raises:
            TextError: it is no text, or ``unknown`` is "error" and it holds such a character.
            ValueError: ``unknown`` is none of the three.
        """
        _check_text(text)
        if unknown not in get_args(Unknown):
            raise ValueError(f"unknown must be error, skip or replace: got {unknown!r}")
        if unknown == "skip":
            text = "".join(c for c in text if c in self._ids)
        elif unknown == "replace":
            stand_in = " " if " " in self._ids else self.vocabulary[0]
            text = "".join(c if c in self._ids else stand_in for c in text)
        try:
            return np.fromiter((self._ids[c] for c in text), np.int32, len(text))
        except KeyError as error:
            character = error.args[0]
            raise TextError(
                f"character {character!r} (U+{ord(character):04X}) at position "
                f"{text.index(character)} is not in the vocabulary of "
                f"{self.vocabulary_size()}; ",
                Setting("unknown", value="skip|replace"),
                " reads the text without it",
            ) from None

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids.

        Raises:
            TextError: an id is outside the vocabulary.
        """
        ids = [int(i) for i in ids]
        for i in ids:
            if not 0 <= i < len(self.vocabulary):
                raise TextError(f"id {i} is outside the vocabulary of {self.vocabulary_size()}")
        return "".join(self.vocabulary[i] for i in ids)


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise TextError(f"characters are those of a text: got {type(text).__name__}")


class TokenIdsDataset:
    """Holds every window of T = ``block_size`` ids: item i is (data[i:i+T], data[i+1:i+1+T]).

    Args:
        data: the ids, one-dimensional.
        block_size: T, in tokens.

    Raises:
        TextError: the data holds no whole window, or no integers.

    >>> inputs, targets = TokenIdsDataset(np.arange(5), 3)[1]
    >>> inputs.tolist(), targets.tolist()
    ([1, 2, 3], [2, 3, 4])
    """

    def __init__(self, data: np.ndarray, block_size: int):
        if np.asarray(data).dtype.kind not in "iu":
            raise TextError(f"ids of tokens are integers: got {np.asarray(data).dtype}")
        if len(data) <= block_size:
            raise TextError(
                f"a window of {block_size} tokens and its successor need {block_size + 1}: "
                f"got {len(data)}"
            )
        self.data = data
        self.block_size = block_size

    def __len__(self) -> int:
        """Returns how many windows there are."""
        return len(self.data) - self.block_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets (T,) of window ``index``; a negative index is an error."""
        if not 0 <= index < len(self):
            raise IndexError(f"window {index} is outside the {len(self)} of this dataset")
        window = self.data[index : index + self.block_size + 1]
        return window[:-1], window[1:]


def train_validation_split(
    ids: np.ndarray, context_length: int, train_fraction: float = 0.9
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the first 90 % of the ids, and the rest.

    Raises:
        TextError: one of the two holds no whole window.
    """
    boundary = int(len(ids) * train_fraction)
    parts = ids[:boundary], ids[boundary:]
    for name, part in zip(("training", "validation"), parts, strict=True):
        if len(part) <= context_length:
            # Both splits must hold a window, so the smaller one decides.
            share = min(train_fraction, 1 - train_fraction)
            needed = int(np.ceil((context_length + 1) / share)) + 1
            raise TextError(
                f"the {name} split has {len(part)} characters, a window needs "
                f"{context_length + 1}: give a text of about {needed} characters or more, "
                "or a smaller --context-length"
            )
    return parts


def window_starts(seed: int, step: int, batch_size: int, num_windows: int) -> np.ndarray:
    """Returns where the windows of one batch begin, (B,): a function of its arguments.

    They are int32, or int64 where there are more windows than that has numbers.

    Drawn with replacement from [0, num_windows) by the counter-based generator Philox
    (Salmon et al., 2011), so any step can be had without those before it.
    """
    bits = np.random.Philox(key=[seed, 0], counter=[0, 0, 0, step]).random_raw(batch_size)
    return (bits % np.uint64(num_windows)).astype(np.int32 if num_windows <= 2**31 else np.int64)


def batch_at(
    dataset: TokenIdsDataset, seed: int, step: int, batch_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of one step, each (B, T).

    Raises:
        ValueError: the batch has no window.
    """
    check_is_integer("batch_size", batch_size)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1: got {batch_size}")
    starts = window_starts(seed, step, batch_size, len(dataset))
    windows = [dataset[int(start)] for start in starts]
    return np.stack([w[0] for w in windows]), np.stack([w[1] for w in windows])


def evaluation_windows(num_ids: int, context_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns windows that score every id of a split but the first exactly once.

    Returns:
        starts, int32 (W,), and mask, bool (W, T): which targets of each window count. Windows
        follow each other; the last one is moved back to end with the split, and does not count
        what the one before it counted.
    """
    targets = num_ids - 1
    nominal = np.arange(0, targets, context_length)
    starts = np.minimum(nominal, targets - context_length)
    mask = starts[:, None] + np.arange(context_length)[None, :] >= nominal[:, None]
    return starts.astype(np.int32), mask
