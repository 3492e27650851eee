"""jaxformer modules with the call signatures of other code bases.

Each is a subclass of the component that it replaces, with the same parameters at the same paths.
Masks are boolean, True = may attend.
"""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxformer.attention import MultiHeadAttention
from jaxformer.blocks import PostNormBlock, PreNormBlock
from jaxformer.layers import Dropout
from jaxformer.masks import causal_mask
from jaxformer.positions import ALiBi, LearnedPositions, Rotary, SinusoidalPositions

Hidden = Float[Array, "B T D"]
Mask = Bool[Array, "..."] | None


class AddedSinusoids(SinusoidalPositions):
    """Called with x: x + rows, then dropout (encdec's PositionalEncoding, unified's SinusoidalPE).

    Args:
        max_length: the number of positions.
        d_model: D.
        dropout: rate on the sum.
    """

    def __init__(self, max_length: int, d_model: int, *, dropout: float = 0.0):
        super().__init__(max_length, d_model)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Hidden) -> Hidden:  # type: ignore[override]
        """Returns x with its positions."""
        return self.dropout(x + super().__call__(x.shape[1]).astype(x.dtype))


class AddedPositions(LearnedPositions):
    """Called with x: x + rows, then dropout (encdec's LearnedPositionalEmbedding, LearnedPE).

    Args:
        max_length: the number of positions.
        d_model: D.
        dropout: rate on the sum.
        rngs: where the initial rows come from.
    """

    def __init__(self, max_length: int, d_model: int, *, dropout: float = 0.0, rngs: nnx.Rngs):
        super().__init__(max_length, d_model, rngs=rngs)
        self.dropout = Dropout(dropout)

    def __call__(self, x: Hidden) -> Hidden:  # type: ignore[override]
        """Returns x with its positions."""
        return self.dropout(x + super().__call__(x.shape[1]).astype(x.dtype))


class RotaryOnHeads(Rotary):
    """Called with queries or keys of shape (B, N, T, H), or with both, which it rotates."""

    def __call__(self, *arrays: Float[Array, "B N T H"]) -> Any:
        """Returns the arrays rotated by position; a single array for a single argument."""
        positions = jnp.arange(arrays[0].shape[2])[None]
        rotated = tuple(self.rotate(x.swapaxes(1, 2), positions).swapaxes(1, 2) for x in arrays)
        return rotated[0] if len(rotated) == 1 else rotated


class ALiBiTable(ALiBi):
    """Called with a length T: the bias (1, N, T, T)."""

    def __call__(self, length: int) -> Float[Array, "1 N T T"]:
        """Returns -slope · |distance|."""
        position = jnp.arange(length)
        query = jnp.zeros((1, 1, self.num_heads, 1))
        return self.bias(query, position[None, :] - position[:, None])


class CausalAttention(MultiHeadAttention):
    """Called with x alone: always causal (charlm's attentions).

    Args:
        d_model: D.
        num_heads: N.
        context_length: the largest number of tokens; None is any number.
        settings: see ``MultiHeadAttention``.
    """

    def __init__(
        self, d_model: int, num_heads: int, *, context_length: int | None = None, **settings: Any
    ):
        super().__init__(d_model, num_heads, **settings)
        self.context_length = context_length

    def __call__(self, x: Hidden, **settings: Any) -> Any:  # type: ignore[override]
        """Attends from every position to those before it and itself."""
        return super().__call__(x, mask=_causal(x, self.context_length), **settings)


class CausalBlock(PreNormBlock):
    """Called with x alone: always causal (charlm's Block).

    Args:
        components: see ``Block``.
        context_length: the largest number of tokens; None is any number.
        settings: see ``Block``.
    """

    def __init__(self, *components: Any, context_length: int | None = None, **settings: Any):
        super().__init__(*components, **settings)
        self.context_length = context_length

    def __call__(self, x: Hidden, **settings: Any) -> Any:  # type: ignore[override]
        """Returns the residual stream after this block."""
        return super().__call__(x, _causal(x, self.context_length), **settings)


def _causal(x: Hidden, context_length: int | None) -> Bool[Array, "1 1 T T"]:
    length = x.shape[1]
    if context_length is not None and length > context_length:
        raise ValueError(f"tokens must be at most context_length={context_length}: got {length}")
    return causal_mask(length)


class SelfAttention(MultiHeadAttention):
    """Called with (x, mask): keys and values are of x (minimal's MinimalAttention)."""

    def __call__(self, x: Hidden, mask: Mask = None, **settings: Any) -> Any:  # type: ignore[override]
        """Attends from x to x."""
        return super().__call__(x, mask=mask, **settings)


class TwoInputAttention(MultiHeadAttention):
    """Called with (q_input, kv_input, mask), unified's attentions."""

    def __call__(  # type: ignore[override]
        self, q_input: Hidden, kv_input: Hidden | None = None, mask: Mask = None, **settings: Any
    ) -> Any:
        """Attends from ``q_input`` to ``kv_input``, which defaults to it."""
        return super().__call__(q_input, kv_input, mask=mask, **settings)


class DecoderLayer(PostNormBlock):
    """Called with (x, memory, mask, memory_mask), encdec's DecoderLayer."""

    def __call__(  # type: ignore[override]
        self,
        x: Hidden,
        memory: Hidden,
        mask: Mask = None,
        memory_mask: Mask = None,
        **settings: Any,
    ) -> Any:
        """Returns the residual stream after this block."""
        return super().__call__(x, mask, memory, memory_mask, **settings)
