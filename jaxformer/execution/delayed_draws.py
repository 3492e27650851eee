"""Random arrays that are drawn after a model is built, by few programs.

Inside one compiled program every draw is written out, so that a deep model's weights take longer to
compile than to draw. Here arrays of one distribution share a program if they are small, and arrays
of one shape and distribution otherwise.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Mapping
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array, Float

# From a key and a shape to an array; equal ones draw the same numbers. Each number depends on the
# key and its place in row-major order alone, so the first of a longer array are the same.
Sample = Callable[[Array, tuple[int, ...]], Array]

# A program draws as many numbers for each of its arrays as the largest has: at most so many in all.
# They are drawn in a tenth of a second; another program takes half a second to compile.
MOST_TOGETHER = 2**22


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedKey:
    """A key from which initializers make a ``DelayedDraw``."""

    key: Array


class DelayedKeys:
    """In place of ``nnx.Rngs`` where a module is built whose arrays are drawn later.

    Args:
        rngs: an ``nnx.Rngs``, whose keys these are.
    """

    def __init__(self, rngs: Any):
        self._rngs = rngs

    def params(self) -> DelayedKey:
        """Returns the next key."""
        return DelayedKey(self._rngs.params())


@dataclasses.dataclass(frozen=True, eq=False)
class DelayedDraw:
    """An array that a module holds until it is drawn; it has a shape and a dtype, and no numbers.

    Attributes:
        sample: hashable; what draws it.
        key: from which it is drawn.
        shape: of the array.
    """

    sample: Sample
    key: Array
    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        """The dtype in which it will be drawn."""
        return jnp.result_type(float)

    def __getitem__(self, index: EllipsisType) -> "DelayedDraw":
        """Returns itself: a variable of a module gives its value so."""
        if index is not ...:
            raise TypeError("numbers that are drawn later cannot be read yet")
        return self


def draw_arrays(
    arrays: Mapping[str, Array | DelayedDraw], shardings: Mapping[str, Sharding] | None = None
) -> dict[str, Array]:
    """Returns the arrays, with those drawn that are yet to be drawn.

    The numbers are those of ``sample(key, shape)`` inside any compiled program.

    Args:
        arrays: by name.
        shardings: where each drawn array lies, in parts that its devices draw by themselves; None
            draws on the default device. What is no draw stays where it is.
    """
    draws = {name: draw for name, draw in arrays.items() if isinstance(draw, DelayedDraw)}
    drawn = {} if shardings is not None else _draw_together(draws)
    rest = {name: draw for name, draw in draws.items() if name not in drawn}
    drawn |= _draw_by_shape(rest, shardings)
    return {
        name: drawn[name] if isinstance(array, DelayedDraw) else array
        for name, array in arrays.items()
    }


def _draw_together(draws: Mapping[str, DelayedDraw]) -> dict[str, Array]:
    """Returns the arrays of those distributions whose arrays are all small."""
    groups: dict[Sample, dict[str, DelayedDraw]] = {}
    for name, draw in draws.items():
        groups.setdefault(draw.sample, {})[name] = draw
    found = {}
    for sample, group in groups.items():
        length = max(math.prod(draw.shape) for draw in group.values())
        if length * len(group) > MOST_TOGETHER:
            continue
        rows = _draw_rows([draw.key for draw in group.values()], sample, length)
        for row, (name, draw) in zip(np.asarray(rows), group.items(), strict=True):
            array = row[: math.prod(draw.shape)].reshape(draw.shape)
            # A copy, as all rows lie in one piece of memory.
            found[name] = jax.device_put(array, may_alias=False)
    return found


@functools.partial(jax.jit, static_argnames=("sample", "length"))
def _draw_rows(keys: list[Array], sample: Sample, length: int) -> Float[Array, "n length"]:
    rows: Array = jax.lax.map(lambda key: sample(key, (length,)), jnp.stack(keys))
    return rows


def _draw_by_shape(
    draws: Mapping[str, DelayedDraw], shardings: Mapping[str, Sharding] | None
) -> dict[str, Array]:
    programs: dict[Hashable, Callable[[Array], Array]] = {}

    def draw_one(name: str, delayed: DelayedDraw) -> Array:
        sharding = None if shardings is None else shardings[name]
        kind = (delayed.sample, delayed.shape, sharding)
        if kind not in programs:
            programs[kind] = jax.jit(
                lambda key: delayed.sample(key, delayed.shape), out_shardings=sharding
            )
        return programs[kind](delayed.key)

    return {name: draw_one(name, delayed) for name, delayed in draws.items()}
