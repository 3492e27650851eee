"""Equal blocks share one trace, so that a deep model is traced about as fast as a shallow one.

XLA puts the shared function in the place of each of its calls, so that the program which runs is
the one that every block traced by itself would give.
"""

import contextvars
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jaxformer.execution.scopes import set_within

_sharing: contextvars.ContextVar[bool] = contextvars.ContextVar("shared_traces", default=True)

# From a block, its setting, what enters it and the dataclasses that it writes to, to its result.
Run = Callable[[Any, Any, Array, tuple[Any, ...]], Any]
# The same of one block, with its setting.
Call = Callable[[Array, tuple[Any, ...]], Any]


def shared_traces(wanted: bool = True) -> AbstractContextManager[None]:
    """Lets equal blocks share a trace, or not: for who watches modules while they are traced."""
    return set_within(_sharing, wanted)


def share_traces(run: Run, blocks: Sequence[nnx.Module], settings: Sequence[Any]) -> list[Call]:
    """Returns ``run`` of each block, traced once for blocks that differ in their numbers alone.

    A block that changes itself while it runs, as one whose dropout is recorded, has its own trace.
    Without ``jax.jit`` nothing is shared: each call would compile a program.

    Args:
        run: what to do with a block. Arrays that it takes from around are those of every call.
        blocks: of a stack.
        settings: one of each block; equal blocks have the same object.
    """
    calls: list[Call] = [
        functools.partial(run, block, setting)
        for block, setting in zip(blocks, settings, strict=True)
    ]
    if not _sharing.get() or len(blocks) < 2 or not _makes_a_program():
        return calls
    kinds: list[_Kind] = []
    for place, (block, setting) in enumerate(zip(blocks, settings, strict=True)):
        definition, state = nnx.split(block)
        new = _Kind(run, definition, [(x.shape, x.dtype) for x in jax.tree.leaves(state)], setting)
        kind = next((kind for kind in kinds if kind.equals(new)), new)
        if kind is new:
            kinds.append(kind)
        calls[place] = functools.partial(kind.call, calls[place], state)
    return calls


def _makes_a_program() -> bool:
    """Returns whether operators are written into a program now; else they run one by one.

    Under ``jax.grad`` alone they run, though what they are given are tracers.
    """
    return isinstance(jnp.zeros(()), jax.core.Tracer)


class _Kind:
    """Blocks that differ in their numbers alone. Arguments as they come up in ``share_traces``."""

    def __init__(
        self, run: Run, definition: Any, shapes: list[tuple[tuple[int, ...], Any]], setting: Any
    ):
        self.run = run
        self.definition = definition
        self.shapes = shapes
        self.setting = setting
        self.is_changed = False
        self._traced = jax.jit(self._block)

    def equals(self, other: "_Kind") -> bool:
        """Returns whether blocks of the other kind are of this one too."""
        return (
            self.setting is other.setting
            and self.shapes == other.shapes
            and bool(self.definition == other.definition)
        )

    def call(self, own: Call, state: Any, x: Array, written: tuple[Any, ...]) -> Any:
        """Returns the result of one block.

        Args:
            own: what calls this block by itself.
            state: the block's numbers.
            x: what enters it.
            written: dataclasses that it writes to.
        """
        result, after = self._traced(state, x, written)
        if self.is_changed:
            return own(x, written)
        for kept, new in zip(written, after, strict=True):
            if kept is not None:
                vars(kept).update(vars(new))
        return result

    def _block(self, state: Any, x: Array, written: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        block = nnx.merge(self.definition, state)
        result = self.run(block, self.setting, x, written)
        definition, after = nnx.split(block)
        before = jax.tree.leaves(state)
        self.is_changed = definition != self.definition or any(
            one is not other for one, other in zip(before, jax.tree.leaves(after), strict=True)
        )
        return result, written
