"""Random arrays that are drawn after a model is built, by one program for each kind of array.

Inside one compiled program every draw is written out, so that a deep model's weights take longer to
compile than to draw. Here arrays of one shape and distribution share a program.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Array

# From a key and a shape to an array; equal ones draw the same numbers.
Sample = Callable[[Array, tuple[int, ...]], Array]


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
    programs: dict[Hashable, Callable[[Array], Array]] = {}

    def draw(name: str, delayed: DelayedDraw) -> Array:
        sharding = None if shardings is None else shardings[name]
        kind = (delayed.sample, delayed.shape, sharding)
        if kind not in programs:
            programs[kind] = jax.jit(
                lambda key: delayed.sample(key, delayed.shape), out_shardings=sharding
            )
        return programs[kind](delayed.key)

    return {
        name: draw(name, array) if isinstance(array, DelayedDraw) else array
        for name, array in arrays.items()
    }
