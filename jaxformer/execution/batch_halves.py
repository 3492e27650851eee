"""The halves of a batch, which a CPU's cores generate at the same time.

In a step of generation each operation is short. To hand it to several threads and to wait for all
of them takes about as long as they save: of a model of width 256, 32 texts are written as fast by
one core as by two. So the texts are cut into two halves, whose programs run beside each other.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxformer.execution.attention_backends import CompilationTarget
from jaxformer.execution.cores import count_cores

# From where on halves were faster, on two cores of an Intel Xeon. Each half reads all weights: 16
# texts of a model of 76 MB gained a third, and 16 of a T5 or a Mixtral of over 150 MB lost a tenth.
FEWEST_ROWS, MOST_BYTES_FOR_A_ROW = 8, 5_000_000
# Each half draws for the whole batch, so that the tokens are the same ones: the most numbers.
MOST_DRAWS = 2**16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BatchPart:
    """Which rows of a batch a program has.

    Attributes:
        first: the first one.
        rows: how many the batch has.
    """

    first: Int[Array, ""] | np.int32
    rows: int = dataclasses.field(metadata={"static": True})


def cut_batch(rows: int, draws: int, parameters: Sequence[Any]) -> list[slice]:
    """Returns the rows of each half where this is faster, else those of the whole batch.

    Args:
        rows: of the batch.
        draws: random numbers for a token of all rows.
        parameters: the model's arrays.
    """
    most = MOST_BYTES_FOR_A_ROW * rows
    is_faster = rows >= FEWEST_ROWS and sum(x.nbytes for x in parameters) <= most
    # Halves of one size share their programs.
    can_be_cut = rows % 2 == 0 and draws <= MOST_DRAWS
    if not (is_faster and can_be_cut and _run_on_cores(parameters)) or _has_own_settings():
        return [slice(0, rows)]
    return [slice(0, rows // 2), slice(rows // 2, rows)]


def place_part(part: slice, rows: int) -> BatchPart | None:
    """Returns which rows of a batch of ``rows`` a part is; None for all of them."""
    return None if part == slice(0, rows) else BatchPart(np.int32(part.start), rows)


def _run_on_cores(parameters: Sequence[Any]) -> bool:
    """Whether the model lies on one CPU, which has several cores."""
    if CompilationTarget.here().platform != "cpu" or count_cores() < 2:
        return False
    return all(len(x.devices()) == 1 for x in parameters if isinstance(x, jax.Array))


def _has_own_settings() -> bool:
    """Whether this thread has settings of JAX that other threads have not, as in a ``with``."""
    with ThreadPoolExecutor(1) as thread:
        return bool(thread.submit(lambda: dict(jax.config.values)).result() != jax.config.values)


def write_beside(parts: Sequence[Iterator[np.ndarray]]) -> Iterator[np.ndarray]:
    """Yields the next tokens of all rows, (B, n), while the programs of all parts run.

    Programs that one thread starts run one after the other, so each part has a thread.

    Args:
        parts: of the rows, in order, each with its own tokens (b, n). One that ends before the
            others repeats its last token.
    """
    if len(parts) == 1:
        yield from parts[0]
        return

    def go_on(part: Iterator[np.ndarray]) -> np.ndarray | None:
        return next(part, None)

    with ThreadPoolExecutor(len(parts)) as threads:
        made: list[np.ndarray | None] = [None] * len(parts)
        last = [np.zeros((0, 1), np.int32)] * len(parts)
        while True:
            waiting = {
                i: threads.submit(copy_context().run, go_on, part)
                for i, part in enumerate(parts)
                if made[i] is None
            }
            for i, future in waiting.items():
                made[i] = future.result()
            found = {i: tokens for i, tokens in enumerate(made) if tokens is not None}
            if not found:
                return
            count = min(tokens.shape[1] for tokens in found.values())
            for i, tokens in found.items():
                last[i] = tokens[:, count - 1 : count]
                made[i] = tokens[:, count:] if tokens.shape[1] > count else None
            yield np.concatenate(
                [
                    found[i][:, :count] if i in found else np.repeat(last[i], count, axis=1)
                    for i in range(len(parts))
                ],
                axis=0,
            )
