"""Position schemes: rows added to embeddings, or changes to queries, keys and scores.

``LearnedPositions`` and ``SinusoidalPositions`` give rows to add to the token embeddings.
``NoPositions``, ``Rotary``, ``ALiBi``, ``RelativePositions`` and ``RelativeBuckets`` are handed to
an attention and may turn its queries and keys (``rotate``) or add to its scores (``bias``).

Tables are computed in numpy float32, each operation rounded to float32, and cast afterwards: at
position 5000 one bit of a float32 frequency is 3e-4 of the table, so computing them more exactly
would part from every published checkpoint. The tensors made of them are kept for each dtype and
device, so no call builds or moves a table twice.
"""

import functools
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from torch_ref.layers import Embedding, Linear
from torch_ref.position_tables import (
    RotaryScaling,
    distance_buckets,
    length_frequencies,
    rotary_tables,
    sinusoidal_table,
)


class LearnedPositions(nn.Module):
    """Looks up a trained row for each position: position t has row t + ``offset``.

    The table has ``offset`` rows more, which no position reads (OPT, arXiv 2205.01068, has 2).
    """

    def __init__(self, max_length: int, d_model: int, *, offset: int = 0):
        super().__init__()
        self.offset = offset
        self.weight = Embedding(max_length + offset, d_model).weight

    def forward(self, length: int, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the rows of ``positions`` (B, T), or of 0 … length - 1 as (1, T)."""
        table_SD = self.weight[self.offset :]
        return table_SD[None, :length] if positions is None else table_SD[positions]


class SinusoidalPositions(nn.Module):
    """Gives fixed rows: sin in even dimensions, cos in odd ones (arXiv 1706.03762, 3.5).

    Args:
        max_length: the number of positions, in tokens.
        d_model: D.
        halves: sines in the first half and cosines in the second, of
            position · exp(-ln(10000) · i / (D // 2 - 1)); where D is odd, the last dimension is 0
            (tensor2tensor; XGLM, arXiv 2112.10668).
        offset: position t has the row of t + offset (XGLM: 2).
        exact: with halves, of position / 10000^(2i / D), computed in float64 (Marian).
    """

    def __init__(
        self,
        max_length: int,
        d_model: int,
        *,
        halves: bool = False,
        offset: int = 0,
        exact: bool = False,
    ):
        super().__init__()
        self.max_length = max_length
        self.d_model = d_model
        self.halves = halves
        self.offset = offset
        self.exact = exact
        # Holds no number: it follows the model to its device, so the rows can too.
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def forward(self, length: int, positions: torch.Tensor | None = None) -> torch.Tensor:
        """Returns float32 rows of ``positions``, or of 0 … length - 1 with a batch size of 1."""
        device = self._device.device
        rows = self.max_length + self.offset
        kind = (self.d_model, self.halves, self.exact)
        table_SD = _sinusoidal_tensor(rows, *kind, torch.float32, device)
        table_SD = table_SD[self.offset :]
        return table_SD[None, :length] if positions is None else table_SD[positions]


def embed_tokens(
    tokens: torch.Tensor,
    token_embedding: Embedding,
    position_embedding: LearnedPositions | SinusoidalPositions | None,
    *,
    context_length: int,
    projection: Linear | None = None,
    scale: float | None = None,
    added: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns the tokens' rows (B, T, D) times ``scale``, plus ``added`` and positions' rows.

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
        x = x * scale
    if added is not None:
        x = x + added
    if position_embedding is not None:
        x = x + position_embedding(length, positions).to(x.dtype)
    return x


class NoPositions(nn.Module):
    """Leaves the attention without positions; also the base class of the other schemes.

    An attention calls only what a subclass overrides.
    """

    def rotate(self, x_BTNH: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns queries or keys at ``positions`` (B, T), as they enter the scores."""
        return x_BTNH

    def bias(self, q_BTNH: torch.Tensor, distance_TS: torch.Tensor) -> torch.Tensor | None:
        """Returns what is added to the scaled scores, broadcastable to (B, N, T, S).

        ``distance_TS`` is key position - query position.
        """
        return None

    def content_bias(
        self,
        q_BTNH: torch.Tensor,
        k_BSNH: torch.Tensor,
        rows_RD: torch.Tensor,
        distance_TS: torch.Tensor,
        q_proj: Linear,
        k_proj: Linear,
        scale: float,
    ) -> torch.Tensor | None:
        """Returns what rows of distances add to the scores; see ``DisentangledPositions``."""
        return None


class Rotary(NoPositions):
    """Turns pairs of dimensions by an angle that grows with the position (arXiv 2104.09864).

    Args:
        head_dim: H, the width of a head.
        max_length: the number of positions, in tokens.
        base: pair i turns by position / base^(2i / rotated width) radians.
        fraction: the share of H, from its start, that is turned.
        interleaved: pairs are (2i, 2i+1) as in the paper; otherwise (i, i + half) as in
            Llama's published weights.
        scaling: see ``RotaryScaling``.

    Raises:
        ValueError: the turned width is odd or zero, or longrope has not a factor for each pair.
    """

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
        super().__init__()
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

    def rotate(self, x_BTNH: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns the heads with their first ``width`` dimensions turned."""
        rows = self._rows(positions, x_BTNH.dtype, x_BTNH.device)
        cos, sin = (table[:, :, None, :] for table in rows)
        turned, rest = x_BTNH[..., : self.width], x_BTNH[..., self.width :]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = (first * cos - second * sin, first * sin + second * cos)
        if self.interleaved:
            turned = torch.stack(pair, dim=-1).flatten(-2)
        else:
            turned = torch.cat(pair, dim=-1)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def _rows(
        self, positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> list[torch.Tensor]:
        """Cosines and sines at the positions."""
        settings = (self.max_length, self.width, self.base, self.scaling)
        if self.scaling is None or not self.scaling.follows_length(self.max_length):
            return [table[positions] for table in _rotary_tensors(*settings, dtype, device)]
        table_LH = _frequency_tensor(*settings, device)
        row = positions.max() + 1 - self.scaling.original_context_length
        frequency_H = table_LH[row.clamp(0, len(table_LH) - 1)]
        angle_BTH = positions[:, :, None].to(table_LH.dtype) * frequency_H
        factor = self.scaling.table_factor
        # Rounded to float32, as all tables are.
        wide = angle_BTH.to(torch.promote_types(dtype, table_LH.dtype))
        return [(f(wide).to(table_LH.dtype) * factor).to(dtype) for f in (torch.cos, torch.sin)]


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
        super().__init__()
        self.num_heads = num_heads
        self.max_bias = max_bias
        self.scale = scale
        self.in_bfloat16 = in_bfloat16

    def bias(self, q_BTNH: torch.Tensor, distance_TS: torch.Tensor) -> torch.Tensor:
        """Returns -slope · |distance| · scale (1, N, T, S), in float32 or wider."""
        device = distance_TS.device
        slopes_N = _alibi_tensor(self.num_heads, self.max_bias, torch.float32, device)
        if self.in_bfloat16:
            keys_S = torch.arange(distance_TS.shape[1], device=device)
            bias_NS = (slopes_N.bfloat16()[:, None] * keys_S.bfloat16()).float()
            bias = bias_NS[None, :, None].expand(1, -1, len(distance_TS), -1)
        else:
            bias = -slopes_N[None, :, None, None] * distance_TS.abs()[None, None]
        if self.scale == 1:
            return bias
        return bias.to(torch.promote_types(q_BTNH.dtype, torch.float32)) * self.scale


class RelativePositions(NoPositions):
    """Adds to the scores a trained key for every distance (arXiv 1803.02155, eq. 4).

    ``weight`` has shape (2·max_distance + 1, head_dim), shared by all heads; farther keys use the
    last row on their side. Queries come in already multiplied by the attention's scale.
    """

    def __init__(self, max_distance: int, head_dim: int):
        super().__init__()
        self.max_distance = max_distance
        self.weight = Embedding(2 * max_distance + 1, head_dim).weight

    def bias(self, q_BTNH: torch.Tensor, distance_TS: torch.Tensor) -> torch.Tensor:
        """Returns q · weight[clip(distance, ±max_distance) + max_distance]: (B, N, T, S)."""
        index_TS = distance_TS.clamp(-self.max_distance, self.max_distance) + self.max_distance
        by_distance_BNTR = functional.linear(q_BTNH, self.weight).transpose(1, 2)
        index_BNTS = index_TS.expand(*by_distance_BNTR.shape[:2], -1, -1)
        return by_distance_BNTR.gather(-1, index_BNTS)


class RelativeBuckets(NoPositions):
    """Adds to the scores of each head a trained number for the distance (arXiv 1910.10683, 2.1).

    Distances share buckets, see ``distance_buckets``. ``weight`` has shape (num_buckets,
    num_heads). The numbers do not depend on the queries, so one call may serve all layers.

    Args:
        num_buckets: how many numbers each head has.
        num_heads: N.
        max_distance: from which on all keys share the last bucket.
        causal: whether later keys are never seen, and need no buckets.
    """

    def __init__(
        self, num_buckets: int, num_heads: int, *, max_distance: int = 128, causal: bool = False
    ):
        super().__init__()
        self.num_buckets = num_buckets
        self.num_heads = num_heads
        self.max_distance = max_distance
        self.causal = causal
        self.weight = Embedding(num_buckets, num_heads).weight

    def bias(self, q_BTNH: torch.Tensor | None, distance_TS: torch.Tensor) -> torch.Tensor:
        """Returns weight[bucket(distance)] (1, N, T, S); the queries may be None."""
        buckets = distance_buckets(self.num_buckets, self.max_distance, self.causal)
        table_R = _tensor(buckets, torch.long, distance_TS.device)
        index_TS = distance_TS.clamp(-self.max_distance, self.max_distance) + self.max_distance
        return self.weight[table_R[index_TS]].permute(2, 0, 1)[None]


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


@functools.lru_cache(maxsize=32)
def _sinusoidal_tensor(
    max_length: int,
    d_model: int,
    halves: bool,
    exact: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    return _tensor(sinusoidal_table(max_length, d_model, halves, exact), dtype, device)


@functools.lru_cache(maxsize=32)
def _rotary_tensors(
    max_length: int,
    width: int,
    base: float,
    scaling: RotaryScaling | None,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary_tables(max_length, width, base, scaling)
    return _tensor(cos, dtype, device), _tensor(sin, dtype, device)


@functools.lru_cache(maxsize=32)
def _frequency_tensor(
    max_length: int, width: int, base: float, scaling: RotaryScaling, device: torch.device
) -> torch.Tensor:
    table = length_frequencies(max_length, width, base, scaling)
    return _tensor(table, torch.float32, device)


@functools.lru_cache(maxsize=32)
def _alibi_tensor(
    num_heads: int, max_bias: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return _tensor(alibi_slopes(num_heads, max_bias), dtype, device)


def _tensor(table: np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    # A tensor born in inference mode could not serve a later training step.
    with torch.inference_mode(False):
        return torch.from_numpy(table).to(device, dtype)
