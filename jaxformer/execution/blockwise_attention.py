"""Attention over long texts on a CPU: one block of scores at a time is in memory, on both passes.

The mathematics is that of ``attention_core.scaled_dot_product_attention``. As FlashAttention does
(arXiv 2205.14135; 2307.08691), the forward pass keeps of each query the largest score and the sum
of exponentials beside the output, and the backward pass computes each block's scores once more. A
block has all keys that its queries may attend to, so that its softmax is an ordinary one. Blocks
run one after the other, in loops that XLA cannot run side by side; keys that no query of a block
may attend to are left out.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxformer.execution.attention_backends import MaskPattern
from jaxformer.execution.query_blocks import cut_part

if TYPE_CHECKING:
    from jaxformer.layers import Dropout

# The queries of a block, those of all heads that share a key head counted: its scores should stay
# in a CPU's cache, and its products be worth several cores.
BLOCK_ROWS = 256
# Blocks of one loop have as many keys as the one that needs most. More loops take longer to
# compile and leave fewer keys in vain: of a causal mask's half, 8 loops add an eighth.
MOST_LOOPS = 8
# XLA unrolls a loop of one block. A few unrolled blocks are the fastest, many run side by side and
# take the memory that loops are to save.
MOST_UNROLLED = 4


@dataclasses.dataclass(frozen=True)
class _Loop:
    """Equal blocks, one after the other.

    Attributes:
        first: the first query.
        size: the queries of a block.
        keys: how many keys each block has.
        starts: the first key of each block.
    """

    first: int
    size: int
    keys: int
    starts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What is known while tracing.

    Attributes:
        shape: B, N, T, S.
        kv_heads: K.
        scale: what scores are multiplied by.
        soft_cap: see ``scaled_dot_product_attention``.
        pattern: the mask as a rule; None where it is an array.
        loops: all blocks.
        dropout: the definition of the ``Dropout`` on the weights; None if nothing is dropped.
    """

    shape: tuple[int, int, int, int]
    kv_heads: int
    scale: float
    soft_cap: float | None
    pattern: MaskPattern | None
    loops: tuple[_Loop, ...]
    dropout: Any


def blockwise_attention(
    q_BTNH: Float[Array, "B T N H"],
    k_BSKH: Float[Array, "B S K H"],
    v_BSKH: Float[Array, "B S K V"],
    *,
    mask: Bool[Array, "B N T S"] | None,
    pattern: MaskPattern | None,
    scale: float,
    soft_cap: float | None = None,
    dropout: "Dropout | None" = None,
    block_rows: int = BLOCK_ROWS,
) -> Float[Array, "B T N V"]:
    """Computes ``scaled_dot_product_attention`` block by block, without the weights.

    The same weights are dropped as there. It can be differentiated in reverse mode alone.

    Args:
        q_BTNH: queries.
        k_BSKH: keys; query head n uses key/value head n // (N / K).
        v_BSKH: values.
        mask: of four dimensions, any of which may be 1; see ``scaled_dot_product_attention``.
        pattern: the mask as a rule; None takes it as it is.
        scale: what scores are multiplied by.
        soft_cap: see ``scaled_dot_product_attention``.
        dropout: applied to the weights.
        block_rows: the queries of a block, those of all heads that share a key head counted.
    """
    batch, queries, num_heads, _ = q_BTNH.shape
    keys, kv_heads = k_BSKH.shape[1:3]
    size = min(queries, max(1, block_rows * kv_heads // num_heads))
    definition, state = None, None
    if dropout is not None and dropout.active:
        definition, state = nnx.split(dropout)
    settings = _Settings(
        shape=(batch, num_heads, queries, keys),
        kv_heads=kv_heads,
        scale=scale,
        soft_cap=soft_cap,
        pattern=pattern,
        loops=tuple(_loops(mask, pattern, queries, keys, size)),
        dropout=definition,
    )
    group = num_heads // kv_heads
    q_BTKGH = q_BTNH.reshape(batch, queries, kv_heads, group, -1)
    q_RGTH = q_BTKGH.transpose(0, 2, 3, 1, 4).reshape(batch * kv_heads, group, queries, -1)
    k_RSH, v_RSV = (x.transpose(0, 2, 1, 3).reshape(-1, keys, x.shape[3]) for x in (k_BSKH, v_BSKH))
    given = None if pattern is not None or mask is None else jnp.asarray(mask)
    out_RGTV = _attend(settings, (q_RGTH, k_RSH, v_RSV), (given, state))
    out_BNTV = out_RGTV.reshape(batch, num_heads, queries, -1)
    return out_BNTV.transpose(0, 2, 1, 3).astype(v_BSKH.dtype)


def _loops(
    mask: Bool[Array, "B N T S"] | None,
    pattern: MaskPattern | None,
    queries: int,
    keys: int,
    size: int,
) -> Iterator[_Loop]:
    """Yields all blocks, of ``size`` queries but for the last, which may have fewer."""
    whole = queries // size
    per_loop = 1 if whole <= MOST_UNROLLED else max(2, -(-whole // MOST_LOOPS))
    groups = [range(n, min(n + per_loop, whole)) for n in range(0, whole, per_loop)]
    places = [(group[0] * size, size, len(group)) for group in groups]
    if queries % size:
        places.append((whole * size, queries % size, 1))
    for first, length, count in places:
        ranges = [
            _keys_of(mask, pattern, start, start + length, keys)
            for start in range(first, first + count * length, length)
        ]
        width = max(stop - start for start, stop in ranges)
        starts = tuple(min(start, keys - width) for start, _ in ranges)
        yield _Loop(first, length, width, starts)


def _keys_of(mask: Any, pattern: MaskPattern | None, start: int, stop: int, keys: int) -> Any:
    """The first key that some of the queries may attend to, and the one after the last."""
    if pattern is not None:
        first, last = 0, min(keys, stop) if pattern.causal else keys
        if pattern.window is not None:
            first = max(first, start - pattern.window + 1)
            last = min(last, stop + pattern.window - 1)
    elif isinstance(mask, np.ndarray):
        rows = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
        seen = np.flatnonzero(np.broadcast_to(rows.any(axis=(0, 1, 2)), keys))
        first, last = (int(seen[0]), int(seen[-1]) + 1) if len(seen) else (0, 1)
    else:
        first, last = 0, keys
    # A block that may attend to nothing has a key all the same, which is masked.
    first = min(first, keys - 1)
    return first, max(last, first + 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, arrays: Any, fixed: Any) -> Array:
    """The output (R, G, T, V) of q (R, G, T, H), k and v (R, S, _); a row is a key head's.

    ``fixed`` is the mask, or None, and the state of the dropout.
    """
    return _forward(settings, arrays, fixed)[0]


def _forward(settings: _Settings, arrays: Any, fixed: Any) -> tuple[Array, Any]:
    def run_row(row: Any) -> Any:
        number, q_GTH, k_SH, v_SV = row
        parts = []
        for loop in settings.loops:

            def step(_: None, place: Any, loop: _Loop = loop) -> tuple[None, Any]:
                block = _Block(settings, loop, number, place, fixed)
                q_GtH, k_sH, v_sV = block.queries(q_GTH), block.keys(k_SH), block.keys(v_SV)
                scores_Gts = block.scores(q_GtH, k_sH)
                highest = scores_Gts.max(axis=-1, keepdims=True)
                # Of a query that may attend to nothing all exponentials become zeros.
                lowest = jnp.finfo(highest.dtype).min
                highest = jnp.where(highest == lowest, 0, highest)
                weights_Gts = jnp.exp(scores_Gts - highest)
                total = weights_Gts.sum(axis=-1, keepdims=True)
                total = jnp.where(total == 0, 1, total)
                out_GtV = jnp.einsum("gts,sv->gtv", block.drop(weights_Gts), v_sV) / total
                return None, (out_GtV, highest, total)

            parts.append(jax.lax.scan(step, None, _places(loop))[1])
        return tuple(_joined(each) for each in zip(*parts, strict=True))

    q, k, v = arrays
    wide = jnp.promote_types(q.dtype, jnp.float32)
    out, highest, total = jax.lax.map(run_row, _rows(q, *(x.astype(wide) for x in (q, k, v))))
    return out, (arrays, fixed, out, highest, total)


def _backward(settings: _Settings, kept: Any, d_out: Array) -> tuple[Any, None]:
    arrays, fixed, out, highest, total = kept

    def run_row(row: Any) -> Any:
        number, q_GTH, k_SH, v_SV, out_GTV, highest_GT1, total_GT1, d_out_GTV = row
        # Where weights stand below, they are not yet divided by their sum: the gradient is.
        d_out_GTV = d_out_GTV / total_GT1
        # The sum of a query's weights times their gradients, with dropout too.
        mean_GT1 = (out_GTV * d_out_GTV).sum(axis=-1, keepdims=True)
        # Transposed: else XLA transposes each block's weights, and not these few rows.
        d_keys = (jnp.zeros_like(k_SH.T), jnp.zeros_like(v_SV.T))
        parts = []
        for loop in settings.loops:

            def step(carry: Any, place: Any, loop: _Loop = loop) -> tuple[Any, Any]:
                block = _Block(settings, loop, number, place, fixed)
                q_GtH, highest, mean, d_out_GtV = map(
                    block.queries, (q_GTH, highest_GT1, mean_GT1, d_out_GTV)
                )
                k_sH, v_sV = block.keys(k_SH), block.keys(v_SV)
                scores_Gts = block.scores(q_GtH, k_sH)
                weights_Gts = jnp.exp(scores_Gts - highest)
                d_weights_Gts = block.drop(jnp.einsum("gtv,sv->gts", d_out_GtV, v_sV))
                d_scores_Gts = weights_Gts * (d_weights_Gts - mean)
                if settings.soft_cap is not None:
                    # Of a masked key the score is no tanh, and the gradient zero.
                    slope = 1 - jnp.square(scores_Gts / settings.soft_cap)
                    d_scores_Gts = jnp.where(weights_Gts > 0, d_scores_Gts * slope, 0)
                d_q_GtH = jnp.einsum("gts,sh->gth", d_scores_Gts, k_sH) * settings.scale
                d_k_Hs = jnp.einsum("gth,gts->hs", q_GtH, d_scores_Gts) * settings.scale
                d_v_Vs = jnp.einsum("gtv,gts->vs", d_out_GtV, block.drop(weights_Gts))
                d_k_HS, d_v_VS = carry
                return (block.add(d_k_HS, d_k_Hs), block.add(d_v_VS, d_v_Vs)), (d_q_GtH,)

            d_keys, part = jax.lax.scan(step, d_keys, _places(loop))
            parts.append(part)
        return _joined([part for (part,) in parts]), *(x.T for x in d_keys)

    q, k, v = arrays
    wide = out.dtype
    row_arrays = (*(x.astype(wide) for x in arrays), out, highest, total, d_out.astype(wide))
    gradients = jax.lax.map(run_row, _rows(q, *row_arrays))
    return tuple(d.astype(x.dtype) for d, x in zip(gradients, (q, k, v), strict=True)), None


_attend.defvjp(_forward, _backward)


def _rows(q: Array, *arrays: Array) -> tuple[Array, ...]:
    return (jnp.arange(q.shape[0], dtype=jnp.int32), *arrays)


def _places(loop: _Loop) -> tuple[Array, Array]:
    """The first query and the first key of each block."""
    queries = loop.first + loop.size * np.arange(len(loop.starts))
    return jnp.asarray(queries, jnp.int32), jnp.asarray(loop.starts, jnp.int32)


def _joined(parts: Any) -> Float[Array, "G T _"]:
    """All queries, from the blocks (n, G, t, _) of each loop."""
    joined = [jnp.moveaxis(x, 0, 1).reshape(x.shape[1], -1, x.shape[3]) for x in parts]
    return joined[0] if len(joined) == 1 else jnp.concatenate(joined, axis=1)


class _Block:
    """A block's part of the arrays of one row."""

    def __init__(self, settings: _Settings, loop: _Loop, row: Array, place: Any, fixed: Any):
        self.settings, self.loop = settings, loop
        self.first_query, self.first_key = place
        self.mask, self.dropout = fixed
        group = settings.shape[1] // settings.kv_heads
        row_of_batch, kv_head = row // settings.kv_heads, row % settings.kv_heads
        # Where in arrays of (B, N, T, S) the block lies, and its size there.
        self.starts = (row_of_batch, kv_head * group, self.first_query, self.first_key)
        self.sizes = (1, group, loop.size, loop.keys)

    def queries(self, x_GTH: Float[Array, "G T _"]) -> Float[Array, "G t _"]:
        """Returns the block's rows of an array that has one for each query."""
        return jax.lax.dynamic_slice_in_dim(x_GTH, self.first_query, self.loop.size, axis=1)

    def keys(self, x_SH: Float[Array, "S _"]) -> Float[Array, "s _"]:
        """Returns the block's rows of an array that has one for each key."""
        return jax.lax.dynamic_slice_in_dim(x_SH, self.first_key, self.loop.keys, axis=0)

    def add(self, x_HS: Float[Array, "_ S"], part_Hs: Float[Array, "_ s"]) -> Float[Array, "_ S"]:
        """Returns an array that has a column for each key, with these added to the block's."""
        place = {"start_index": self.first_key, "axis": 1}
        here = jax.lax.dynamic_slice_in_dim(x_HS, slice_size=self.loop.keys, **place)
        return jax.lax.dynamic_update_slice_in_dim(x_HS, here + part_Hs, **place)

    def scores(
        self, q_GtH: Float[Array, "G t H"], k_sH: Float[Array, "s H"]
    ) -> Float[Array, "G t s"]:
        """Returns the scaled scores; those of masked keys are the least number."""
        scores = jnp.einsum("gth,sh->gts", q_GtH, k_sH) * self.settings.scale
        if self.settings.soft_cap is not None:
            scores = self.settings.soft_cap * jnp.tanh(scores / self.settings.soft_cap)
        mask = self._mask()
        return scores if mask is None else jnp.where(mask, scores, jnp.finfo(scores.dtype).min)

    def drop(self, x_Gts: Float[Array, "G t s"]) -> Float[Array, "G t s"]:
        """Returns the weights, or their gradients, after dropout."""
        if self.settings.dropout is None:
            return x_Gts
        dropout = nnx.merge(self.settings.dropout, self.dropout)
        keep = dropout.keep_part(self.settings.shape, self.starts, self.sizes)
        return dropout.drop(x_Gts, keep[0])

    def _mask(self) -> Bool[Array, "_ _ _"] | None:
        pattern = self.settings.pattern
        if pattern is None:
            if self.mask is None:
                return None
            return cut_part(self.mask, self.starts, self.sizes)[0]
        shape = (1, self.loop.size, self.loop.keys)
        query = self.first_query + jax.lax.broadcasted_iota(jnp.int32, shape, 1)
        key = self.first_key + jax.lax.broadcasted_iota(jnp.int32, shape, 2)
        allowed = [key <= query] if pattern.causal else []
        if pattern.window is not None:
            allowed.append(abs(key - query) < pattern.window)
        return functools.reduce(jnp.logical_and, allowed) if allowed else None
