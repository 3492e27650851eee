"""The settings of a model's parts: one frozen dataclass a part, which checks itself.

They, ``config_attention``, ``config_experts`` and ``config_positions`` stand apart from the parts
because the command line reads them, and the parts import JAX, which takes a second. ``builders``
makes the parts from them.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import check_choice, check_not_negative, check_positive
from .config_experts import ExpertsConfig
from .config_tree import Part

GatedActivation = Literal["swiglu", "geglu", "geglu_tanh", "clamped_swiglu"]
PlainActivation = Literal[
    "relu", "gelu", "gelu_tanh", "gelu_bloom", "silu", "relu_squared", "quick_gelu"
]
Activation = Literal[PlainActivation, "xielu", GatedActivation]
NormKind = Literal["layer_norm", "rms_norm"]
BlockKind = Literal["pre_norm", "post_norm", "output_norm", "parallel"]
ProjectedEmbeddings = Literal["sum", "tokens"]

# The linear layers of a block, by their attributes.
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "gate_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Part):
    """The settings of a feed-forward.

    Raises:
        ValueError: a setting is out of its range.
    """

    d_ff: int | None = None
    """F, the feed-forward's width; default 4·D, or int(8·D / 3) where it is gated."""
    activation: Activation = "gelu"
    """The activation of the feed-forward; gelu is the exact one, the last four are gated."""
    feed_forward_bias: bool = True
    """Whether the feed-forward's projections have biases."""
    hidden_dropout: float = 0.0
    """Rate on a feed-forward's hidden activation."""
    feed_forward_dropout: float = 0.0
    """Rate on a feed-forward's output."""
    swiglu_slope: float = 1.702
    """What the gate of clamped_swiglu is multiplied by inside its sigmoid (gpt-oss)."""
    swiglu_limit: float = 7.0
    """The bound on gate and product of clamped_swiglu (gpt-oss)."""
    experts: ExpertsConfig = ExpertsConfig()
    """Experts in its place."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "activation", get_args(Activation))
        check_positive(self, "d_ff", "swiglu_slope", "swiglu_limit")
        if self.experts.num_experts is not None and not self.is_gated:
            raise ValueError(
                f"experts need a gated activation: got activation={self.activation!r}, "
                f"num_experts={self.experts.num_experts}"
            )

    @property
    def is_gated(self) -> bool:
        """Whether the feed-forward multiplies its activation by a second projection."""
        return self.activation in get_args(GatedActivation)


@dataclass(frozen=True, kw_only=True)
class NormConfig(Part):
    """The settings of all norms of a model.

    Raises:
        ValueError: a setting is out of its range, or belongs to another kind.
    """

    norm: NormKind = "layer_norm"
    """Which norm."""
    norm_eps: float = 1e-5
    """What is added to the variance."""
    norm_bias: bool = True
    """Whether layer norms have a bias."""
    norm_scale: bool = True
    """Whether norms have a scale (OLMo: not)."""
    norm_unit_offset: bool = False
    """Whether norms multiply by 1 + scale, and scale starts at 0 (Gemma)."""
    first_norm: bool = True
    """Whether the first block normalises what enters its attention (ModernBERT: not)."""
    final_norm: bool = True
    """Whether the last block is followed by a norm."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "norm", get_args(NormKind))
        check_positive(self, "norm_eps")
        if self.norm_unit_offset and not self.norm_scale:
            raise ValueError("norm_unit_offset needs norm_scale=True: got norm_scale=False")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(Part):
    """How branches, norms and residual stream are combined.

    Raises:
        ValueError: a setting is out of its range, or belongs to another kind.
    """

    block: BlockKind = "pre_norm"
    """How branches, norms and residual stream are combined."""
    shared_norm: bool = False
    """Whether attention and feed-forward of a parallel block share one norm (GPT-J, Phi)."""
    branch_output_norm: bool = False
    """Whether what a branch adds is normalised too (Gemma 2)."""
    layer_scale: float | None = None
    """Where trained factors of each feature of what a branch adds start (DINOv2); default none."""
    residual_scale: float = 1.0
    """What a branch adds is multiplied by this (Granite)."""
    residual_dropout: float = 0.0
    """Rate on what a branch adds to the residual stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "block", get_args(BlockKind))
        check_positive(self, "residual_scale", "layer_scale")
        if self.layer_scale is not None and self.branch_output_norm:
            raise ValueError("layer_scale stands in place of branch_output_norm: got both")
        if self.shared_norm and self.block != "parallel":
            raise ValueError(f"shared_norm needs block='parallel': got block={self.block!r}")


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(Part):
    """The settings of what enters the first block.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    embedding_scale: float | None = None
    """What token embeddings are multiplied by; default 1."""
    embedding_norm: bool = False
    """Whether embeddings are normalised."""
    embedding_dropout: float = 0.0
    """Rate on what enters the first block."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "embedding_scale")


@dataclass(frozen=True, kw_only=True)
class LMEmbeddingConfig(EmbeddingConfig):
    """The settings of what enters the first block of a language model.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    num_token_types: int = 0
    """How many kinds of tokens have a row of their own, added to the token's (BERT: 2)."""
    num_task_types: int = 0
    """How many kinds of tasks have one, added as well (ERNIE: 3)."""
    embedding_width: int | None = None
    """E, the width of token embeddings where a matrix takes them to D; default D, without one."""
    projected_embeddings: ProjectedEmbeddings = "sum"
    """What that matrix takes: the sum of all embeddings (ELECTRA), or the tokens' alone, with
    another one from D to E before the head (OPT)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_not_negative(self, "num_token_types")
        check_not_negative(self, "num_task_types")
        check_positive(self, "embedding_width")
        check_choice(self, "projected_embeddings", get_args(ProjectedEmbeddings))


@dataclass(frozen=True, kw_only=True)
class SequencesEmbeddingConfig(EmbeddingConfig):
    """The settings of what enters the first blocks of an encoder and of a decoder.

    Raises:
        ValueError: a setting is out of its range or not finite.
    """

    shared_embedding: bool = False
    """Whether source and target tokens have one table of rows (T5, BART)."""
    shared_positions: bool = True
    """Whether the positions of source and target have one table of rows (BART: not)."""


@dataclass(frozen=True, kw_only=True)
class StacksConfig(Part):
    """The settings of the two stacks of blocks of an encoder and a decoder.

    Raises:
        ValueError: a setting is out of its range.
    """

    encoder_num_heads: int | None = None
    """How many query heads the encoder has; default those of the decoder."""
    encoder_d_ff: int | None = None
    """The width of the encoder's feed-forward; default that of the decoder."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "encoder_num_heads", "encoder_d_ff")


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Part):
    """The settings of low-rank adapters (Hu et al., arXiv 2106.09685).

    Raises:
        ValueError: a setting is out of its range, or a target is no linear layer of a block.
    """

    lora_rank: int | None = None
    """The rank of low-rank adapters, which alone are trained then; default none."""
    lora_alpha: float = 16.0
    """What the product of an adapter's matrices is multiplied by, times the rank."""
    lora_targets: str = "q_proj,v_proj"
    """The linear layers that get adapters, with commas: q_proj, k_proj, v_proj, o_proj, up_proj,
    gate_proj, down_proj."""
    lora_dropout: float = 0.0
    """The rate at which adapters drop numbers of their inputs while training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "lora_rank", "lora_alpha")
        unknown = [name for name in self.targets if name not in LINEAR_LAYERS]
        if unknown or len(set(self.targets)) < len(self.targets):
            raise ValueError(
                f"lora_targets must be some of {', '.join(LINEAR_LAYERS)}, with commas: got "
                f"{self.lora_targets!r}"
            )

    @property
    def targets(self) -> tuple[str, ...]:
        """The names in ``lora_targets``."""
        return tuple(name.strip() for name in self.lora_targets.split(","))


@dataclass(frozen=True, kw_only=True)
class LayerPattern(Part):
    """Which layers differ from the others, by their indices from 0.

    Raises:
        ValueError: indices do not rise.
    """

    full_attention_layers: tuple[int, ...] = ()
    """Which layers, from 0 and rising, see past the sliding window (Gemma 2, Qwen2)."""
    layers_without_rotary: tuple[int, ...] = ()
    """Which layers, from 0 and rising, have no rotary positions (SmolLM 3, Cohere 2)."""
    dense_layers: tuple[int, ...] = ()
    """Which layers, from 0 and rising, have one feed-forward in place of experts (DeepSeek-V3)."""
    window_rotary_base: float | None = None
    """Rotary base of layers with the sliding window, unscaled; default that of all (Gemma 3)."""
    layer_groups: int | None = None
    """How many groups of layers have weights of their own, which the layers of a group share
    (ALBERT); default each layer has its own."""
    layers_in_group: int = 1
    """With layer_groups, how many different layers a group has, which it repeats in turn."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "window_rotary_base", "layer_groups", "layers_in_group")

    def check(self, num_layers: int) -> None:
        """Checks the indices against the number of layers.

        Raises:
            ValueError: they do not rise within [0, num_layers), or the groups do not fit into it.
        """
        if self.layer_groups is None:
            if self.layers_in_group != 1:
                size = self.layers_in_group
                raise ValueError(f"layers_in_group needs layer_groups: got layers_in_group={size}")
        elif num_layers % self.layers_in_group or (
            self.layer_groups * self.layers_in_group > num_layers
        ):
            raise ValueError(
                "num_layers must be a multiple of layers_in_group, and at least layer_groups times "
                f"as many: got num_layers={num_layers}, layer_groups={self.layer_groups}, "
                f"layers_in_group={self.layers_in_group}"
            )
        special = self.layers_without_rotary or self.window_rotary_base is not None
        if self.layer_groups is not None and special:
            raise ValueError(
                "layers that share weights have the same positions: got "
                f"layer_groups={self.layer_groups}, "
                f"layers_without_rotary={self.layers_without_rotary}, "
                f"window_rotary_base={self.window_rotary_base}"
            )
        if self.layer_groups is not None and self.dense_layers:
            raise ValueError(
                "layers that share weights are alike: got "
                f"layer_groups={self.layer_groups}, dense_layers={self.dense_layers}"
            )
        for name in ("full_attention_layers", "layers_without_rotary", "dense_layers"):
            layers = getattr(self, name)
            if list(layers) != sorted({i for i in layers if 0 <= i < num_layers}):
                raise ValueError(
                    f"{name} must rise within [0, num_layers): got "
                    f"{name}={layers}, num_layers={num_layers}"
                )
