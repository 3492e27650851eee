"""Hugging Face's ``mixtral``, ``qwen2_moe``, ``qwen3_moe``, ``olmoe`` and ``gpt_oss``: experts.

They are kin of Llama whose feed-forwards are experts (arXiv 2401.04088, 2407.10671, 2505.09388,
2409.02060), in Qwen's not in every layer, and in Qwen 2 beside one that sees every token. Files
have an array for each expert. transformers 5 holds those of all experts in one, and gates with what
they multiply. gpt-oss (arXiv 2508.10925) holds them so in files too, output by output, with biases;
its attention has sinks, and its gate is clamped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.layer_patterns import SlidingWindow, every, every_full
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED_FEED_FORWARD,
    NO_BIASES,
    NO_FEED_FORWARD_BIAS,
    OLD_BUFFERS,
    body,
    head_width,
    stack,
)
from jaxformer.porting.dialects.llama_kin import NoWindowWithoutSwitch
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.packings import FusedByExpert, NeighboursByExpert, RowPerHead
from jaxformer.porting.mapping.rules import Rule, Rules, names, under, untransposed
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Conversion,
    Fixed,
    Mapped,
    Repeated,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

AROUND = names({"router.proj": "gate", "shared_expert_gate": "shared_expert_gate"}) + under(
    "shared_expert", "shared_expert", GATED_FEED_FORWARD
)
IN_ONE_ARRAY = (
    Rule(("gate_proj.kernel", "up_proj.kernel"), ("experts.gate_up_proj",), FusedByExpert()),
    Rule(("down_proj.kernel",), ("experts.down_proj",)),
)
MIXTRALS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
USUAL = {name: name for name in MIXTRALS}


def each_by_itself(module: TransformerLM, called: dict[str, str]) -> Rules:
    """Returns the rules of experts with arrays of their own, by what these are called."""
    count = RowPerHead(module.config.feed_forward.experts.num_experts or 1)
    return tuple(
        Rule((target,), (f"experts.#.{source}",), count) for target, source in called.items()
    )


def feed_forwards(module: TransformerLM, name: str, experts: Rules) -> Rules:
    """Returns the rules of the feed-forwards of all layers, with these of experts.

    Args:
        module: the target.
        name: what the source calls a feed-forward with experts; others are called ``mlp``.
        experts: of one with experts.
    """
    layers = range(module.config.num_layers)
    kinds = {module.config.has_experts(layer) for layer in layers}

    def rules(place: int | str, has_experts: bool) -> Rules:
        called, inner = (name, experts) if has_experts else ("mlp", GATED_FEED_FORWARD)
        return under(f"blocks.{place}.feed_forward", f"layers.{place}.{called}", inner)

    if len(kinds) == 1:
        return rules("*", *kinds)
    return tuple(r for layer in layers for r in rules(layer, module.config.has_experts(layer)))


def bodies(
    body: Callable[..., Rules], mixture: str = "mlp", called: dict[str, str] | None = None
) -> dict[str, Callable[[TransformerLM], Rules]]:
    """Returns the rules of the stack, as classes and as files have it.

    Args:
        body: those around feed-forwards.
        mixture: what files call a feed-forward with experts.
        called: what they call the arrays of an expert.
    """

    def of_class(module: TransformerLM) -> Rules:
        inner = (*AROUND, *IN_ONE_ARRAY)
        return (*body(module, feed_forward=()), *feed_forwards(module, "mlp", inner))

    def of_files(module: TransformerLM) -> Rules:
        inner = (*AROUND, *each_by_itself(module, called or USUAL))
        return (*body(module, feed_forward=()), *feed_forwards(module, mixture, inner))

    return {"body": of_class, "published": of_files}


@dataclass(frozen=True)
class BalanceLoss(Row):
    """The weight of the loss of unequally used experts, which another setting turns on.

    Attributes:
        default: the weight where there is none.
    """

    default: float

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the weight, 0 where it is off."""
        weight = source_model.setting("router_aux_loss_coef", default=self.default)
        is_on = source_model.setting("output_router_logits", default=False)
        return {"balance_loss": float(weight) if is_on else 0.0}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the weight where it is on."""
        weight = config.feed_forward.experts.router.balance_loss
        given = {"router_aux_loss_coef": weight} if weight else {}
        return {"output_router_logits": weight > 0, **given}


@dataclass(frozen=True)
class DenseLayers(Row):
    """Qwen's layers without experts: those that are listed, and all but every n-th."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives those layers; all have one feed-forward where there are no experts."""
        step = source_model.setting("decoder_sparse_step", default=1)
        listed = source_model.setting("mlp_only_layers", default=None) or ()
        if not isinstance(step, int) or step < 1:
            raise unsupported("decoder_sparse_step", "be a whole number above 0", step)
        layers = range(values["num_layers"])
        sparse = set(every(step, values["num_layers"])) - set(listed)
        if not sparse:
            return {"num_experts": None}
        if values["num_experts"] is None:
            return {}
        return {"dense_layers": tuple(layer for layer in layers if layer not in sparse)}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives n where it says all, and else the list."""
        dense = config.layers.dense_layers
        sparse = tuple(n for n in range(config.num_layers) if n not in dense)
        steps = range(1, config.num_layers + 1)
        step = next((n for n in steps if every(n, config.num_layers) == sparse), None)
        listed = [] if step is not None else list(dense)
        return {"decoder_sparse_step": step or 1, "mlp_only_layers": listed}


@dataclass(frozen=True)
class WindowInAllLayers(Row):
    """A sliding window in all layers, which another setting turns on."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window, or none."""
        window = source_model.nullable("sliding_window", 4096)
        is_on = source_model.setting("use_sliding_window", default=False)
        return {"sliding_window": window if is_on else None}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both settings."""
        window = config.attention.sliding_window
        return {"use_sliding_window": window is not None, "sliding_window": window}


def _every_other_sliding(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns Qwen 2's types of layers: every other one of the first has a window."""
    last = source_model.setting("max_window_layers", default=28)
    return [
        "sliding_attention" if layer % 2 == 0 and layer < last else "full_attention"
        for layer in range(num_layers)
    ]


def experts(
    number: tuple[str, ...], default: int, chosen: int, *, weight: float = 0.001
) -> tuple[Row, ...]:
    """Returns the rows that all have, where their defaults are these.

    Args:
        number: names of the number of experts.
        default: how many experts there are.
        chosen: how many compute a token.
        weight: of the balance loss.
    """
    none_is_0 = Conversion(lambda n, values: n or None, lambda n, config: n or 0)
    return (
        Mapped(number, "num_experts", default, none_is_0),
        Mapped("num_experts_per_tok", "experts_per_token", chosen),
        BalanceLoss(weight),
    )


# Where all feed-forwards are experts, their width is the only one.
ONE_WIDTH = Mapped("intermediate_size", "d_ff", written_from="expert_width")
OWN_WIDTH = Mapped("moe_intermediate_size", "expert_d_ff", written_from="expert_width")
NORMALIZED = Mapped("norm_topk_prob", "normalize_expert_weights", False, BOOLEAN)
# Without one the heads share the width of the model.
HEADS = Mapped("head_dim", "head_dim", None, is_nullable=True, omit=None)
MIXTRAL = stack(
    ONE_WIDTH,
    *experts(("num_local_experts", "num_experts"), 8, 2),
    # null says that there is none.
    Mapped("sliding_window", "sliding_window", None, is_nullable=True),
    # It adds noise while training.
    Required("router_jitter_noise", 0.0),
    heads=HEADS,
    biases=NO_BIASES,
    rotary=RotaryPositions(base=1e6),
)
QWEN2_MOE = stack(
    *experts(("num_experts",), 60, 4),
    OWN_WIDTH,
    NORMALIZED,
    Mapped("shared_expert_intermediate_size", "shared_expert_d_ff", 5632),
    Fixed("shared_expert_gate", True),
    DenseLayers(),
    Mapped("qkv_bias", "qkv_bias", True, BOOLEAN),
    SlidingWindow(_every_other_sliding, has_switch=True),
    NoWindowWithoutSwitch(),
    Inert(("max_window_layers",)),
    heads=HEADS,
    biases=NO_BIASES,
)
QWEN3_MOE = stack(
    *experts(("num_experts", "num_local_experts"), 128, 8),
    OWN_WIDTH,
    NORMALIZED,
    DenseLayers(),
    Fixed("query_key_norm", True),
    WindowInAllLayers(),
    Inert(("max_window_layers", "layer_types")),
    heads=HEADS,
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
)
OLMOE = stack(
    ONE_WIDTH,
    *experts(("num_experts", "num_local_experts"), 64, 8, weight=0.01),
    NORMALIZED,
    Mapped("clip_qkv", "qkv_clip", None),
    Fixed("query_key_norm", True),
    Fixed("query_key_norm_over", "all_heads"),
    heads=HEADS,
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
)


# Where the config.json has no rotary positions.
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = stack(
    ONE_WIDTH,
    *experts(("num_local_experts", "num_experts"), 128, 4),
    # The name in the files of the first release, beside the usual one.
    Repeated("experts_per_token", "experts_per_token"),
    Mapped("swiglu_alpha", "swiglu_slope", 1.702),
    Mapped("swiglu_limit", "swiglu_limit", 7.0),
    SlidingWindow(every_full(2)),
    *fixed(
        activation="clamped_swiglu",
        feed_forward_bias=True,
        router="softmax_of_chosen",
        router_bias=True,
        attention_sinks=True,
    ),
    # Its experts have an activation of their own. The other is the context before YaRN.
    Inert(("hidden_act", "initial_context_length")),
    heads=head_width(64),
    biases=(Mapped("attention_bias", ("output_bias", "qkv_bias"), True, BOOLEAN),),
    activation=Fixed("activation", "clamped_swiglu"),
    rotary=RotaryPositions(base=150000.0, usual=YARN),
)
GPT_OSS_EXPERTS = (
    *names({"router.proj": "router"}),
    *untransposed(
        (
            Rule(
                ("gate_proj.kernel", "up_proj.kernel"),
                ("experts.gate_up_proj",),
                NeighboursByExpert(),
            ),
            Rule(("down_proj.kernel",), ("experts.down_proj",)),
        )
    ),
    Rule(("gate_proj.bias", "up_proj.bias"), ("experts.gate_up_proj_bias",), NeighboursByExpert()),
    Rule(("down_proj.bias",), ("experts.down_proj_bias",)),
)


def gpt_oss_body(module: TransformerLM) -> Rules:
    """Returns the rules of gpt-oss's stack."""
    sinks = under("blocks.*.attention", "layers.*.self_attn", names(sinks="sinks"))
    return (*body(module, feed_forward=()), *sinks, *feed_forwards(module, "mlp", GPT_OSS_EXPERTS))


def _adapter(name: str, settings: tuple[Row, ...], **files: Any) -> StateDictAdapter:
    rules: Any = bodies(body, **files)
    return language_model(
        name,
        settings,
        rules["body"],
        published=rules["published"],
        buffers=OLD_BUFFERS,
        translated=frozenset({"interleaved"}),
    )


DIALECTS = (
    _adapter("mixtral", MIXTRAL, mixture="block_sparse_moe", called=MIXTRALS),
    _adapter("qwen2_moe", QWEN2_MOE),
    _adapter("qwen3_moe", QWEN3_MOE),
    _adapter("olmoe", OLMOE),
    language_model("gpt_oss", GPT_OSS, gpt_oss_body, translated=frozenset({"interleaved"})),
)
