"""The settings of models and optimizers: frozen dataclasses that check themselves.

The settings of a model are a tree of parts, see ``config_parts`` and ``config_tree``.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from .checks import (
    check_choice,
    check_elements,
    check_layers,
    check_numbers,
    check_positive,
)
from .config_attention import AttentionConfig
from .config_heads import ClassifierConfig, HeadConfig
from .config_optimizers import OptimizerConfig as OptimizerConfig
from .config_parts import (
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    LayerPattern,
    LMEmbeddingConfig,
    LoRAConfig,
    NormConfig,
    PlainActivation,
    SequencesEmbeddingConfig,
    StacksConfig,
)
from .config_positions import PositionConfig
from .config_tree import Settings

Initialization = Literal["gpt2", "torch", "xavier_uniform", "kaiming_uniform", "normal"]


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class TransformerConfig(Settings):
    """The settings that every model has: those of its width and of the parts of its layers.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    d_model: int
    """D, the width of the residual stream."""
    context_length: int
    """The most tokens that fit."""
    attention: AttentionConfig
    """The attention of every layer."""
    position: PositionConfig = PositionConfig()
    """How the model knows a token's position."""
    feed_forward: FeedForwardConfig = FeedForwardConfig()
    """The feed-forward of every layer."""
    norm: NormConfig = NormConfig()
    """All norms of the model."""
    block: BlockConfig = BlockConfig()
    """How branches, norms and residual stream are combined."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    initialization: Initialization = "gpt2"
    """The distribution of the initial weights."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_choice(self, "initialization", get_args(Initialization))
        check_positive(self, "context_length", "d_model")
        num_heads = self.attention.num_heads
        if self.position.positions == "sinusoidal" and self.d_model % 2:
            raise ValueError(f"sinusoidal positions need an even d_model: got {self.d_model}")
        if self.position.positions == "disentangled" and self.key_value_heads != num_heads:
            raise ValueError(
                "positions='disentangled' needs as many key/value heads as heads: got "
                f"num_heads={num_heads}, num_kv_heads={self.key_value_heads}"
            )
        if self.attention.head_dim is None and self.d_model % num_heads:
            raise ValueError(
                "d_model must be divisible by num_heads where head_dim is not given: got "
                f"d_model={self.d_model}, num_heads={num_heads}"
            )
        turned = int(self.rotary_width * self.position.rotary.rotary_fraction)
        if self.position.positions == "rotary" and (turned < 2 or turned % 2):
            raise ValueError(
                "positions='rotary' turns an even number of a head's dimensions: got "
                f"{turned}, of head_dim={self.rotary_width}, "
                f"rotary_fraction={self.position.rotary.rotary_fraction}"
            )
        latent = self.attention.latent
        if latent.latent_width is not None and self.position.positions != "rotary":
            raise ValueError(
                f"latent_width needs positions='rotary': got {self.position.positions!r}"
            )
        widths = (latent.latent_width or 0, latent.query_latent_width or 0)
        made = num_heads * (self.head_width + self.value_width)
        check_elements("latent_width", max(widths), "num_heads times head_dim", made)
        heads = num_heads * self.head_width
        check_elements("num_heads times head_dim", heads, "d_model", self.d_model)
        check_elements("d_ff", self.feed_forward_width, "d_model", self.d_model)
        experts = self.feed_forward.experts
        width = self.expert_width * (experts.num_experts or 1)
        check_elements("num_experts times expert_d_ff", width, "d_model", self.d_model)
        shared = experts.shared_expert_d_ff or 0
        check_elements("shared_expert_d_ff", shared, "d_model", self.d_model)
        check_elements("context_length", self.context_length, "d_model", self.d_model)

    @property
    def head_width(self) -> int:
        """H: ``head_dim`` where it is given, else D / N."""
        attention = self.attention
        given = attention.head_dim
        return self.d_model // attention.num_heads if given is None else given

    @property
    def key_value_heads(self) -> int:
        """K: ``num_kv_heads`` where it is given, else N."""
        attention = self.attention
        return attention.num_heads if attention.num_kv_heads is None else attention.num_kv_heads

    @property
    def rotary_width(self) -> int:
        """How many entries of a head positions may turn: those of a latent head, else H."""
        latent = self.attention.latent
        return self.head_width if latent.latent_width is None else latent.rotary_head_dim

    @property
    def value_width(self) -> int:
        """The width of a head's values: ``value_head_dim`` of a latent head, else H."""
        latent = self.attention.latent
        given = None if latent.latent_width is None else latent.value_head_dim
        return self.head_width if given is None else given

    @property
    def cache_widths(self) -> tuple[int, int, int]:
        """What a cache keeps of a token: of how many heads, and the widths of keys and values.

        Of latent attention one head: the numbers that keys and values are made of, and the key that
        positions turn.
        """
        latent = self.attention.latent
        if latent.latent_width is None:
            return self.key_value_heads, self.head_width, self.head_width
        return 1, latent.latent_width, latent.rotary_head_dim

    @property
    def feed_forward_width(self) -> int:
        """F: ``d_ff`` where it is given, else 4·D, or int(8·D / 3) where it is gated."""
        if self.feed_forward.d_ff is not None:
            return self.feed_forward.d_ff
        return int(8 * self.d_model / 3) if self.feed_forward.is_gated else 4 * self.d_model

    @property
    def expert_width(self) -> int:
        """The width of an expert: ``expert_d_ff`` where it is given, else F."""
        given = self.feed_forward.experts.expert_d_ff
        return self.feed_forward_width if given is None else given

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in place of one feed-forward."""
        return self.feed_forward.experts.num_experts is not None


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
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
    embedding: LMEmbeddingConfig = LMEmbeddingConfig()
    """What enters the first block."""
    head: HeadConfig = HeadConfig()
    """What makes logits of the last layer."""
    layers: LayerPattern = LayerPattern()
    """Which layers differ from the others, by their indices from 0."""
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters (Hu et al., arXiv 2106.09685); none by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "vocab_size", "num_layers")
        check_layers(self, "num_layers")
        check_elements("vocab_size", self.vocab_size or 0, "d_model", self.d_model)
        self.layers.check(self.num_layers)
        full = self.layers.full_attention_layers
        if full and self.attention.sliding_window is None:
            raise ValueError(
                "full_attention_layers needs a sliding_window for the others: got "
                f"full_attention_layers={full}, sliding_window=None"
            )
        base = self.layers.window_rotary_base
        if base is not None and self.attention.sliding_window is None:
            raise ValueError(
                "window_rotary_base needs a sliding_window: got "
                f"window_rotary_base={base}, sliding_window=None"
            )
        special = self.layers.layers_without_rotary or base is not None
        if special and self.position.positions != "rotary":
            raise ValueError(
                "layers_without_rotary and window_rotary_base need positions='rotary': got "
                f"positions={self.position.positions!r}"
            )
        num_experts = self.feed_forward.experts.num_experts
        if self.layers.dense_layers and num_experts is None:
            raise ValueError(
                "dense_layers needs num_experts for the others: got "
                f"dense_layers={self.layers.dense_layers}, num_experts=None"
            )
        if self.head.head == "masked_lm" and self.head_activation not in get_args(PlainActivation):
            raise ValueError(
                "head='masked_lm' needs an activation that is not gated: got "
                f"activation={self.feed_forward.activation!r}"
            )
        if not self.norm.first_norm and self.block.block != "pre_norm":
            raise ValueError(
                f"first_norm=False needs block='pre_norm': got block={self.block.block!r}"
            )
        given = self.embedding.embedding_width
        if given is not None and self.embedding_sum_width == given and self.head.head == "linear":
            raise ValueError(
                "projected_embeddings='sum' with an embedding_width needs head='masked_lm' or "
                f"'none': got embedding_width={given}, head='linear'"
            )
        if "gate_proj" in self.lora.targets and not self.feed_forward.is_gated:
            raise ValueError(
                "lora_targets has gate_proj, which a feed-forward that is not gated has not: got "
                f"activation={self.feed_forward.activation!r}"
            )
        adapted = {"up_proj", "gate_proj", "down_proj"} & set(self.lora.targets)
        if adapted and self.lora.lora_rank is not None and num_experts is not None:
            raise ValueError(
                "lora_targets must be of the attention where there are experts: got "
                f"{', '.join(sorted(adapted))}, num_experts={num_experts}"
            )
        if self.lora.lora_rank is not None and self.attention.latent.latent_width is not None:
            raise ValueError(
                "lora_rank goes without latent_width: got "
                f"lora_rank={self.lora.lora_rank}, "
                f"latent_width={self.attention.latent.latent_width}"
            )
        if self.head.pooler and self.causal and self.head.pooled_token == "first":
            raise ValueError("pooler needs causal=False: the first of causal tokens sees no other")

    @property
    def embedding_width(self) -> int:
        """E: ``embedding_width`` where it is given, else D."""
        given = self.embedding.embedding_width
        return self.d_model if given is None else given

    @property
    def embedding_sum_width(self) -> int:
        """The width in which tokens, positions and types are added: E or D."""
        is_sum = self.embedding.projected_embeddings == "sum"
        return self.embedding_width if is_sum else self.d_model

    @property
    def head_activation(self) -> str:
        """The activation of a masked-LM head: ``head_activation``, else the feed-forward's."""
        return self.head.head_activation or self.feed_forward.activation

    @property
    def num_blocks(self) -> int:
        """How many blocks have weights of their own."""
        groups = self.layers.layer_groups
        return self.num_layers if groups is None else groups * self.layers.layers_in_group

    def window(self, layer: int) -> int | None:
        """Returns how many tokens a position of this layer sees on each side; None is all."""
        is_full = layer in self.layers.full_attention_layers
        return None if is_full else self.attention.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in place of one feed-forward."""
        return super().has_experts(layer) and layer not in self.layers.dense_layers


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
class TransformerClassifierConfig(TransformerLMConfig):
    """The settings of a ``TransformerClassifier``: those of a language model, and its classifier.

    Raises:
        ValueError: a setting is out of its range, not finite, or does not fit the others.
    """

    head: HeadConfig = HeadConfig(head="none")
    classifier: ClassifierConfig = ClassifierConfig()
    """What makes scores of labels of the last layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head.head != "none":
            raise ValueError(f"a classifier needs head='none': got head={self.head.head!r}")


@dataclass(frozen=True, kw_only=True, init=False, repr=False)
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
    position: PositionConfig = PositionConfig(positions="sinusoidal")
    feed_forward: FeedForwardConfig = FeedForwardConfig(activation="relu")
    block: BlockConfig = BlockConfig(block="post_norm")
    embedding: SequencesEmbeddingConfig = SequencesEmbeddingConfig()
    stacks: StacksConfig = StacksConfig()
    head: HeadConfig = HeadConfig(tie_embeddings=False, head_bias=True)
    lora: LoRAConfig = LoRAConfig()
    """Low-rank adapters of both stacks (Hu et al., arXiv 2106.09685); none by default."""
    initialization: Initialization = "xavier_uniform"
    """The distribution of the initial weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, *(() if self.reads_features else ("source_vocab_size",)))
        check_positive(self, "target_vocab_size")
        check_positive(self, "num_encoder_layers", "num_decoder_layers")
        check_layers(self, "num_encoder_layers", "num_decoder_layers")
        check_elements("source_vocab_size", self.source_vocab_size, "d_model", self.d_model)
        check_elements("target_vocab_size", self.target_vocab_size, "d_model", self.d_model)
        if self.head.head == "masked_lm" or self.head.pooler:
            raise ValueError(
                "an encoder and decoder has head='linear' or 'none', and no pooler: got "
                f"head={self.head.head!r}, pooler={self.head.pooler}"
            )
        if self.embedding.shared_embedding and self.source_vocab_size != self.target_vocab_size:
            raise ValueError(
                "shared_embedding needs source and target of one vocabulary: got "
                f"source_vocab_size={self.source_vocab_size}, "
                f"target_vocab_size={self.target_vocab_size}"
            )
        check_elements("encoder_d_ff", self.encoder.feed_forward_width, "d_model", self.d_model)
        if "gate_proj" in self.lora.targets and not self.feed_forward.is_gated:
            raise ValueError(
                "lora_targets has gate_proj, which a feed-forward that is not gated has not: got "
                f"activation={self.feed_forward.activation!r}"
            )

    @property
    def reads_features(self) -> bool:
        """Whether the source is numbers in place of tokens."""
        return False

    @property
    def encoder(self) -> "EncoderDecoderConfig":
        """The settings of the encoder's blocks: these, with its own heads and width."""
        heads, width = self.stacks.encoder_num_heads, self.stacks.encoder_d_ff
        if heads is None and width is None:
            return self
        return self.replace(
            num_heads=self.attention.num_heads if heads is None else heads,
            d_ff=self.feed_forward.d_ff if width is None else width,
            encoder_num_heads=None,
            encoder_d_ff=None,
        )
