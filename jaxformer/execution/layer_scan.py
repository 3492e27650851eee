"""One loop over equal blocks, so that a deep model compiles as fast as a shallow one."""

import contextvars
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array

from jaxformer.execution.scopes import set_within
from jaxformer.execution.sharding import current_layout

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
    # Over many devices, finding out an index would gather the gradient that it cuts.
    stack = _stack if current_layout() is None else lambda *arrays: jnp.stack(arrays)
    stacked = jax.tree.map(stack, *states)

    def step(x: Array, state: Any) -> tuple[Array, Any]:
        result = run(nnx.merge(definitions[0], state), x)
        return result if isinstance(result, tuple) else (result, None)

    x, more = jax.lax.scan(step, x, stacked)
    if more is None:
        return x, None
    return x, [jax.tree.map(lambda array: array[layer], more) for layer in range(len(blocks))]  # noqa: B023


@jax.custom_vjp
def _stack(*arrays: Array) -> Array:
    """Returns ``jnp.stack(arrays)``, with a gradient that XLA compiles once for all layers.

    What is computed of a layer's gradient, such as its update, fuses with cutting it out. XLA on
    CPUs compiles equal fusions once, but a layer's index that stands in them makes each another.
    """
    return jnp.stack(arrays)


def _cut(count: int, gradient: Array) -> tuple[Array, ...]:
    def cut(gradient: Array) -> tuple[Array, ...]:
        layers = _hidden_range(count, gradient)
        return tuple(jax.lax.dynamic_index_in_dim(gradient, i, keepdims=False) for i in layers)

    found: tuple[Array, ...] = jax.lax.platform_dependent(
        gradient, cpu=cut, default=lambda gradient: tuple(gradient)
    )
    return found


_stack.defvjp(lambda *arrays: (jnp.stack(arrays), len(arrays)), _cut)


def _hidden_range(count: int, array: Array) -> tuple[Array, ...]:
    """Returns 0 … count - 1, from a call that XLA does not look into; any array will do."""
    # Always 0, which XLA does not see: calls of constants are computed while compiling.
    zero = jnp.minimum((jnp.ravel(array)[0] > 0).astype(jnp.int32), 0)
    with set_xla_metadata(inlineable="false"):
        hidden: tuple[Array, ...] = jax.jit(
            lambda first: tuple(first + layer for layer in range(count))
        )(zero)
    return hidden
