"""One loop over equal blocks, so that a deep model compiles as fast as a shallow one."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxformer.execution.scopes import set_within

_scanning: contextvars.ContextVar[bool] = contextvars.ContextVar("scan_layers", default=False)


def scanned_layers(wanted: bool = True) -> AbstractContextManager[None]:
    """Makes models be traced so that equal blocks run in a ``jax.lax.scan``.

    The parameters stay stored block by block; they are stacked inside the compiled function, which
    copies them once. The numbers are the same, up to rounding
    where XLA fuses otherwise. A function that ``jax.jit`` has compiled stays as it was traced.
    """
    return set_within(_scanning, wanted)


def can_scan(blocks: Sequence[nnx.Module]) -> bool:
    """Returns whether to run these blocks in a loop: it is on, and only their numbers differ."""
    if not _scanning.get() or len(blocks) < 2:
        return False
    definitions, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), jax.tree.leaves(s)) for s in states]
    return all(d == definitions[0] for d in definitions) and all(s == shapes[0] for s in shapes)


def scan_layers(
    blocks: Sequence[nnx.Module], x: Array, run: Callable[[Any, Array], Any]
) -> tuple[Array, list[Any] | None]:
    """Runs blocks in turn; see ``can_scan``.

    Args:
        blocks: equal but for their numbers.
        x: what enters the first.
        run: from a block and what enters it to what leaves it, or to a pair of that and more.

    Returns:
        What leaves the last block, and what ``run`` gave more, block by block; None if nothing.
    """
    definitions, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *states)

    def step(x: Array, state: Any) -> tuple[Array, Any]:
        result = run(nnx.merge(definitions[0], state), x)
        return result if isinstance(result, tuple) else (result, None)

    x, more = jax.lax.scan(step, x, stacked)
    if more is None:
        return x, None
    return x, [jax.tree.map(lambda array: array[layer], more) for layer in range(len(blocks))]  # noqa: B023
