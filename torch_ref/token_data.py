"""Folders of token ids: shards that are read by position, and windows of their ids.

A folder has ``index.json``, which names its shards, or is one of nanoGPT: ``train.bin`` and
``val.bin``, ids in uint16. A shard is a plain array of ids in the byte order of the machine, which
is little-endian. Beside it may stand where documents begin, and which ids belong to answers.
"""

import bisect
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from torch_ref.char_data import TextError

INDEX = "index.json"
FORMAT = "jaxformer-tokens"
SPLITS = ("train", "val")
DTYPES: dict[str, np.dtype] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
# The vocabulary of GPT-2, in whose ids nanoGPT's folders are that have no meta.pkl.
GPT2_VOCABULARY = 50257
# Of a file, so that files of any length are distinguished in a moment.
FINGERPRINT_BLOCKS, BLOCK_BYTES = 256, 1 << 16
DOCUMENTS, ANSWERS = np.dtype("<u8"), np.dtype("u1")
# A target that does not count, as torch's ``ignore_index``.
IGNORED = -100


class TokenSplit:
    """Reads the ids of one split from its shards, where they are needed.

    Shards are read by position and not mapped into memory: mapped pages would count as memory of
    the process, and a shard that is cut short would end it.

    Args:
        paths: of the shards, in order.
        counts: how many ids each of them has.
        dtype: of the ids, uint16 or uint32.
        vocab_size: every id must be below it.
        documents: of each shard, the file that says where documents begin, and how many.
        answers: of each shard, the file that says which ids belong to answers; without such files
            every id counts as a target.

    Raises:
        TextError: a file is missing, or is not as long as it should be.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        counts: Sequence[int],
        dtype: np.dtype,
        vocab_size: int,
        documents: Sequence[tuple[Path, int]] = (),
        answers: Sequence[Path] = (),
    ):
        self.paths = list(paths)
        self.dtype = dtype
        self.vocab_size = vocab_size
        self._ends = list(itertools.accumulate(counts))
        self._documents = list(documents)
        self._answers = list(answers)
        self._files: dict[Path, Any] = {}
        files = [(path, count, dtype) for path, count in zip(paths, counts, strict=True)]
        files += [(path, count, DOCUMENTS) for path, count in documents]
        if answers:
            files += [(path, n, ANSWERS) for path, n in zip(answers, counts, strict=True)]
        for path, count, kind in files:
            size = path.stat().st_size if path.is_file() else -1
            if size != count * kind.itemsize:
                found = "is missing" if size < 0 else f"has {size:,} bytes"
                what = "ids" if kind is dtype else "numbers"
                raise TextError(
                    f"{path} {found}, and {count:,} {what} of {kind.name} have "
                    f"{count * kind.itemsize:,}: make the folder again"
                )

    def __del__(self) -> None:
        """Closes the files that were read."""
        for file in self._files.values():
            file.close()

    def __len__(self) -> int:
        """Returns how many ids there are."""
        return self._ends[-1] if self._ends else 0

    def read(self, start: int, count: int) -> np.ndarray:
        """Returns ``count`` ids from ``start`` on, int32.

        Raises:
            IndexError: there are fewer.
            TextError: a shard was cut short, or an id is outside the vocabulary.
        """
        if start < 0 or start + count > len(self):
            raise IndexError(
                f"ids {start} to {start + count} are outside the {len(self)} there are"
            )
        return self._read(self.paths, self.dtype, start, count)

    @property
    def has_answers(self) -> bool:
        """Whether some ids do not count as targets."""
        return bool(self._answers)

    def read_targets(self, start: int, count: int) -> np.ndarray:
        """Returns ids as targets, int32; those that belong to no answer are ``IGNORED``.

        Raises:
            IndexError, TextError: as for ``read``.
        """
        ids = self.read(start, count)
        if not self._answers:
            return ids
        counts = self._read(self._answers, ANSWERS, start, count)
        return np.where(counts, ids, np.int32(IGNORED))

    def document_starts(self) -> np.ndarray:
        """Returns where documents begin, int64, in order; the first begins at 0.

        Raises:
            TextError: that is not known, or cannot be so.
        """
        if not self._documents:
            raise TextError(
                f"{self.paths[0].parent} does not say where documents begin: make the folder with "
                "jaxformer tokenize"
            )
        firsts = [0, *self._ends]
        starts = np.concatenate(
            [
                np.fromfile(path, DOCUMENTS).astype(np.int64) + first
                for first, (path, _) in zip(firsts, self._documents, strict=False)
            ]
        )
        if not len(starts) or starts[0] or (np.diff(starts) <= 0).any() or starts[-1] >= len(self):
            path = self._documents[0][0]
            raise TextError(f"{path} or one that follows it is damaged: make the folder again")
        return starts

    def _read(self, paths: Sequence[Path], dtype: np.dtype, start: int, count: int) -> np.ndarray:
        found = np.empty(count, np.int32)
        done = 0
        while done < count:
            shard = bisect.bisect_right(self._ends, start + done)
            first = self._ends[shard - 1] if shard else 0
            part = min(count - done, self._ends[shard] - start - done)
            found[done : done + part] = self._read_shard(
                paths[shard], dtype, start + done - first, part
            )
            done += part
        return found

    def _read_shard(self, path: Path, dtype: np.dtype, start: int, count: int) -> np.ndarray:
        if path not in self._files:
            self._files[path] = path.open("rb", buffering=0)
        size = dtype.itemsize
        data = os.pread(self._files[path].fileno(), count * size, start * size)
        if len(data) < count * size:
            raise TextError(f"{path} was cut short while it was read: make the folder again")
        numbers = np.frombuffer(data, dtype)
        if dtype is not ANSWERS and int(numbers.max()) >= self.vocab_size:
            place = int(np.argmax(numbers >= self.vocab_size))
            raise TextError(
                f"{path} has id {numbers[place]} at position {start + place}, outside of "
                f"{self.vocab_size} tokens: its dtype or its tokenizer is another"
            )
        return numbers


class TokenFolder:
    """Opens a folder of token ids.

    Args:
        path: of the folder.
        vocab_size: of one of nanoGPT; default GPT-2's. Others have it in their index.

    Attributes:
        train: the ids to train on.
        val: the ids to validate with.
        index: what ``index.json`` says; empty for a folder of nanoGPT.

    Raises:
        TextError: there are no ids, or the folder is damaged.
    """

    def __init__(self, path: Path, vocab_size: int | None = None):
        self.path = Path(path)
        self.index: dict[str, Any] = {}
        if (self.path / INDEX).is_file():
            self.index = _read_index(self.path / INDEX)
            self.vocab_size = self.index["vocab_size"]
            splits = self.index["splits"]
            self.dtype = DTYPES[self.index["dtype"]]
        elif (self.path / "train.bin").is_file():
            self.vocab_size = GPT2_VOCABULARY if vocab_size is None else vocab_size
            self.dtype = DTYPES["uint16"]
            splits = {name: {"shards": [self._bare_shard(f"{name}.bin")]} for name in SPLITS}
        else:
            raise TextError(
                f"{self.path} holds no tokens: there is neither {INDEX} nor train.bin; make such a "
                "folder with jaxformer tokenize"
            )
        self.train, self.val = (self._open(splits[name]["shards"]) for name in SPLITS)

    def __repr__(self) -> str:
        """Returns where it is and how many ids it has, in one line."""
        return (
            f"<{type(self).__name__}: {self.path}, {len(self.train):,} + {len(self.val):,} tokens "
            f"of {self.vocab_size:,}>"
        )

    def _open(self, shards: Sequence[dict[str, Any]]) -> TokenSplit:
        documents = [shard["documents"] for shard in shards if "documents" in shard]
        return TokenSplit(
            [self.path / shard["file"] for shard in shards],
            [shard["tokens"] for shard in shards],
            self.dtype,
            self.vocab_size,
            [(self.path / found["file"], found["count"]) for found in documents],
            [self.path / shard["answers"]["file"] for shard in shards if "answers" in shard],
        )

    def _bare_shard(self, name: str) -> dict[str, Any]:
        path = self.path / name
        if not path.is_file():
            raise TextError(f"{self.path} has no {name}, the ids of that split")
        size = path.stat().st_size
        if size % self.dtype.itemsize:
            raise TextError(f"{path} has {size} bytes, which are no ids of uint16: it is cut short")
        return {"file": name, "tokens": size // self.dtype.itemsize}

    def fingerprint(self) -> str:
        """Returns a SHA-256 that tells this folder from others.

        It is that of the index, which has the hashes of the shards; of a folder of nanoGPT that of
        the sizes of both files and of at most 256 blocks of each, evenly spread.
        """
        if self.index:
            return hashlib.sha256((self.path / INDEX).read_bytes()).hexdigest()
        found = hashlib.sha256()
        for path in (*self.train.paths, *self.val.paths):
            size = path.stat().st_size
            blocks = -(-size // BLOCK_BYTES)
            found.update(size.to_bytes(8, "little"))
            with path.open("rb") as file:
                spread = np.linspace(0, max(blocks - 1, 0), FINGERPRINT_BLOCKS, dtype=np.int64)
                for block in np.unique(spread):
                    file.seek(int(block) * BLOCK_BYTES)
                    found.update(file.read(BLOCK_BYTES))
        return found.hexdigest()


class TokenWindows:
    """Holds every window of T = ``block_size`` ids of a split, as ``TokenIdsDataset`` does.

    Args:
        split: the ids.
        block_size: T, in tokens.

    Raises:
        TextError: the split holds no whole window.
    """

    def __init__(self, split: TokenSplit, block_size: int):
        if len(split) <= block_size:
            raise TextError(
                f"a window of {block_size} tokens and its successor need {block_size + 1}: "
                f"got {len(split)}"
            )
        self.split = split
        self.block_size = block_size
        self.stride = block_size

    def __len__(self) -> int:
        """Returns how many windows there are."""
        return len(self.split) - self.block_size

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets (T,) of window ``index``; a negative index is an error."""
        window = self.split.read(index, self.block_size + 1)
        if not self.split.has_answers:
            return window[:-1], window[1:]
        return window[:-1], self.split.read_targets(index + 1, self.block_size)


def _read_index(path: Path) -> dict[str, Any]:
    """Returns an index whose settings have the types and ranges that they must have."""
    try:
        index = json.loads(path.read_bytes())
        if index["format"] != FORMAT or index["version"] != 1:
            raise ValueError("it is of another format or version")
        if index["dtype"] not in DTYPES:
            raise ValueError(f"dtype is {index['dtype']!r}, not {' or '.join(DTYPES)}")
        most = min(2**31, 2 ** (8 * DTYPES[index["dtype"]].itemsize))
        if type(index["vocab_size"]) is not int or not 0 < index["vocab_size"] <= most:
            raise ValueError(f"vocab_size is {index['vocab_size']!r}, of {index['dtype']}")
        for name in SPLITS:
            for shard in index["splits"][name]["shards"]:
                if Path(shard["file"]).name != shard["file"]:
                    raise ValueError(f"a shard is called {shard['file']!r}")
                if type(shard["tokens"]) is not int or shard["tokens"] < 0:
                    raise ValueError(f"{shard['file']} has {shard['tokens']!r} tokens")
            _check_files_beside(index["splits"][name]["shards"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
        raise TextError(f"{path} is no index of tokens: {reason}; make the folder again") from None
    found: dict[str, Any] = index
    return found


def _check_files_beside(shards: Sequence[dict[str, Any]]) -> None:
    """Checks what an index says of documents and answers: all shards have such files, or none."""
    for kind in ("documents", "answers"):
        found = [shard[kind] for shard in shards if kind in shard]
        if len(found) not in (0, len(shards)):
            raise ValueError(f"some shards have {kind}, and some have none")
        for one in found:
            if Path(one["file"]).name != one["file"]:
                raise ValueError(f"a file of {kind} is called {one['file']!r}")
            if kind == "documents" and (type(one["count"]) is not int or one["count"] < 0):
                raise ValueError(f"{one['file']} has {one['count']!r} documents")
