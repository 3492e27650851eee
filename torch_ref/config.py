"""What a model is: frozen settings, checked on construction, free of PyTorch."""

import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Activation = Literal["relu", "gelu", "gelu_tanh", "swiglu", "geglu", "geglu_tanh"]
Norm = Literal["layer_norm", "rms_norm"]
Block = Literal["pre_norm", "post_norm", "parallel"]
Positions = Literal["none", "learned", "sinusoidal", "rotary", "alibi", "relative"]
Initialization = Literal["gpt2", "torch", "xavier_uniform", "kaiming_uniform", "normal"]


@dataclass(frozen=True, kw_only=True)
class RotaryScaling:
    """How rotary frequencies are stretched beyond the length they were trained for.

    ``linear`` divides every frequency by ``factor`` (arXiv 2306.15595). ``llama3`` divides only
    frequencies whose wavelength exceeds ``original_context_length / low_frequency_factor``, leaves
    those below ``original_context_length / high_frequency_factor``, and blends in between
    (the Llama 3.1 release).
    """

    kind: Literal["linear", "llama3"] = "linear"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choice(self, "kind", ("linear", "llama3"))
        _check_positive(self, "factor", "low_frequency_factor", "original_context_length")
        if self.kind == "llama3" and self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                "high_frequency_factor must exceed low_frequency_factor: got "
                f"{self.high_frequency_factor} and {self.low_frequency_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The settings that every model shares: those of a layer, of positions and of embeddings.

    Args that are None take the value that the part itself documents: ``num_kv_heads`` that of
    ``num_heads``, ``head_dim`` d_model / num_heads, ``d_ff`` 4·d_model (8·d_model/3 where gated),
    ``attention_scale`` 1/sqrt(head_dim).

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    d_model: int
    num_heads: int
    context_length: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    d_ff: int | None = None
    activation: Activation = "gelu"
    norm: Norm = "layer_norm"
    norm_eps: float = 1e-5
    norm_bias: bool = True
    block: Block = "pre_norm"
    qkv_bias: bool = True
    output_bias: bool = True
    feed_forward_bias: bool = True
    query_key_norm: bool = False
    attention_scale: float | None = None
    score_soft_cap: float | None = None
    sliding_window: int | None = None
    positions: Positions = "learned"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_interleaved: bool = False
    rotary_scaling: RotaryScaling | None = None
    max_relative_position: int = 32
    embedding_scale: float | None = None
    embedding_norm: bool = False
    final_norm: bool = True
    initialization: Initialization = "gpt2"
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    output_dropout: float = 0.0
    hidden_dropout: float = 0.0
    feed_forward_dropout: float = 0.0
    residual_dropout: float = 0.0

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_choice(self, "activation", get_args(Activation))
        _check_choice(self, "norm", get_args(Norm))
        _check_choice(self, "block", get_args(Block))
        _check_choice(self, "positions", get_args(Positions))
        _check_choice(self, "initialization", get_args(Initialization))
        _check_positive(self, "context_length", "rotary_base", "max_relative_position")
        _check_positive(self, "d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff")
        _check_positive(self, "norm_eps", "attention_scale", "score_soft_cap", "sliding_window")
        _check_positive(self, "embedding_scale")
        for field in fields(self):
            rate = getattr(self, field.name)
            if field.name.endswith("_dropout") and not 0 <= rate < 1:
                raise ValueError(f"{field.name} must be in [0, 1): got {rate}")
        if not 0 < self.rotary_fraction <= 1:
            raise ValueError(f"rotary_fraction must be in (0, 1]: got {self.rotary_fraction}")
        if self.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model: got {self.d_model}")
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads where head_dim is not given: got "
                f"d_model={self.d_model}, num_heads={self.num_heads}"
            )
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_heads must be divisible by num_kv_heads: got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            )


@dataclass(frozen=True, kw_only=True)
class TransformerLMConfig(TransformerConfig):
    """The settings of a ``TransformerLM``: GPT, LLaMA, BERT and character models are values of it.

    ``vocab_size`` may be left None only until the corpus is known (``train.py`` fills it in).

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    vocab_size: int | None = None
    num_layers: int
    causal: bool = True
    tie_embeddings: bool = True
    head_bias: bool = False
    logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "vocab_size", "num_layers", "logit_soft_cap")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW, its schedule and its clipping; rates are per step.

    The defaults are nanoGPT's for a character model. ``decay_steps`` is the step at which the
    cosine reaches ``min_learning_rate``; None keeps the rate after warm-up (``train.py`` fills in
    the number of steps). ``clip_norm`` None clips nothing.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    learning_rate: float = 1e-3
    min_learning_rate: float = 1e-4
    warmup_steps: int = 100
    decay_steps: int | None = None
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _check_finite(self)
        _check_positive(self, "learning_rate", "eps", "clip_norm", "decay_steps")
        for name in ("min_learning_rate", "warmup_steps", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative: got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1): got {getattr(self, name)}")


def from_dict(cls: type, values: dict[str, Any]) -> Any:
    """Builds the config class ``cls`` from the plain dict that ``dataclasses.asdict`` made of one.

    Raises:
        ValueError: a key is unknown or missing, or a value is refused by the class.
    """
    known = {field.name for field in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"unknown {cls.__name__} settings: {', '.join(unknown)}")
    values = dict(values)
    if isinstance(values.get("rotary_scaling"), dict):
        values["rotary_scaling"] = RotaryScaling(**values["rotary_scaling"])
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"incomplete {cls.__name__}: {error}") from error


def _check_finite(config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{field.name} must be finite: got {value}")


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be positive: got {value}")


def _check_choice(config: Any, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}: got {value!r}")
