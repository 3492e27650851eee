"""A window whose rows belong to different requests: each comes and goes by itself.

All rows end at one slot, so that the model extends them together, and begin where their padding
ends. A row is taken over by writing another text's tokens, keys and values so that they end there
too. None of these knows its slot, only its position in its own text: so all rows may be shifted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxformer.execution import lengths
from jaxformer.execution.token_window import Window


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class SharedWindow(Window):
    """A ``Window`` with what is each row's own.

    Attributes:
        ended_B: which rows are free, or wait for the host.
        index_B: how many tokens the text of each row has.
        left_B: how many each may still make.
        keys_B: what each draws from; None where nothing is drawn.
    """

    index_B: Int[Array, "B"]  # noqa: N815
    left_B: Int[Array, "B"]  # noqa: N815
    keys_B: Array | None  # noqa: N815

    @classmethod
    def empty(cls, rows: int, slots: int, cache: list[Any], key: Array | None) -> "SharedWindow":
        """A window of free rows.

        Args:
            rows: how many.
            slots: how many tokens the cache has room for.
            cache: of these slots.
            key: any; its kind is that of all keys.
        """
        zeros = jnp.zeros((rows,), jnp.int32)
        return cls(
            tokens_BS=jnp.zeros((rows, slots + 1), jnp.int32),
            padding_B=zeros,
            ended_B=jnp.ones((rows,), bool),
            length=jnp.int32(1),
            cache=cache,
            index_B=zeros,
            left_B=zeros,
            keys_B=None if key is None else jnp.stack([key] * rows),
        )

    def append(self, token_B: Int[Array, "B"], stop_tokens: Int[Array, "n"]) -> None:
        """Writes one more token into every row; one that has made its last ends."""
        is_going_B = ~self.ended_B
        super().append(token_B, stop_tokens)
        self.index_B = self.index_B + is_going_B
        self.left_B = self.left_B - is_going_B
        self.ended_B = self.ended_B | (self.left_B <= 0)

    def shift(self, count: Int[Array, ""]) -> "SharedWindow":
        """All rows ``count`` slots further on, or back where it is negative.

        Slots that come in at one side are padding, or not yet filled.
        """

        def move(x: Array) -> Array:
            return jnp.roll(x, count, axis=1) if x.ndim > 1 else x

        return dataclasses.replace(
            self,
            tokens_BS=move(self.tokens_BS),
            cache=jax.tree.map(move, self.cache),
            # A row that ended before the others began has padding of less than none.
            padding_B=jnp.maximum(self.padding_B + count, 0),
            length=self.length + count,
        )

    def place(
        self,
        row: Int[Array, ""],
        text: Window,
        index: Int[Array, ""],
        left: Int[Array, ""],
        key: Array | None,
    ) -> "SharedWindow":
        """A row taken over by a text, which ends where all rows end.

        Args:
            row: which.
            text: a window of one row without padding, at most as long as this one.
            index: how many of its tokens the model has made.
            left: how many more it may make.
            key: what they are drawn from.
        """
        start = self.length - text.length

        def write(x: Array, new: Array) -> Array:
            if x.ndim < 2:
                return x
            room = [(0, 0)] * new.ndim
            room[1] = (0, x.shape[1] - new.shape[1])
            whole = jnp.roll(jnp.pad(new, room), start, axis=1)
            return jax.lax.dynamic_update_slice_in_dim(x, whole, row * new.shape[0], axis=0)

        return dataclasses.replace(
            self,
            tokens_BS=write(self.tokens_BS, text.tokens_BS),
            cache=jax.tree.map(write, self.cache, text.cache),
            padding_B=self.padding_B.at[row].set(start),
            ended_B=self.ended_B.at[row].set(False),
            index_B=self.index_B.at[row].set(index),
            left_B=self.left_B.at[row].set(left),
            keys_B=None if self.keys_B is None else self.keys_B.at[row].set(key),
        )

    def with_slots(self, slots: int) -> "SharedWindow":
        """The same window with room for ``slots`` tokens."""
        return lengths.lengthen(self, slots - self.slots)


lengthen_shared = jax.jit(SharedWindow.with_slots, static_argnames="slots")
shift_shared = jax.jit(SharedWindow.shift, donate_argnames="self")
place_text = jax.jit(SharedWindow.place, donate_argnames="self")
