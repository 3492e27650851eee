"""Position schemes: rows added to embeddings, or changes to queries, keys and scores.

``LearnedPositions`` and ``SinusoidalPositions`` give rows to add to the token embeddings.
``NoPositions``, ``Rotary``, ``ALiBi``, ``RelativePositions`` and ``RelativeBuckets`` are handed to
an attention and may turn its queries and keys (``rotate``) or add to its scores (``bias``).

Tables are computed in numpy float32 by the operations of the PyTorch originals and cast
afterwards: at position 5000 one bit of a float32 frequency is 3e-4 of the table, so computing
them more exactly would diverge from every published checkpoint.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxformer.execution.added_rows import add_to_each
from jaxformer.layers import Embedding, Linear, in_float32
from jaxformer.position_tables import (
    RotaryScaling,
    distance_buckets,
    length_frequencies,
    rotary_tables,
    sinusoidal_table,
)


class LearnedPositions(nnx.Module):
    """Looks up a trained row for each position: position t has row t + ``offset``.

    The table has ``offset`` rows more, which no position reads (OPT, arXiv 2205.01068, has 2).
    """

    def __init__(self, max_length: int, d_model: int, *, offset: int = 0, rngs: nnx.Rngs):
        self.offset = offset
        self.embedding = Embedding(max_length + offset, d_model, rngs=rngs).embedding

    def __call__(
        self, length: int, positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Returns the rows of ``positions``, or of 0 … length - 1 with a batch dimension of 1."""
        table_SD = self.embedding[...][self.offset :]
        return table_SD[None, :length] if positions is None else table_SD[positions]


class SinusoidalPositions(nnx.Module):
    """Gives fixed rows: sin in even dimensions, cos in odd ones (arXiv 1706.03762, 3.5).

    Args:
        max_length: the number of positions, in tokens.
        d_model: D.
        halves: sines in the first half and cosines in the second, of
            position · exp(-ln(10000) · i / (D // 2 - 1)); where D is odd, the last dimension is 0
            (tensor2tensor; XGLM, arXiv 2112.10668).
        offset: position t has the row of t + offset (XGLM: 2).
        exact: with halves, of position / 10000^(2i / D), computed in float64 (Marian).

    A module that was ported computes with the rows it came with, ``table``, a hashable object that
    holds them as ``array``; they may differ in their last bits.
    """

    table: Any = None

    def __init__(
        self,
        max_length: int,
        d_model: int,
        *,
        halves: bool = False,
        offset: int = 0,
        exact: bool = False,
    ):
        self.max_length = max_length
        self.d_model = d_model
        self.halves = halves
        self.offset = offset
        self.exact = exact

    def __call__(
        self, length: int, positions: Int[Array, "B T"] | None = None
    ) -> Float[Array, "B T D"]:
        """Returns the rows of ``positions``, or of 0 … length - 1 with a batch dimension of 1."""
        table_SD = self.rows()
        if positions is None:
            return jnp.asarray(table_SD[None, :length])
        return jnp.asarray(table_SD)[positions]

    def rows(self) -> np.ndarray:
        """Returns all rows (max_length, d_model)."""
        if self.table is not None:
            return np.asarray(self.table.array)
        count = self.max_length + self.offset
        return sinusoidal_table(count, self.d_model, self.halves, self.exact)[self.offset :]


def embed_tokens(
    tokens: Int[Array, "B T"],
    token_embedding: Embedding,
    position_embedding: LearnedPositions | SinusoidalPositions | None,
    *,
    context_length: int,
    projection: Linear | None = None,
    scale: float | None = None,
    added: Float[Array, "B T D"] | None = None,
    positions: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T D"]:
    """Returns the tokens' rows times ``scale``, plus ``added``, plus their positions' rows.

    Where there is a ``projection``, it takes the tokens' rows to the width of the others first.

    Raises:
        ValueError: more tokens than ``context_length``.
    """
    length = tokens.shape[1]
    if length > context_length:
        raise ValueError(f"{length} tokens do not fit context_length={context_length}")
    x = token_embedding(tokens)
    if projection is not None:
        x = projection(x)
    if scale is not None:
        x = in_float32(lambda e: e * scale, x)
    if added is not None:
        x = x + added
    if position_embedding is not None:
        x = add_to_each(x, position_embedding(length, positions).astype(x.dtype))
    return x


class NoPositions(nnx.Module):
    """Leaves the attention without positions; also the base class of the other schemes."""

    def rotate(
        self, x_BTNH: Float[Array, "B T N H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Returns queries or keys as they enter the scores."""
        return x_BTNH

    def bias(
        self, q_BTNH: Float[Array, "B T N H"], distance_TS: Int[Array, "T S"]
    ) -> Float[Array, "B N T S"] | None:
        """Returns what is added to the scaled scores; a distance is key - query position."""
        return None

    def content_bias(
        self,
        q_BTNH: Float[Array, "B T N H"],
        k_BSNH: Float[Array, "B S N H"],
        rows_RD: Float[Array, "R D"],
        distance_TS: Int[Array, "T S"],
        q_proj: Linear,
        k_proj: Linear,
        scale: float,
    ) -> Float[Array, "B N T S"] | None:
        """Returns what rows of distances add to the scores; see ``DisentangledPositions``."""
        return None


class Rotary(NoPositions):
    """Turns pairs of dimensions by an angle in proportion to the position (arXiv 2104.09864).

    Args:
        head_dim: H, the width of a head.
        max_length: the number of positions, in tokens.
        base: pair i turns by position / base^(2i / rotated width) radians.
        fraction: the share of H, from its start, that is turned.
        interleaved: pairs are (2i, 2i+1) as in the paper; otherwise (i, i + half) as in
            Llama's published weights.
        scaling: see ``RotaryScaling``.

    A module that was ported computes with the tables it came with, ``cos`` and ``sin``, see
    ``SinusoidalPositions``.

    Raises:
        ValueError: the turned width is odd or zero, or longrope has not a factor for each pair.
    """

    cos: Any = None
    sin: Any = None

    def __init__(
        self,
        head_dim: int,
        max_length: int,
        *,
        base: float = 10000.0,
        fraction: float = 1.0,
        interleaved: bool = False,
        scaling: RotaryScaling | None = None,
    ):
        self.width = int(head_dim * fraction)
        self.max_length = max_length
        self.base = base
        self.interleaved = interleaved
        self.scaling = scaling
        if self.width < 2 or self.width % 2:
            raise ValueError(
                "rotary turns an even number of dimensions: got "
                f"{self.width} of head_dim={head_dim}, fraction={fraction}"
            )
        if scaling is not None:
            scaling.check_pairs(self.width // 2)

    def rotate(
        self, x_BTNH: Float[Array, "B T N H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """Returns the heads with their first ``width`` dimensions turned."""
        cos, sin = (rows[:, :, None, :] for rows in self._rows(positions, x_BTNH.dtype))
        turned, rest = x_BTNH[..., : self.width], x_BTNH[..., self.width :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, axis=-1)
        pair = (first * cos - second * sin, first * sin + second * cos)
        if self.interleaved:
            turned = jnp.stack(pair, axis=-1).reshape(turned.shape)
        else:
            turned = jnp.concatenate(pair, axis=-1)
        return jnp.concatenate((turned, rest), axis=-1)

    def _rows(self, positions: Int[Array, "B T"], dtype: Any) -> Iterator[Array]:
        """Cosines and sines at the positions."""
        scaling, is_given = self.scaling, self.cos is not None
        if is_given or scaling is None or not scaling.follows_length(self.max_length):
            return (jnp.asarray(table, dtype)[positions] for table in self.tables())
        table_LH = length_frequencies(self.max_length, self.width, self.base, scaling)
        row = jnp.max(positions) + 1 - scaling.original_context_length
        frequency_H = jnp.asarray(table_LH)[jnp.clip(row, 0, len(table_LH) - 1)]
        angle_BTH = positions[:, :, None].astype(frequency_H.dtype) * frequency_H[None, None]
        wide = angle_BTH.astype(jnp.promote_types(dtype, frequency_H.dtype))

        def rows(function: Any) -> Float[Array, "B T _"]:
            # Rounded to float32, as all tables are; XLA may leave out a cast to float32 and back.
            bits = jnp.finfo(frequency_H.dtype)
            once = jax.lax.reduce_precision(function(wide), bits.nexp, bits.nmant)
            factor = np.float32(scaling.table_factor)
            return (once.astype(frequency_H.dtype) * factor).astype(dtype)

        return map(rows, (jnp.cos, jnp.sin))

    def tables(self, length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Returns all cosines and sines, each float32 (max_length, width / 2).

        ``length`` is that of the text, default max_length; see ``RotaryScaling``.
        """
        cos, sin = rotary_tables(self.max_length, self.width, self.base, self.scaling, length)
        cos = cos if self.cos is None else np.asarray(self.cos.array)
        return cos, sin if self.sin is None else np.asarray(self.sin.array)


class ALiBi(NoPositions):
    """Lowers scores linearly with distance, at a slope for each head (arXiv 2108.12409, 3).

    The distance is absolute, so the same bias serves models that see both directions.

    Args:
        num_heads: N.
        max_bias: the exponents of the slopes go up to it, see ``alibi_slopes`` (MPT sets it).
        scale: what the bias is multiplied by (Falcon, arXiv 2311.16867: 1/sqrt(H), as it scales
            scores after the bias has been added).
        in_bfloat16: the bias is slope · key position with both factors and the product rounded to
            bfloat16, whatever the model's dtype, as Falcon computes it. Without that rounding it
            differs from the usual bias by one number a query, which a softmax ignores; with it,
            keys beyond position 256 share their biases, and only causal models make sense.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        max_bias: float = 8.0,
        scale: float = 1.0,
        in_bfloat16: bool = False,
    ):
        self.num_heads = num_heads
        self.max_bias = max_bias
        self.scale = scale
        self.in_bfloat16 = in_bfloat16

    def bias(
        self, q_BTNH: Float[Array, "B T N H"], distance_TS: Int[Array, "T S"]
    ) -> Float[Array, "1 N T S"]:
        """Returns -slope · |distance| · scale (1, N, T, S), in float32 or wider."""
        slopes = alibi_slopes(self.num_heads, self.max_bias)
        if self.in_bfloat16:
            keys = np.arange(distance_TS.shape[1]).astype(jnp.bfloat16)
            bias_NS = slopes.astype(jnp.bfloat16)[:, None] * keys
            shape = (1, self.num_heads, *distance_TS.shape)
            bias = jnp.broadcast_to(jnp.asarray(bias_NS, jnp.float32)[None, :, None], shape)
        else:
            slopes_N = jnp.asarray(slopes)
            bias = -slopes_N[None, :, None, None] * jnp.abs(distance_TS)[None, None].astype(
                slopes_N.dtype
            )
        if self.scale == 1:
            return bias
        return bias.astype(jnp.promote_types(q_BTNH.dtype, jnp.float32)) * self.scale


class RelativePositions(NoPositions):
    """Adds to the scores a trained key for every distance (arXiv 1803.02155, eq. 4).

    ``embedding`` has shape (2·max_distance + 1, head_dim), shared by all heads; farther keys use
    the last row on their side. Queries come in already multiplied by the attention's scale.
    """

    def __init__(self, max_distance: int, head_dim: int, *, rngs: nnx.Rngs):
        self.max_distance = max_distance
        self.embedding = Embedding(2 * max_distance + 1, head_dim, rngs=rngs).embedding

    def bias(
        self, q_BTNH: Float[Array, "B T N H"], distance_TS: Int[Array, "T S"]
    ) -> Float[Array, "B N T S"]:
        """Returns q · embedding[clip(distance, -max_distance, max_distance) + max_distance]."""
        index_TS = jnp.clip(distance_TS, -self.max_distance, self.max_distance) + self.max_distance
        by_distance_BNTR = jnp.einsum("btnh,rh->bntr", q_BTNH, self.embedding[...])
        return jnp.take_along_axis(by_distance_BNTR, index_TS[None, None], axis=-1)


class RelativeBuckets(NoPositions):
    """Adds to the scores of each head a trained number for the distance (arXiv 1910.10683, 2.1).

    Distances share buckets, see ``distance_buckets``. ``embedding`` has shape (num_buckets,
    num_heads). The numbers do not depend on the queries, so one call may serve all layers.

    Args:
        num_buckets: how many numbers each head has.
        num_heads: N.
        max_distance: from which on all keys share the last bucket.
        causal: whether later keys are never seen, and need no buckets.
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        num_buckets: int,
        num_heads: int,
        *,
        max_distance: int = 128,
        causal: bool = False,
        rngs: nnx.Rngs,
    ):
        self.num_buckets = num_buckets
        self.num_heads = num_heads
        self.max_distance = max_distance
        self.causal = causal
        self.embedding = Embedding(num_buckets, num_heads, rngs=rngs).embedding

    def bias(
        self, q_BTNH: Float[Array, "B T N H"] | None, distance_TS: Int[Array, "T S"]
    ) -> Float[Array, "1 N T S"]:
        """Returns embedding[bucket(distance)] of each head; the queries may be None."""
        buckets = distance_buckets(self.num_buckets, self.max_distance, self.causal)
        # The table of distances is small: so the rows are picked once, and not for every pair.
        by_distance_RN = self.embedding[...][buckets]
        index_TS = jnp.clip(distance_TS, -self.max_distance, self.max_distance) + self.max_distance
        return by_distance_RN[index_TS].transpose(2, 0, 1)[None]


@functools.lru_cache(maxsize=32)
def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    """Returns the slopes, float32 (N,): 2^(-max_bias · i/N), i = 1 … N, if N is a power of two.

    Otherwise the slopes of the next smaller power of two, followed by every other slope of the
    next larger one, as the paper's code does. MPT sorts those of the next larger one: the same.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return _exact_slopes(num_heads, max_bias).astype(np.float32)


def _exact_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    power = 2 ** math.floor(math.log2(num_heads))

    def geometric(count: int) -> np.ndarray:
        return 2.0 ** (-max_bias * np.arange(1, count + 1) / count)

    extra = geometric(2 * power)[0::2][: num_heads - power]
    return np.concatenate((geometric(power), extra))
