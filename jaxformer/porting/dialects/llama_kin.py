"""Hugging Face's ``smollm3``, ``granite``, ``helium``, ``arcee``, ``seed_oss`` and ``ernie4_5``.

Llama with other biases, with layers without rotary positions (SmolLM 3), with four factors
(Granite, arXiv 2408.13359), with rotated neighbours (Helium, ERNIE 4.5), or with a feed-forward
that is not gated (Arcee).
"""

import functools
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.factors import DIVISOR, FACTOR, SCORE_FACTOR
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    SlidingWindow,
    even_head_width,
)
from jaxformer.porting.dialects.common.layer_patterns import every, interval
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED,
    HEAD_WIDTH,
    llama_adapter,
    stack,
    two_norm_body,
)
from jaxformer.porting.mapping.rules import names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    FLOAT,
    Checked,
    Fixed,
    Mapped,
    Row,
    Values,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert

FEED_FORWARD_BIAS = Mapped("mlp_bias", "feed_forward_bias", False, BOOLEAN)
QKV_BIAS = (Mapped("attention_bias", "qkv_bias", False, BOOLEAN), Fixed("output_bias", False))
# null says that they share the width.
WIDE_HEADS = Mapped("head_dim", "head_dim", 128, written_from="head_width", is_nullable=True)


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


SMOLLM3 = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=RotaryPositions(base=2e6)),
    GATED,
    FEED_FORWARD_BIAS,
    LayersWithoutRotary(),
    SlidingWindow(_windows_without_rotary, has_switch=True),
    NoWindowWithoutSwitch(),
)
GRANITE = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS),
    GATED,
    FEED_FORWARD_BIAS,
    Mapped("embedding_multiplier", "embedding_scale", 1.0, FACTOR),
    Mapped("attention_multiplier", "attention_scale", 1.0, SCORE_FACTOR),
    Mapped("residual_multiplier", "residual_scale", 1.0, FLOAT),
    Mapped("logits_scaling", "logit_scale", 1.0, DIVISOR),
)
HELIUM = (
    *stack(WIDE_HEADS, *QKV_BIAS, rotary=RotaryPositions(base=1e5)),
    GATED,
    FEED_FORWARD_BIAS,
    Fixed("rotary_interleaved", True),
)
ARCEE = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS),
    Checked(even_head_width),
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    FEED_FORWARD_BIAS,
)
SEED_OSS = (
    *stack(
        WIDE_HEADS,
        Mapped("attention_bias", "qkv_bias", True, BOOLEAN),
        Mapped("attention_out_bias", "output_bias", False, BOOLEAN),
    ),
    GATED,
    FEED_FORWARD_BIAS,
    Mapped("residual_dropout", "residual_dropout", 0.1),
    Inert(("pretraining_tp",)),
)
ERNIE = (
    *stack(
        WIDE_HEADS,
        Mapped("use_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), False, BOOLEAN),
        rotary=RotaryPositions(base=5e5),
    ),
    GATED,
    # Its class drops no weights, whatever a config.json says.
    Fixed("attention_dropout", 0.0),
    Inert(("attention_bias", "mlp_bias")),
    Fixed("rotary_interleaved", True),
)
neighbours_body = functools.partial(two_norm_body, neighbours=True)
plain_body = functools.partial(
    two_norm_body, feed_forward=names(up_proj="up_proj", down_proj="down_proj")
)

DIALECTS = (
    llama_adapter("smollm3", SMOLLM3),
    llama_adapter("granite", GRANITE),
    llama_adapter("helium", HELIUM, neighbours_body),
    llama_adapter("arcee", ARCEE, plain_body),
    llama_adapter("seed_oss", SEED_OSS),
    llama_adapter("ernie4_5", ERNIE, neighbours_body),
)
