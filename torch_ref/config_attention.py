"""The settings of attention, as ``config_parts`` has those of the other parts."""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_positive
from .config_tree import Part

QueryKeyNormSpan = Literal["head", "own_head", "all_heads"]


@dataclass(frozen=True, kw_only=True)
class QueryKeyNormConfig(Part):
    """The settings of the norms of queries and keys (arXiv 2302.05442, section 2).

    Raises:
        ValueError: a setting is unknown, or two exclude each other.
    """

    query_key_norm: bool = False
    """Whether queries and keys are normalised."""
    query_key_norm_over: QueryKeyNormSpan = "head"
    """Each head with one scale for all, each head with its own scale, or all heads at once."""
    query_key_norm_bias: bool | None = None
    """Whether these norms have a bias; default as all norms."""
    query_key_norm_after_rotation: bool = False
    """Whether rotary positions come first (HunYuan)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "query_key_norm_over", get_args(QueryKeyNormSpan))
        if self.query_key_norm_after_rotation and self.query_key_norm_over == "all_heads":
            raise ValueError(
                "query_key_norm_after_rotation needs query_key_norm_over='head' or 'own_head': "
                "got 'all_heads'"
            )


@dataclass(frozen=True, kw_only=True)
class LatentConfig(Part):
    """The settings of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Raises:
        ValueError: a setting is out of its range.
    """

    latent_width: int | None = None
    """The width of the numbers that the keys and values of all heads are made of, which a cache
    keeps in their place (DeepSeek-V2); default none."""
    query_latent_width: int | None = None
    """With latent_width, the width of those that queries are made of; default none."""
    rotary_head_dim: int = 64
    """With latent_width, the width of that end of a head which rotary positions turn; its keys are
    those of all heads."""
    value_head_dim: int | None = None
    """With latent_width, the width of a head's values; default H."""
    latent_norm_eps: float = 1e-6
    """With latent_width, what the norms of these numbers add to the variance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "latent_width", "query_latent_width", "rotary_head_dim")
        check_positive(self, "value_head_dim", "latent_norm_eps")


@dataclass(frozen=True, kw_only=True)
class AttentionConfig(Part):
    """The settings of an attention.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    num_heads: int
    """N, how many query heads."""
    num_kv_heads: int | None = None
    """K, how many key/value heads; default N."""
    head_dim: int | None = None
    """H, the width of a head; default D / N."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values have biases."""
    key_bias: bool = True
    """Whether, with qkv_bias, the projection to keys has one (Whisper: not)."""
    output_bias: bool = True
    """Whether the attention's output projection has one."""
    qkv_clip: float | None = None
    """The bound on every entry of queries, keys and values (OLMo); default none."""
    attention_scale: float | None = None
    """What scores are multiplied by; default 1/sqrt(H)."""
    score_soft_cap: float | None = None
    """The bound on attention scores, by tanh; default none."""
    attention_sinks: bool = False
    """Whether each head has one more score, of a key without a value (gpt-oss)."""
    sliding_window: int | None = None
    """How many tokens a position sees on each side, itself included; default all."""
    attention_dropout: float = 0.0
    """Rate on attention weights."""
    output_dropout: float = 0.0
    """Rate on an attention's output."""
    query_key: QueryKeyNormConfig = QueryKeyNormConfig()
    """Norms of queries and keys (arXiv 2302.05442, section 2)."""
    latent: LatentConfig = LatentConfig()
    """Keys and values made of fewer numbers (arXiv 2405.04434, section 2.1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "num_heads", "num_kv_heads", "head_dim")
        check_positive(self, "attention_scale", "score_soft_cap", "sliding_window", "qkv_clip")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads: got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )
        if self.latent.latent_width is not None:
            self._check_latent()

    def _check_latent(self) -> None:
        """Checks that latent attention has what it needs, and nothing that it has not.

        Raises:
            ValueError: it has.
        """
        width = self.latent.rotary_head_dim
        if self.head_dim is None or not 0 < width < self.head_dim or width % 2:
            raise ValueError(
                "latent_width needs a head_dim, and an even rotary_head_dim below it: got "
                f"head_dim={self.head_dim}, rotary_head_dim={width}"
            )
        others = {
            "num_kv_heads": self.num_kv_heads not in (None, self.num_heads),
            "query_key_norm": self.query_key.query_key_norm,
            "qkv_clip": self.qkv_clip is not None,
            "score_soft_cap": self.score_soft_cap is not None,
            "attention_sinks": self.attention_sinks,
            "key_bias=False": not self.key_bias,
        }
        if found := [name for name, is_there in others.items() if is_there]:
            raise ValueError(f"latent_width goes without {', '.join(found)}")
