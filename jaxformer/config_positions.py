"""The settings of positions: which kind, and those of rotary positions and their scaling."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_not_negative, check_positive
from .config_tree import Part

PositionKind = Literal[
    "none",
    "learned",
    "sinusoidal",
    "rotary",
    "alibi",
    "relative",
    "relative_buckets",
    "disentangled",
]
RotaryScalingKind = Literal[
    "none", "linear", "llama3", "yarn", "longrope", "ntk", "dynamic", "proportional"
]


@dataclass(frozen=True, kw_only=True)
class RotaryScalingConfig(Part):
    """How rotary frequencies are stretched for longer texts; see ``RotaryScaling`` for the kinds.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    rotary_scaling: RotaryScalingKind = "none"
    """How rotary frequencies are stretched for longer texts."""
    rotary_scaling_factor: float = 1.0
    """What they are divided by."""
    rotary_low_frequency_factor: float = 1.0
    """llama3: fewer turns than this over the original context are divided."""
    rotary_high_frequency_factor: float = 4.0
    """llama3: more turns than this are unchanged."""
    rotary_original_context_length: int = 8192
    """llama3, yarn, longrope, dynamic: the context that the frequencies were trained for."""
    rotary_beta_fast: float = 32.0
    """yarn: pairs that make more turns than this over that context are unchanged."""
    rotary_beta_slow: float = 1.0
    """yarn: pairs that make fewer are divided."""
    rotary_truncate: bool = True
    """yarn: whether the bounds between such pairs are whole numbers."""
    rotary_attention_factor: float | None = None
    """yarn, longrope: cosines and sines are multiplied by this; default by a formula."""
    rotary_short_factors: tuple[float, ...] = ()
    """longrope: what each pair's frequency is divided by in texts within that context."""
    rotary_long_factors: tuple[float, ...] = ()
    """longrope: the same for longer texts."""
    rotary_proportion: float = 1.0
    """proportional: the share of the pairs that are turned."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "rotary_scaling", get_args(RotaryScalingKind))
        check_positive(self, "rotary_scaling_factor", "rotary_low_frequency_factor")
        check_positive(self, "rotary_original_context_length", "rotary_attention_factor")
        check_positive(self, "rotary_beta_fast", "rotary_beta_slow")
        if not 0 < self.rotary_proportion <= 1:
            raise ValueError(f"rotary_proportion must be in (0, 1]: got {self.rotary_proportion}")
        if self.rotary_high_frequency_factor <= self.rotary_low_frequency_factor:
            raise ValueError(
                "rotary_high_frequency_factor must exceed rotary_low_frequency_factor: got "
                f"{self.rotary_high_frequency_factor} and {self.rotary_low_frequency_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class RotaryConfig(Part):
    """The settings of rotary positions.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    rotary_base: float = 10000.0
    """Pair i of a head turns by position / base^(2i / width) radians."""
    rotary_fraction: float = 1.0
    """The share of a head that is turned."""
    rotary_interleaved: bool = False
    """Whether pairs are neighbours, or lie half a head apart."""
    scaling: RotaryScalingConfig = RotaryScalingConfig()
    """How rotary frequencies are stretched for longer texts; ``RotaryScaling`` has the kinds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "rotary_base")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be in (0, 1]: got {self.rotary_fraction}")


@dataclass(frozen=True, kw_only=True)
class DisentangledConfig(Part):
    """The settings of disentangled positions (DeBERTa, arXiv 2006.03654).

    Raises:
        ValueError: a setting is out of its range, or two exclude each other.
    """

    distance_span: int = 512
    """How many trained rows of distances there are to each side."""
    distance_limit: int | None = None
    """The distance from which on all share a row, where the spans of rows grow with their
    logarithm; default each distance has a row."""
    distance_norm: bool = False
    """Whether rows of distances are normalised (DeBERTa V3)."""
    content_to_position: bool = True
    """Whether queries meet rows of distances."""
    position_to_content: bool = True
    """Whether keys meet rows of distances."""
    shared_distance_projections: bool = False
    """Whether queries' and keys' own projections take the rows of distances to the heads."""
    distance_dropout: float = 0.0
    """Rate on the rows of distances, in each layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "distance_span", "distance_limit")
        limit = self.distance_limit
        if limit is not None and (self.distance_span < 4 or limit <= self.distance_span // 2 + 1):
            raise ValueError(
                "distance_limit needs a distance_span of at least 4, and must exceed half of it by "
                f"more than 1: got distance_span={self.distance_span}, distance_limit={limit}"
            )
        if not (self.content_to_position or self.position_to_content):
            raise ValueError("content_to_position or position_to_content must be True: got neither")


@dataclass(frozen=True, kw_only=True)
class PositionConfig(Part):
    """How a model knows a token's position.

    Raises:
        ValueError: a setting is out of its range, or belongs to another kind.
    """

    positions: PositionKind = "learned"
    """How the model knows a token's position."""
    learned_rows: bool = False
    """Whether learned rows are added to the embeddings beside positions of another kind (MPNet)."""
    position_offset: int = 0
    """Which row of a learned or sinusoidal table belongs to the first position (OPT: 2)."""
    sinusoid_halves: bool = False
    """Whether a sinusoidal table has all sines before all cosines (XGLM), and not in turn."""
    sinusoid_exact: bool = False
    """Whether the table of sinusoid_halves has the frequencies of the others, and is computed in
    float64 (Marian)."""
    max_relative_position: int = 32
    """The farthest distance that relative positions tell apart."""
    num_position_buckets: int = 32
    """With relative_buckets, how many spans of distances have a number of their own (T5)."""
    max_bucket_distance: int = 128
    """With relative_buckets, the distance from which on all keys share the last one."""
    shared_buckets: bool = True
    """With relative_buckets, whether all layers share one table (T5), or each its own (umT5)."""
    alibi_max_bias: float = 8.0
    """ALiBi: the slopes of N heads fall from 2^(-this / N) to 2^(-this)."""
    alibi_scale: float = 1.0
    """ALiBi: what the bias is multiplied by (Falcon: 1/sqrt(H))."""
    alibi_in_bfloat16: bool = False
    """ALiBi: whether slopes and their products with positions are rounded to bfloat16 (Falcon)."""
    rotary: RotaryConfig = RotaryConfig()
    """Rotary positions, where ``positions`` says so."""
    disentangled: DisentangledConfig = DisentangledConfig()
    """Disentangled positions, where ``positions`` says so."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "positions", get_args(PositionKind))
        check_positive(self, "max_relative_position", "alibi_max_bias", "alibi_scale")
        check_positive(self, "num_position_buckets", "max_bucket_distance")
        if self.num_position_buckets < 4:
            raise ValueError(
                f"num_position_buckets must be at least 4: got {self.num_position_buckets}"
            )
        if self.max_bucket_distance <= self.num_position_buckets // 2:
            raise ValueError(
                "max_bucket_distance must exceed half of num_position_buckets: got "
                f"{self.max_bucket_distance} and {self.num_position_buckets}"
            )
        check_not_negative(self, "position_offset")
        if self.sinusoid_exact and not self.sinusoid_halves:
            raise ValueError("sinusoid_exact needs sinusoid_halves=True: got sinusoid_halves=False")
        has_rows = self.positions in ("learned", "sinusoidal")
        if self.position_offset and not (has_rows or self.learned_rows):
            raise ValueError(
                "position_offset needs positions='learned' or 'sinusoidal', or learned_rows: got "
                f"position_offset={self.position_offset}, positions={self.positions!r}"
            )
        if self.learned_rows and has_rows:
            raise ValueError(
                f"learned_rows needs another kind of positions: got positions={self.positions!r}"
            )
