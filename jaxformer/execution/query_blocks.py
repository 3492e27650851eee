"""Blocks of queries, each with the keys that the mask allows, so that the core skips the others."""

import contextvars
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxformer.execution.gpu_shapes import is_for_cuda
from jaxformer.execution.scopes import set_within

# The least queries of a block, and the most blocks: small blocks skip more keys and stay in a CPU's
# cache, many blocks take long to compile.
SMALLEST_BLOCK = 64
MOST_BLOCKS = 8
# The least queries where operators are compiled one by one, each block's with shapes of its own.
SMALLEST_LARGE_BLOCK = 512
# On a GPU blocks are cut out by copies, and a kernel of a small block leaves most of it idle.
SMALLEST_GPU_BLOCK = 256

_smallest: contextvars.ContextVar[int] = contextvars.ContextVar(
    "smallest_query_block", default=SMALLEST_BLOCK
)


@dataclasses.dataclass(frozen=True)
class QueryBlock:
    """A range of queries, and the range of keys that they may attend to.

    Attributes:
        queries: the first, and the one after the last.
        keys: likewise; keys at either end that none of the queries may attend to are left out.
        mask: of these queries and keys; None if it allows everything.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    mask: Bool[Array, "B N t s"] | None


def large_query_blocks() -> AbstractContextManager[None]:
    """Makes the core cut queries into larger blocks, for models that run outside of ``jax.jit``."""
    return set_within(_smallest, SMALLEST_LARGE_BLOCK)


def query_blocks(
    mask: Bool[Array, "B N T S"] | None, queries: int, keys: int
) -> Iterator[QueryBlock]:
    """Yields the queries in blocks, or in one block if the mask is not a numpy array.

    Args:
        mask: of four dimensions, any of which may be 1.
        queries: T.
        keys: S.
    """
    if not isinstance(mask, np.ndarray):
        yield QueryBlock((0, queries), (0, keys), mask)
        return
    smallest = max(_smallest.get(), SMALLEST_GPU_BLOCK if is_for_cuda() else 0)
    size = max(smallest, -(-queries // MOST_BLOCKS))
    for start in range(0, queries, size):
        rows = slice(start, min(start + size, queries))
        part = cut(mask, rows, slice(None))
        part = np.broadcast_to(part, (*part.shape[:3], keys))
        seen = np.flatnonzero(part.any(axis=(0, 1, 2)))
        # A block that may attend to nothing at all still has a row of weights: zeros.
        first, last = (seen[0], seen[-1] + 1) if len(seen) else (0, keys)
        part = part[..., first:last]
        yield QueryBlock((rows.start, rows.stop), (first, last), None if part.all() else part)


def cut(x: Array, queries: slice, keys: slice) -> Array:
    """Returns rows and columns of an array that is broadcastable to (B, N, T, S)."""
    rows = slice(None) if x.shape[2] == 1 else queries
    return x[:, :, rows, slice(None) if x.shape[3] == 1 else keys]


def cut_part(x: Array, starts: Sequence[Int[Array, ""]], sizes: Sequence[int]) -> Array:
    """Returns a part of an array; of dimensions that are 1 all, as they are broadcast.

    Args:
        x: any array.
        starts: where the part begins, along each dimension; may be unknown while tracing.
        sizes: the shape of the part.
    """
    here = zip(starts, sizes, x.shape, strict=True)
    cuts = [
        (jnp.zeros_like(start), 1) if length == 1 else (start, size) for start, size, length in here
    ]
    return jax.lax.dynamic_slice(x, [start for start, _ in cuts], [size for _, size in cuts])
