"""Tables of positions, in numpy: sinusoids, and rotary angles with their scaling for long texts.

Each operation is rounded to float32, as in the PyTorch originals: at position 5000 one bit of a
frequency is 3e-4 of an angle. What is kept has 32 bits: JAX 0.10 may take an array of 64 bits for
the one of 32 that it made of the same object when 64 bits were not enabled.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """Scales rotary frequencies for texts longer than those they were trained on.

    By ``kind``, with W the turned width and L0 the ``original_context_length``:

    - ``linear`` divides every frequency by ``factor`` (arXiv 2306.15595).
    - ``llama3`` divides only frequencies that make fewer than ``low_frequency_factor`` turns over
      L0 tokens, leaves those that make more than ``high_frequency_factor``, and blends in between
      (the Llama 3.1 release).
    - ``yarn`` (arXiv 2309.00071, eq. 18 to 20) divides likewise, but blends in proportion to the
      pair's number between the pairs that make ``beta_fast`` and ``beta_slow`` turns over L0
      tokens, which ``truncate`` rounds outwards. Cosines and sines are multiplied by
      ``attention_factor``, default 0.1 · ln(factor) + 1.
    - ``longrope`` (arXiv 2402.13753) divides pair i by ``short_factors[i]``, or by
      ``long_factors[i]`` where the text is longer than L0. Cosines and sines are multiplied by
      ``attention_factor``, default sqrt(1 + ln(factor) / ln(L0)).
    - ``ntk`` multiplies the base by factor^(W / (W - 2)) (HunYuan's alpha).
    - ``dynamic`` does so by (factor · length / L0 - (factor - 1))^(W / (W - 2)) where the text is
      longer than L0, and changes nothing elsewhere.
    - ``proportional`` turns only the first ``proportion`` of all pairs, with frequencies of the
      whole width, divided by ``factor``; the other pairs stand still.

    In ``longrope`` and ``dynamic`` a text's length is the greatest position of a call, plus one: as
    in transformers, keys that were cached before a text grew past L0 keep the angles that they had.
    """

    kind: str = "linear"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    proportion: float = 1.0

    def follows_length(self, max_length: int) -> bool:
        """Whether frequencies depend on the length of a text of up to ``max_length`` tokens."""
        grows = self.kind in ("longrope", "dynamic")
        return grows and max_length > self.original_context_length

    def check_pairs(self, count: int) -> None:
        """Checks that longrope has a factor for each of so many pairs of dimensions.

        Raises:
            ValueError: it has more or fewer.
        """
        for factors in (self.short_factors, self.long_factors):
            if self.kind == "longrope" and len(factors) != count:
                raise ValueError(
                    f"longrope needs one factor for each pair: got {len(factors)} for {count}"
                )

    @property
    def table_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.kind == "yarn":
            return yarn_attention_factor(self.factor)
        if self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original_context_length))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Returns 0.1 · mscale · ln(factor) + 1, or 1 where factor is at most 1 (arXiv 2309.00071).

    DeepSeek's factor is that of ``mscale`` divided by that of ``mscale_all_dim``.
    """
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@functools.lru_cache(maxsize=32)
def sinusoidal_table(
    max_length: int, d_model: int, halves: bool = False, exact: bool = False
) -> np.ndarray:
    """Returns sin and cos of position · exp(-ln(10000) · 2i / D), float32 (max_length, D).

    With ``halves`` the exponent is -ln(10000) · i / (D // 2 - 1), see ``SinusoidalPositions``. With
    ``exact`` too it is the first one, all is computed in float64, and rounded to float32 once.
    """
    if exact:
        angle = np.arange(max_length)[:, None] / 10000.0 ** (np.arange(0, d_model, 2) / d_model)
        # In float32 whatever the dtype of other tables: so it stands in Marian's files.
        return np.concatenate((np.sin(angle), np.cos(angle)), axis=1).astype("float32")
    position = np.arange(max_length, dtype=np.float32)[:, None]
    if halves:
        pairs = d_model // 2
        steps, spacing = np.arange(pairs, dtype=np.float32), -math.log(10000.0) / (pairs - 1)
        sines, cosines = slice(pairs), slice(pairs, 2 * pairs)
    else:
        steps, spacing = np.arange(0, d_model, 2, dtype=np.float32), -math.log(10000.0) / d_model
        sines, cosines = slice(0, None, 2), slice(1, None, 2)
    frequency = rounded(np.exp, steps * np.float32(spacing))
    table = np.zeros((max_length, d_model), np.float32)
    table[:, sines] = rounded(np.sin, position * frequency)
    table[:, cosines] = rounded(np.cos, position * frequency)
    return table


@functools.lru_cache(maxsize=32)
def log_buckets(span: int, max_distance: int) -> np.ndarray:
    """Returns the bucket of each distance from -max_distance to max_distance, int32.

    A distance is query - key position. Those up to half of the span have a bucket each, those
    beyond share buckets that grow with the logarithm, and there are span to each side (DeBERTa V2's
    code).
    """
    distance = np.arange(-max_distance, max_distance + 1)
    middle = span // 2
    away = np.maximum(np.abs(distance), middle)
    ratio = away.astype(np.float32) / np.float32(middle)
    widest = rounded(np.log, np.asarray((max_distance - 1) / middle, np.float32))
    share = rounded(np.log, ratio) / widest * np.float32(middle - 1)
    far = (np.ceil(share) + np.float32(middle)).astype(np.int64)
    buckets = np.where(np.abs(distance) <= middle, distance, far * np.sign(distance))
    return buckets.astype(np.int32)


@functools.lru_cache(maxsize=32)
def distance_buckets(num_buckets: int, max_distance: int, causal: bool) -> np.ndarray:
    """Returns the bucket of each distance from -max_distance to max_distance, int32.

    A distance is key - query position. Half of the buckets are for one distance each, the other
    half for spans that grow with the logarithm up to ``max_distance``. Where later keys are seen
    too, half of all buckets are theirs (T5, arXiv 1910.10683, section 2.1, and its code).
    """
    distance = np.arange(-max_distance, max_distance + 1)
    count = num_buckets if causal else num_buckets // 2
    later = np.zeros_like(distance) if causal else count * (distance > 0)
    away = np.maximum(-distance, 0) if causal else np.abs(distance)
    exact = count // 2
    ratio = np.maximum(away, 1).astype(np.float32) / np.float32(exact)
    span = rounded(np.log, ratio) / np.float32(math.log(max_distance / exact))
    far = exact + (span * np.float32(count - exact)).astype(np.int64)
    buckets = later + np.where(away < exact, away, np.minimum(far, count - 1))
    return buckets.astype(np.int32)


@functools.lru_cache(maxsize=32)
def rotary_tables(
    max_length: int,
    width: int,
    base: float = 10000.0,
    scaling: RotaryScaling | None = None,
    length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns cosines and sines, each float32 (max_length, width / 2).

    ``length`` is that of the text, default max_length; see ``RotaryScaling``.
    """
    text_length = max_length if length is None else length
    frequency = rotary_frequencies(width, base, scaling, text_length)
    angle = np.arange(max_length, dtype=np.float32)[:, None] * frequency[None, :]
    cos, sin = rounded(np.cos, angle), rounded(np.sin, angle)
    factor = np.float32(1.0 if scaling is None else scaling.table_factor)
    return (cos, sin) if factor == 1 else (cos * factor, sin * factor)


def rotary_frequencies(
    width: int, base: float, scaling: RotaryScaling | None = None, length: int = 0
) -> np.ndarray:
    """Returns the angle of each pair at position 1, in radians, float32 (width / 2,).

    Args:
        width: how many dimensions are turned.
        base: without scaling, pair i turns by position / base^(2i / width) radians.
        scaling: see ``RotaryScaling``.
        length: of the text, in tokens.

    Raises:
        ValueError: the kind of scaling is unknown, or longrope has not one factor for each pair.
    """
    exponent = np.arange(0, width, 2, dtype=np.float32) / np.float32(width)
    if scaling is None:
        return np.float32(1.0) / _power(base, exponent)
    factor = np.float32(scaling.factor)
    if scaling.kind in ("ntk", "dynamic"):
        return np.float32(1.0) / _power(_stretched_base(base, width, scaling, length), exponent)
    if scaling.kind == "longrope":
        is_long = length > scaling.original_context_length
        scaling.check_pairs(len(exponent))
        factors = np.array(scaling.long_factors if is_long else scaling.short_factors, np.float32)
        return np.float32(1.0) / (factors * _power(base, exponent))
    if scaling.kind == "yarn":
        power = _power(base, exponent)
        ramp = _yarn_ramp(width, base, scaling)
        kept = np.float32(1.0) - ramp
        slow, fast = np.float32(1.0) / (factor * power), np.float32(1.0) / power
        return slow * (np.float32(1.0) - kept) + fast * kept
    frequency = np.float32(1.0) / _power(base, exponent)
    if scaling.kind == "linear":
        return frequency / factor
    if scaling.kind == "proportional":
        turned = int(scaling.proportion * width // 2)
        return np.where(np.arange(len(frequency)) < turned, frequency / factor, np.float32(0.0))
    if scaling.kind == "llama3":
        return _llama3_frequencies(frequency, scaling)
    raise ValueError(f"unknown rotary scaling {scaling.kind!r}")


@functools.lru_cache(maxsize=32)
def length_frequencies(
    max_length: int, width: int, base: float, scaling: RotaryScaling
) -> np.ndarray:
    """Returns a row of ``rotary_frequencies`` for each length L0, L0 + 1 … max_length.

    Where all lengths above L0 have the same frequencies there are two rows, L0 and above.
    """
    original = scaling.original_context_length
    last = original + 1 if scaling.kind == "longrope" else max_length
    lengths = range(original, last + 1)
    return np.stack([rotary_frequencies(width, base, scaling, length) for length in lengths])


def _stretched_base(base: float, width: int, scaling: RotaryScaling, length: int) -> float:
    if width == 2:
        return base
    power = width / (width - 2)
    if scaling.kind == "ntk":
        return float(np.float32(base * scaling.factor**power))
    original = np.float32(scaling.original_context_length)
    if length <= original:
        return base
    factor = np.float32(scaling.factor)
    growth = factor * np.float32(length) / original - np.float32(scaling.factor - 1)
    return float(np.float32(base) * _power(float(growth), np.array(power, np.float32)))


def _yarn_ramp(width: int, base: float, scaling: RotaryScaling) -> np.ndarray:
    """How much of a pair's frequency is divided: 0 for the fast pairs, 1 for the slow ones."""

    def pair_of(turns: float) -> float:
        wavelength = scaling.original_context_length / (turns * 2 * math.pi)
        return width * math.log(wavelength) / (2 * math.log(base))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    # The original divides by a thousandth where the two are equal.
    span = 0.001 if low == high else high - low
    pairs = np.arange(width // 2, dtype=np.float32)
    return np.clip((pairs - np.float32(low)) / np.float32(span), np.float32(0), np.float32(1))


def _llama3_frequencies(frequency: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    wavelength = np.float32(2 * math.pi) / frequency
    turns = np.float32(scaling.original_context_length) / wavelength
    share = (turns - np.float32(low)) / np.float32(high - low)
    slow = frequency / np.float32(scaling.factor)
    blended = (1 - share) * slow + share * frequency
    return np.where(turns < low, slow, np.where(turns > high, frequency, blended))


def _power(base: float, exponent: np.ndarray) -> np.ndarray:
    return rounded(lambda x: np.float64(base) ** x, exponent)


def rounded(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray) -> np.ndarray:
    """Returns ``function`` of x, computed in float64 and rounded once to float32.

    numpy's own float32 functions are an ulp off on some processors.
    """
    return function(x.astype(np.float64)).astype(np.float32)
