"""Kin of Llama: its stack with other biases, factors, rotary positions or feed-forwards.

- ``smollm3``: layers without rotary positions. ``granite`` (arXiv 2408.13359): four factors.
- ``helium`` and ``ernie4_5`` rotate neighbours. ``arcee``: a feed-forward that is not gated.
- ``phi3``, ``glm``, ``glm4`` (arXiv 2404.14219, 2406.12793): a gate and what it multiplies are
  one array, in Phi-3 queries, keys and values too.
- ``apertus`` (arXiv 2509.14233): xIELU in a feed-forward without gate. ``hunyuan_v1_dense``
  normalises queries and keys after the rotation, and stretches the base of its rotary positions by
  a number that it calls alpha.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    DIVISOR,
    FACTOR,
    SCORE_FACTOR,
    even_head_width,
)
from jaxformer.porting.dialects.common.layer_patterns import SlidingWindow, every, interval
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    FEED_FORWARD_BIAS,
    GATED_FEED_FORWARD,
    NO_BIASES,
    NO_FEED_FORWARD_BIAS,
    OLD_BUFFERS,
    TWO_NORMS,
    head_width,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.packings import Fused, Shape
from jaxformer.porting.mapping.rules import Rule, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    FLOAT,
    Checked,
    Choices,
    Fixed,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


@dataclass(frozen=True)
class LayersWithoutRotary(Row):
    """SmolLM 3's ``no_rope_layers``, which has a 0 for each layer without rotary positions."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives those layers."""
        num_layers = values["num_layers"]
        step = source_model.setting("no_rope_layer_interval", default=4)
        turned = source_model.setting("no_rope_layers", default=None)
        if turned is None:
            return {"layers_without_rotary": every(step, num_layers)}
        if len(turned) < num_layers:
            raise unsupported("no_rope_layers", f"have {num_layers} entries", turned)
        without = tuple(layer for layer in range(num_layers) if not turned[layer])
        return {"layers_without_rotary": without}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives an entry for each layer."""
        without = config.layers.layers_without_rotary
        turned = [int(layer not in without) for layer in range(config.num_layers)]
        return {
            "no_rope_layers": turned,
            "no_rope_layer_interval": interval(without, config.num_layers),
        }


@dataclass(frozen=True)
class NoWindowWithoutSwitch(Row):
    """SmolLM 3 masks layers by their types alone; its switch then has an effect on a part of it."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Rejects types that contradict the switch."""
        types = source_model.setting("layer_types", default=None) or ()
        if "sliding_attention" in types and not values.get("sliding_window"):
            raise unsupported("layer_types", "be full_attention without use_sliding_window", types)
        return {}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives nothing."""
        return {}


def _windows_without_rotary(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns SmolLM 3's types of layers: those without rotary positions have the window."""
    without = LayersWithoutRotary().read(source_model, {"num_layers": num_layers})
    return [
        "sliding_attention" if layer in without["layers_without_rotary"] else "full_attention"
        for layer in range(num_layers)
    ]


# null says that they share the width.
WIDE_HEADS = head_width(128, is_nullable=True)
SMOLLM3 = stack(
    LayersWithoutRotary(),
    SlidingWindow(_windows_without_rotary, has_switch=True),
    NoWindowWithoutSwitch(),
    rotary=RotaryPositions(base=2e6),
)
GRANITE = stack(
    Mapped("embedding_multiplier", "embedding_scale", 1.0, FACTOR),
    Mapped("attention_multiplier", "attention_scale", 1.0, SCORE_FACTOR),
    Mapped("residual_multiplier", "residual_scale", 1.0, FLOAT),
    Mapped("logits_scaling", "logit_scale", 1.0, DIVISOR),
)
HELIUM = stack(
    Mapped("attention_bias", "qkv_bias", False, BOOLEAN),
    Fixed("output_bias", False),
    heads=WIDE_HEADS,
    biases=(FEED_FORWARD_BIAS,),
    rotary=RotaryPositions(base=1e5),
)
ARCEE = stack(
    Checked(even_head_width),
    activation=Mapped("hidden_act", "activation", translation=ACTIVATIONS),
)
SEED_OSS = stack(
    Mapped("attention_bias", "qkv_bias", True, BOOLEAN),
    Mapped("attention_out_bias", "output_bias", False, BOOLEAN),
    Mapped("residual_dropout", "residual_dropout", 0.1),
    Inert(("pretraining_tp",)),
    heads=WIDE_HEADS,
    biases=(FEED_FORWARD_BIAS,),
)
ERNIE = stack(
    # Its class drops no weights, whatever a config.json says.
    Fixed("attention_dropout", 0.0),
    Inert(("attention_bias", "mlp_bias")),
    heads=WIDE_HEADS,
    biases=(Mapped("use_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), False, BOOLEAN),),
    rotary=RotaryPositions(base=5e5),
)


@dataclass(frozen=True)
class Phi3Positions(RotaryPositions):
    """Rotary positions whose longrope has only the three settings that transformers 4 lets it have.

    What else there is stands beside them, or follows from the two lengths.
    """

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms."""
        written = super().write(config)
        scaling = config.position.rotary.scaling
        ratio = config.context_length / scaling.rotary_original_context_length
        follows = scaling.rotary_attention_factor is None and scaling.rotary_scaling_factor == ratio
        if scaling.rotary_scaling == "longrope" and follows:
            factors = {n: written["rope_scaling"][n] for n in ("short_factor", "long_factor")}
            written["rope_scaling"] = {"type": "longrope", **factors}
        return written


PHI3 = stack(
    # null says that there is none.
    Mapped("sliding_window", "sliding_window", None, is_nullable=True),
    Mapped("resid_pdrop", "residual_dropout", 0.0),
    # Its class has no such dropout.
    Inert(("embd_pdrop",)),
    biases=NO_BIASES,
    rotary=Phi3Positions(fraction=1.0),
)
GLM = stack(
    Mapped("attention_bias", "qkv_bias", True, BOOLEAN),
    Fixed("output_bias", False),
    heads=head_width(128),
    biases=NO_FEED_FORWARD_BIAS,
    rotary=RotaryPositions(fraction=0.5),
)
FUSED_GATE = (
    Rule(("gate_proj", "up_proj"), ("gate_up_proj",), Fused()),
    *names(down_proj="down_proj"),
)
FUSED_QKV = (Rule(("q_proj", "k_proj", "v_proj"), ("qkv_proj",), Fused()),)
FOUR_NORMS = {
    **TWO_NORMS,
    "attention_output_norm": "post_self_attn_layernorm",
    "feed_forward_output_norm": "post_mlp_layernorm",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
APERTUS = stack(
    Fixed("query_key_norm", True),
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
    activation=Mapped(
        "hidden_act", "activation", "xielu", Choices({"xielu": "xielu", **ACTIVATIONS.table})
    ),
    rotary=RotaryPositions(base=12e6, usual=LLAMA3),
)


def _constant(name: str) -> Buffer:
    """Returns the buffer of one of xIELU's two constants."""

    def values(module: TransformerLM, shape: Shape | None) -> np.ndarray | None:
        xielu = getattr(module.blocks[0].feed_forward, "xielu", None)
        return None if xielu is None else np.array(getattr(xielu, name), np.float32)

    # transformers builds it in the dtype of the config.json: 1e-6 has five bits in float16.
    return Buffer(f"layers.*.mlp.act_fn.{name}", values, rounding=2.0**-5)


@dataclass(frozen=True)
class RotaryWithAlpha(RotaryPositions):
    """Rotary positions called "dynamic", with a fixed ``alpha`` that stretches the base."""

    def read_parameters(
        self, given: Mapping[str, Any], source_model: SourceModel, values: Values
    ) -> dict[str, Any]:
        """Gives the fields of rotary positions."""
        kind, alpha = given.get("rope_type", given.get("type")), given.get("alpha")
        known = ("alpha", "rope_type", "type")
        given = {name: value for name, value in given.items() if name not in known}
        if kind != "dynamic" or not alpha:
            return super().read_parameters({**given, "rope_type": kind}, source_model, values)
        fields = super().read_parameters({**given, "rope_type": "default"}, source_model, values)
        return {**fields, "rotary_scaling": "ntk", "rotary_scaling_factor": float(alpha)}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms."""
        scaling = config.position.rotary.scaling
        if scaling.rotary_scaling != "ntk":
            return super().write(config)
        alpha = {"rope_type": "dynamic", "factor": 1.0, "alpha": scaling.rotary_scaling_factor}
        base = config.position.rotary.rotary_base
        return {
            "rope_parameters": {**alpha, "rope_theta": base},
            "rope_theta": base,
            "rope_scaling": alpha,
        }


HUNYUAN = stack(
    *fixed(query_key_norm=True, query_key_norm_after_rotation=True),
    # What the files of the first release say beside it.
    Required("use_qk_norm", True),
    Required("use_cla", False),
    Inert(("eod_token_id", "pretraining_tp", "norm_type")),
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
    rotary=RotaryWithAlpha(),
)


DIALECTS = (
    llama_adapter("smollm3", SMOLLM3),
    llama_adapter("granite", GRANITE),
    llama_adapter("helium", HELIUM, neighbours=True),
    llama_adapter("arcee", ARCEE, feed_forward=names(up_proj="up_proj", down_proj="down_proj")),
    llama_adapter("seed_oss", SEED_OSS),
    llama_adapter("ernie4_5", ERNIE, neighbours=True),
    llama_adapter(
        "phi3",
        PHI3,
        qkv=lambda module: FUSED_QKV,
        feed_forward=FUSED_GATE,
        # Halves and neighbours cannot change places within one array.
        translated=frozenset(),
    ),
    llama_adapter("glm", GLM, neighbours=True, feed_forward=FUSED_GATE),
    llama_adapter(
        "glm4",
        (*GLM, Fixed("branch_output_norm", True)),
        neighbours=True,
        feed_forward=FUSED_GATE,
        norms=FOUR_NORMS,
    ),
    llama_adapter(
        "apertus",
        APERTUS,
        feed_forward=(*GATED_FEED_FORWARD, *names(xielu="act_fn")),
        norms={
            "attention_norm": "attention_layernorm",
            "feed_forward_norm": "feedforward_layernorm",
        },
        buffers=(*OLD_BUFFERS, _constant("beta"), _constant("eps")),
    ),
    llama_adapter("hunyuan_v1_dense", HUNYUAN, q_norm="query_layernorm", k_norm="key_layernorm"),
)
