"""What a generating program sees of its rows: tokens in buffers, with a key/value cache."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxformer.execution import lengths

if TYPE_CHECKING:
    from jaxformer.attention import LayerCache
    from jaxformer.transformer_lm import TransformerLM


class TokenRows:
    """Rows of tokens that grow by one token at a time; what else is kept of them, a subclass says.

    Attributes:
        tokens_BS: ids, in a buffer.
        ended_B: which rows have made a stop token.
        length: how many slots are filled.
    """

    tokens_BS: Int[Array, "B S"]  # noqa: N815
    ended_B: Bool[Array, "B"]  # noqa: N815
    length: Int[Array, ""]

    def append(self, token_B: Int[Array, "B"], stop_tokens: Int[Array, "n"]) -> None:
        """Writes one more token into every row; a row that has ended repeats its last."""
        last_B1 = jax.lax.dynamic_slice_in_dim(self.tokens_BS, self.length - 1, 1, axis=1)
        token_B1 = jnp.where(self.ended_B[:, None], last_B1, token_B[:, None].astype(jnp.int32))
        self.tokens_BS = jax.lax.dynamic_update_slice_in_dim(
            self.tokens_BS, token_B1, self.length, axis=1
        )
        self.ended_B = self.ended_B | jnp.any(token_B1 == stop_tokens[None, :], axis=1)
        self.length = self.length + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Window(TokenRows):
    """What the model sees, in buffers of a fixed length, and the tokens that it makes there.

    Attributes:
        tokens_BS: ids, padded on the left; there is one slot more than the cache has, for the
            token made from a full window.
        padding_B: how many slots of each row are padding.
        ended_B: which rows have made a stop token.
        length: how many slots are filled, padding included.
        cache: of all tokens but the last; empty before the first token is made.
    """

    tokens_BS: Int[Array, "B S"]  # noqa: N815
    padding_B: Int[Array, "B"]  # noqa: N815
    ended_B: Bool[Array, "B"]  # noqa: N815
    length: Int[Array, ""]
    cache: list["LayerCache"]

    @classmethod
    def pack(cls, rows: list[np.ndarray], ended_B: np.ndarray, slots: int) -> "Window":
        """A window of ``slots`` + 1 slots around the given rows."""
        length = max(len(row) for row in rows)
        tokens = np.zeros((len(rows), slots + 1), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[length - len(row) : length] = row
        padding = np.array([length - len(row) for row in rows], np.int32)
        placed: Any = jax.device_put((tokens, padding, ended_B), may_alias=False)
        return cls(placed[0], placed[1], placed[2], jnp.int32(length), cache=[])

    @property
    def slots(self) -> int:
        """How many tokens the cache has room for."""
        return self.tokens_BS.shape[1] - 1

    def with_slots(self, slots: int) -> "Window":
        """The same window with room for ``slots`` tokens."""
        return lengths.lengthen(self, slots - self.slots)

    def read(
        self, model: "TransformerLM", start: Int[Array, ""] | int, count: int
    ) -> Float[Array, "B T D"]:
        """The residual stream at ``count`` slots from ``start`` on, which go into the cache."""
        tokens = jax.lax.dynamic_slice_in_dim(self.tokens_BS, start, count, axis=1)
        positions = (start + jnp.arange(count))[None, :] - self.padding_B[:, None]
        is_token_BS = jnp.arange(self.cache[0].slots)[None, :] >= self.padding_B[:, None]
        self.cache = [dataclasses.replace(layer, length=jnp.int32(start)) for layer in self.cache]
        hidden = model.hidden(
            tokens,
            is_token_BS[:, None, None, :],
            # Only tokens that nobody asked for stand past the context.
            positions=jnp.clip(positions, 0, model.config.context_length - 1),
            cache=self.cache,
        )
        assert not isinstance(hidden, tuple)
        return hidden


lengthen_window = jax.jit(Window.with_slots, static_argnames="slots")
