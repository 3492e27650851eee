"""The settings of models and optimizers: frozen dataclasses that check themselves."""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from .checks import (
    check_choice,
    check_elements,
    check_layers,
    check_not_negative,
    check_numbers,
    check_positive,
    check_rate,
    check_types,
)

GatedActivation = Literal["swiglu", "geglu", "geglu_tanh"]
Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_bloom", "silu", GatedActivation]
NormKind = Literal["layer_norm", "rms_norm"]
BlockKind = Literal["pre_norm", "post_norm", "parallel"]
PositionKind = Literal["none", "learned", "sinusoidal", "rotary", "alibi", "relative"]
RotaryScalingKind = Literal["none", "linear", "llama3"]
Initialization = Literal["gpt2", "torch", "xavier_uniform", "kaiming_uniform", "normal"]
HeadKind = Literal["linear", "masked_lm", "none"]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The settings that every model has: those of layers, positions and embeddings.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    d_model: int
    """D, the width of the residual stream."""
    num_heads: int
    """N, how many query heads."""
    context_length: int
    """The most tokens that fit."""
    num_kv_heads: int | None = None
    """K, how many key/value heads; default N."""
    head_dim: int | None = None
    """H, the width of a head; default D / N."""
    d_ff: int | None = None
    """F, the feed-forward's width; default 4·D, or int(8·D / 3) where it is gated."""
    activation: Activation = "gelu"
    """Of the feed-forward; gelu is the exact one, the last three are gated."""
    norm: NormKind = "layer_norm"
    """Which norm."""
    norm_eps: float = 1e-5
    """What is added to the variance."""
    norm_bias: bool = True
    """Whether layer norms have a bias."""
    norm_unit_offset: bool = False
    """Whether RMS norms multiply by 1 + scale, and scale starts at 0 (Gemma)."""
    block: BlockKind = "pre_norm"
    """How branches, norms and residual stream are combined."""
    shared_norm: bool = False
    """Whether attention and feed-forward of a parallel block share one norm (GPT-J, Phi)."""
    branch_output_norm: bool = False
    """Whether what a branch adds is normalised too (Gemma 2)."""
    qkv_bias: bool = True
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = True
    """Whether the attention's output projection has one."""
    feed_forward_bias: bool = True
    """Whether the feed-forward's projections have biases."""
    query_key_norm: bool = False
    """Whether queries and keys are normalised, head by head."""
    attention_scale: float | None = None
    """What scores are multiplied by; default 1/sqrt(H)."""
    score_soft_cap: float | None = None
    """Bound on attention scores, by tanh; default none."""
    sliding_window: int | None = None
    """How many tokens a position sees on each side, itself included; default all."""
    positions: PositionKind = "learned"
    """How the model knows a token's position."""
    position_offset: int = 0
    """Which row of the learned table belongs to the first position (OPT: 2)."""
    rotary_base: float = 10000.0
    """Pair i of a head turns by position / base^(2i / width) radians."""
    rotary_fraction: float = 1.0
    """The share of a head that is turned."""
    rotary_interleaved: bool = False
    """Whether pairs are neighbours, or lie half a head apart."""
    rotary_scaling: RotaryScalingKind = "none"
    """How rotary frequencies are stretched for longer texts."""
    rotary_scaling_factor: float = 1.0
    """What they are divided by."""
    rotary_low_frequency_factor: float = 1.0
    """llama3: fewer turns than this over the original context are divided."""
    rotary_high_frequency_factor: float = 4.0
    """llama3: more turns than this are unchanged."""
    rotary_original_context_length: int = 8192
    """llama3: the context that the frequencies were trained for."""
    max_relative_position: int = 32
    """The farthest distance that relative positions tell apart."""
    embedding_scale: float | None = None
    """What token embeddings are multiplied by; default 1."""
    embedding_norm: bool = False
    """Whether embeddings are normalised."""
    final_norm: bool = True
    """Whether the last block is followed by a norm."""
    initialization: Initialization = "gpt2"
    """The distribution of the initial weights."""
    embedding_dropout: float = 0.0
    """Rate on what enters the first block."""
    attention_dropout: float = 0.0
    """Rate on attention weights."""
    output_dropout: float = 0.0
    """Rate on an attention's output."""
    hidden_dropout: float = 0.0
    """Rate on a feed-forward's hidden activation."""
    feed_forward_dropout: float = 0.0
    """Rate on a feed-forward's output."""
    residual_dropout: float = 0.0
    """Rate on what a branch adds to the residual stream."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choice(self, "activation", get_args(Activation))
        check_choice(self, "norm", get_args(NormKind))
        check_choice(self, "block", get_args(BlockKind))
        check_choice(self, "positions", get_args(PositionKind))
        check_choice(self, "rotary_scaling", get_args(RotaryScalingKind))
        check_choice(self, "initialization", get_args(Initialization))
        check_positive(self, "context_length", "rotary_base", "max_relative_position")
        check_positive(self, "rotary_scaling_factor", "rotary_low_frequency_factor")
        check_positive(self, "rotary_original_context_length")
        if self.rotary_high_frequency_factor <= self.rotary_low_frequency_factor:
            raise ValueError(
                "rotary_high_frequency_factor must exceed rotary_low_frequency_factor: got "
                f"{self.rotary_high_frequency_factor} and {self.rotary_low_frequency_factor}"
            )
        check_positive(self, "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
        check_positive(self, "norm_eps", "attention_scale", "score_soft_cap", "sliding_window")
        check_positive(self, "embedding_scale")
        check_not_negative(self, "position_offset")
        if self.norm_unit_offset and self.norm != "rms_norm":
            raise ValueError(f"norm_unit_offset needs norm='rms_norm': got norm={self.norm!r}")
        if self.shared_norm and self.block != "parallel":
            raise ValueError(f"shared_norm needs block='parallel': got block={self.block!r}")
        if self.position_offset and self.positions != "learned":
            raise ValueError(
                "position_offset needs positions='learned': got "
                f"position_offset={self.position_offset}, positions={self.positions!r}"
            )
        for field in fields(self):
            if field.name.endswith("_dropout"):
                check_rate(self, field.name)
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be in (0, 1]: got {self.rotary_fraction}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model: got {self.d_model}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads where head_dim is not given: got "
                f"d_model={self.d_model}, num_heads={self.num_heads}"
            )
        heads = self.num_heads * self.head_width
        check_elements("num_heads times head_dim", heads, "d_model", self.d_model)
        check_elements("d_ff", self.feed_forward_width, "d_model", self.d_model)
        check_elements("context_length", self.context_length, "d_model", self.d_model)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads: got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )

    @property
    def head_width(self) -> int:
        """H: ``head_dim`` where it is given, else D / N."""
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def key_value_heads(self) -> int:
        """K: ``num_kv_heads`` where it is given, else N."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward multiplies its activation by a second projection."""
        return self.activation in get_args(GatedActivation)

    @property
    def feed_forward_width(self) -> int:
        """F: ``d_ff`` where it is given, else 4·D, or int(8·D / 3) where it is gated."""
        if self.d_ff is not None:
            return self.d_ff
        return int(8 * self.d_model / 3) if self.is_gated else 4 * self.d_model


@dataclass(frozen=True, kw_only=True)
class TransformerLMConfig(TransformerConfig):
    """The settings of a ``TransformerLM``: GPT, LLaMA, BERT and character models are values of it.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    num_layers: int
    """L, how many blocks."""
    vocab_size: int | None = None
    """V, how many different tokens; train.py takes it from the text."""
    causal: bool = True
    """Whether a position is kept from later ones."""
    full_attention_layers: tuple[int, ...] = ()
    """Which layers, from 0 and rising, see past the sliding window (Gemma 2, Qwen2)."""
    num_token_types: int = 0
    """How many kinds of tokens have a row of their own, added to the token's (BERT: 2)."""
    head: HeadKind = "linear"
    """What makes logits of the last layer: a matrix, BERT's masked-LM head, or nothing."""
    tie_embeddings: bool = True
    """Whether the output head's matrix is the token embedding."""
    head_bias: bool = False
    """Whether the output head has a bias."""
    logit_soft_cap: float | None = None
    """Bound on logits, by tanh; default none."""
    pooler: bool = False
    """Whether the first token's output can be pooled (BERT)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "head", get_args(HeadKind))
        check_positive(self, "vocab_size", "num_layers", "logit_soft_cap")
        check_layers(self, "num_layers")
        check_elements("vocab_size", self.vocab_size or 0, "d_model", self.d_model)
        check_not_negative(self, "num_token_types")
        layers = self.full_attention_layers
        if list(layers) != sorted({i for i in layers if 0 <= i < self.num_layers}):
            raise ValueError(
                "full_attention_layers must rise within [0, num_layers): got "
                f"full_attention_layers={layers}, num_layers={self.num_layers}"
            )
        if layers and self.sliding_window is None:
            raise ValueError(
                "full_attention_layers needs a sliding_window for the others: got "
                f"full_attention_layers={layers}, sliding_window=None"
            )
        if self.head == "masked_lm" and self.is_gated:
            raise ValueError(
                "head='masked_lm' needs an activation that is not gated: got "
                f"activation={self.activation!r}"
            )
        if self.head == "none" and (self.head_bias or self.logit_soft_cap is not None):
            raise ValueError(
                "head='none' has neither bias nor cap: got "
                f"head_bias={self.head_bias}, logit_soft_cap={self.logit_soft_cap}"
            )
        if self.pooler and self.causal:
            raise ValueError("pooler needs causal=False: the first of causal tokens sees no other")


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """The settings of an ``EncoderDecoder``; the defaults are those of arXiv 1706.03762.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    source_vocab_size: int
    """How many different source tokens."""
    target_vocab_size: int
    """V, how many different target tokens."""
    num_encoder_layers: int = 6
    """How many blocks the encoder has."""
    num_decoder_layers: int = 6
    """How many blocks the decoder has."""
    causal: bool = True
    """Whether a target position is kept from later ones."""
    head_bias: bool = True
    """Whether the output head has a bias."""
    activation: Activation = "relu"
    """Of the feed-forward."""
    block: BlockKind = "post_norm"
    """How branches, norms and residual stream are combined."""
    positions: PositionKind = "sinusoidal"
    """How the model knows a token's position."""
    initialization: Initialization = "xavier_uniform"
    """The distribution of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "source_vocab_size", "target_vocab_size")
        check_positive(self, "num_encoder_layers", "num_decoder_layers")
        check_layers(self, "num_encoder_layers", "num_decoder_layers")
        check_elements("source_vocab_size", self.source_vocab_size, "d_model", self.d_model)
        check_elements("target_vocab_size", self.target_vocab_size, "d_model", self.d_model)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The settings of AdamW (arXiv 1711.05101), its schedule and its clipping.

    The defaults are nanoGPT's for a character model. With ``decay_steps`` None the rate stays as it
    is after warm-up.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    learning_rate: float = 1e-3
    """After warm-up."""
    min_learning_rate: float = 1e-4
    """At the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    decay_steps: int | None = None
    """The step at which the cosine ends; train.py takes the number of steps."""
    weight_decay: float = 0.1
    """Decoupled, on matrices and embeddings only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    eps: float = 1e-8
    """What is added to the root of the second moment."""
    clip_norm: float | None = 1.0
    """Bound on the norm of all gradients together; None clips nothing."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_positive(self, "learning_rate", "eps", "clip_norm", "decay_steps")
        check_not_negative(self, "min_learning_rate", "warmup_steps", "weight_decay")
        for name in ("beta1", "beta2"):
            check_rate(self, name)


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Builds the config class ``cls`` from the plain dict that ``dataclasses.asdict`` made of one.

    Lists, which is what JSON makes of tuples, become tuples again.

    Raises:
        ValueError: a key is unknown or missing, a value has another type or is out of its range.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{cls.__name__} must be an object: got {type(values).__name__}")
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown {cls.__name__} settings: {', '.join(unknown)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    check_types(cls, values)
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"incomplete {cls.__name__}: {error}") from error
