"""Texts to a folder of token ids: in order, in several processes, and resumable at any moment."""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxformer.data.encoders import Encoder, EncoderSpec, make_encoder
from jaxformer.data.encoding import PIECE_CHARACTERS
from jaxformer.data.shards import SplitWriter, read_progress, write_progress
from jaxformer.data.sources import Part, Source
from jaxformer.errors import ResourceError, TextError, UsageError
from jaxformer.storage.durable_files import atomic_write_text, describe_space, free_bytes
from jaxformer.token_data import DTYPES, FORMAT, INDEX, SPLITS

# What is done after that many seconds is not lost when the process is killed.
SECONDS_PER_COMMIT = 5.0
# Pieces that a worker may have before it: enough that it never waits.
TASKS_PER_WORKER = 3
MIN_FREE_BYTES = 64 << 20


class Encoded(NamedTuple):
    """The ids of some parts of one split.

    Attributes:
        split: train or val.
        ids: (T,), of the folder's dtype.
        begins: where documents begin among them, int64.
        text_bytes: of UTF-8.
        counts: which ids are targets, bool; None for all.
    """

    split: str
    ids: np.ndarray
    begins: np.ndarray
    text_bytes: int
    counts: np.ndarray | None = None


@dataclass(frozen=True)
class Tokenization:
    """What is to be made.

    Attributes:
        sources: the texts, in order.
        encoder: makes ids of them.
        out: the folder.
        shard_tokens: how many ids a shard has.
        workers: processes that encode; 1 encodes in this one.
        settings: what a folder that was begun must have been begun with.
    """

    sources: Sequence[tuple[Source, str | None]]
    encoder: EncoderSpec
    out: Path
    shard_tokens: int
    workers: int
    settings: dict[str, Any]

    @property
    def dtype(self) -> str:
        """The smallest dtype that holds the ids."""
        return "uint16" if self.encoder.vocab_size <= 2**16 else "uint32"

    @property
    def has_answers(self) -> bool:
        """Whether some ids are no targets."""
        return any(source.has_answers for source, _ in self.sources)


def tokenize(
    what: Tokenization, report: Callable[[int, int], None] = lambda done, tokens: None
) -> dict[str, Any]:
    """Writes a folder of token ids, or the rest of one that was begun; returns its index.

    Args:
        what: is to be made.
        report: called with the bytes read since the last call, and all tokens so far.

    Raises:
        TextError: a source is damaged or is no text, or a split is left empty.
        UsageError: the folder was begun with other settings.
        ResourceError: the disk is full, or a worker was ended.
    """
    progress = read_progress(what.out) or {"settings": what.settings, "position": [0, 0]}
    if progress["settings"] != what.settings:
        changed = [k for k in what.settings if progress["settings"].get(k) != what.settings[k]]
        raise UsageError(
            f"{what.out} was begun with other settings ({', '.join(changed)}): give the same ones "
            "to go on, remove the folder, or give another --out"
        )
    dtype = DTYPES[what.dtype]
    states = progress.get("splits", {})
    writers = {
        name: SplitWriter(
            what.out, name, dtype, what.shard_tokens, states.get(name), what.has_answers
        )
        for name in SPLITS
    }
    progress["whole"] = True

    def store() -> None:
        splits = {name: writer.state for name, writer in writers.items()}
        write_progress(
            what.out,
            {"settings": what.settings, "position": progress["position"], "splits": splits},
        )
        for writer in writers.values():
            writer.commit()

    def commit() -> None:
        for writer in writers.values():
            writer.sync()
        store()

    last = time.monotonic()
    tasks = _tasks(what, tuple(progress["position"]), report, writers)
    try:
        for place, results in _encode_all(what, tasks):
            # What is stored after an interrupt must have both splits, or neither.
            progress["whole"] = False
            for result in results:
                writers[result.split].add(
                    result.ids, result.begins, result.text_bytes, result.counts
                )
            progress |= {"position": list(place), "whole": True}
            if time.monotonic() - last > SECONDS_PER_COMMIT:
                _check_space(what.out)
                commit()
                last = time.monotonic()
    except (Exception, KeyboardInterrupt):
        if progress["whole"]:
            with contextlib.suppress(OSError, ResourceError):
                commit()
        raise
    for writer in writers.values():
        writer.finish()
    _check_splits(writers)
    store()
    return _write_index(what, writers)


def _check_splits(writers: dict[str, SplitWriter]) -> None:
    for name, writer in writers.items():
        if not writer.tokens:
            raise TextError(
                "the train split is empty: give more text"
                if name == "train"
                else "the val split is empty: give a larger --val-fraction, or --val FILE"
            )


def _write_index(what: Tokenization, writers: dict[str, SplitWriter]) -> dict[str, Any]:
    splits = {
        name: {
            "tokens": writer.tokens,
            "documents": writer.documents,
            "bytes": writer.bytes,
            **({"answers": writer.answers} if what.has_answers else {}),
            "shards": writer.shards,
        }
        for name, writer in writers.items()
    }
    index = {
        "format": FORMAT,
        "version": 1,
        "dtype": what.dtype,
        **what.encoder.about(),
        "splits": splits,
    }
    atomic_write_text(what.out / INDEX, json.dumps(index, indent=1) + "\n")
    return index


def _check_space(folder: Path) -> None:
    if free_bytes(folder) < MIN_FREE_BYTES:
        raise ResourceError(
            f"{folder}: {describe_space(folder, MIN_FREE_BYTES)}; free some and run the same "
            "command again, which goes on from here"
        )


Task = tuple[tuple[int, int], list[Part]]


def _tasks(
    what: Tokenization,
    position: tuple[int, ...],
    report: Callable[[int, int], None],
    writers: dict[str, SplitWriter],
) -> Iterator[Task]:
    """Yields the parts that are encoded together, each with the place after it."""

    def advance(count: int) -> None:
        report(count, sum(writer.tokens for writer in writers.values()))

    for number, (source, split) in enumerate(what.sources):
        if number < position[0]:
            advance(source.size())
            continue
        parts = source.parts(advance)
        if split is not None:
            parts = (part._replace(split=split) for part in parts)
        for group, together in enumerate(group_parts(parts)):
            if (number, group) >= (position[0], position[1]):
                yield (number, group + 1), together


def group_parts(parts: Iterator[Part]) -> Iterator[list[Part]]:
    """Yields parts of about a piece's length together."""
    group: list[Part] = []
    length = 0
    for part in parts:
        group.append(part)
        length += len(part.piece.text)
        if length >= PIECE_CHARACTERS // 2:
            yield group
            group, length = [], 0
    if group:
        yield group


def _encode_all(
    what: Tokenization, tasks: Iterator[Task]
) -> Iterator[tuple[tuple[int, int], list[Encoded]]]:
    """Yields the ids of each task, in order."""
    if what.workers == 1:
        encoder = make_encoder(what.encoder)
        for place, parts in tasks:
            yield place, encode_parts(encoder, parts, what.dtype)
        return
    # Rust's threads would compete with the processes. A new process gets the paths of this one, and
    # would look in the working folder first for modules such as types.
    with _environment(TOKENIZERS_PARALLELISM="false", PYTHONSAFEPATH="1"):
        pool = concurrent.futures.ProcessPoolExecutor(
            what.workers,
            multiprocessing.get_context("spawn"),
            _begin_worker,
            (what.encoder, what.dtype, os.getpid()),
        )
        try:
            waiting: collections.deque[Any] = collections.deque()
            for place, parts in tasks:
                waiting.append((place, pool.submit(_encode_in_worker, parts)))
                if len(waiting) >= TASKS_PER_WORKER * what.workers:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool as error:
            raise ResourceError(
                "a worker was ended, perhaps for lack of memory: run the same command again, which "
                "goes on from here, with fewer --workers"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_worker: tuple[Encoder, str] | None = None


def _begin_worker(spec: EncoderSpec, dtype: str, parent: int) -> None:
    """Makes the encoder of a worker, which ends when the process that started it does."""
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    _worker = make_encoder(spec), dtype


def _encode_in_worker(parts: list[Part]) -> list[Encoded]:
    assert _worker is not None
    return encode_parts(_worker[0], parts, _worker[1])


def encode_parts(encoder: Encoder, parts: Sequence[Part], dtype: str) -> list[Encoded]:
    """Returns the ids of parts by their splits, with the end of the text after every document."""
    encoded = encoder.encode([part.piece for part in parts])
    found = []
    for split in SPLITS:
        chosen = [(p, ids) for p, ids in zip(parts, encoded, strict=True) if p.split == split]
        if not chosen:
            continue
        pieces: list[np.ndarray] = []
        counted: list[np.ndarray] = []
        for part, ids in chosen:
            opening = encoder.opening if part.opens else ()
            closing = [encoder.end_of_text] if part.ends and encoder.end_of_text is not None else []
            pieces.append(np.concatenate([np.array(x, ids.dtype) for x in (opening, ids, closing)]))
            counted.append(np.full(len(pieces[-1]), part.counts))
            counted[-1][: len(opening)] = False
        places = [0, *itertools.accumulate(len(piece) for piece in pieces)]
        begins = [place for place, (part, _) in zip(places, chosen, strict=False) if part.begins]
        text_bytes = sum(len(part.piece.text.encode()) for part, _ in chosen)
        ids = np.concatenate(pieces).astype(DTYPES[dtype])
        counts = np.concatenate(counted)
        begun = np.array(begins, np.int64)
        found.append(Encoded(split, ids, begun, text_bytes, None if counts.all() else counts))
    return found
