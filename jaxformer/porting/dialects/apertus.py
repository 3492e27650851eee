"""Hugging Face's ``apertus`` and ``hunyuan_v1_dense``: LLaMA's stack, queries and keys normalised.

Apertus (arXiv 2509.14233) has xIELU in a feed-forward without gate. HunYuan normalises after the
rotation, and stretches the base of its rotary positions by a number that it calls alpha.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED,
    HEAD_WIDTH,
    NO_FEED_FORWARD_BIAS,
    OLD_BUFFERS,
    body,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.packings import Shape
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import Choices, Fixed, Mapped, Required, Values, fixed
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
APERTUS = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=RotaryPositions(base=12e6, usual=LLAMA3)),
    *NO_FEED_FORWARD_BIAS,
    Mapped("hidden_act", "activation", "xielu", Choices({"xielu": "xielu", **ACTIVATIONS.table})),
    Fixed("query_key_norm", True),
)


def _apertus_body(module: TransformerLM) -> Rules:
    xielu = under("blocks.*.feed_forward", "layers.*.mlp", names(xielu="act_fn"))
    rules = body(
        module, attention_norm="attention_layernorm", feed_forward_norm="feedforward_layernorm"
    )
    return (*rules, *xielu)


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


HUNYUAN = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=RotaryWithAlpha()),
    *NO_FEED_FORWARD_BIAS,
    GATED,
    *fixed(query_key_norm=True, query_key_norm_after_rotation=True),
    # What the files of the first release say beside it.
    Required("use_qk_norm", True),
    Required("use_cla", False),
    Inert(("eod_token_id", "pretraining_tp", "norm_type")),
)


def _hunyuan_body(module: TransformerLM) -> Rules:
    return body(
        module,
        q_norm="query_layernorm",
        k_norm="key_layernorm",
        attention_norm="input_layernorm",
        feed_forward_norm="post_attention_layernorm",
    )


DIALECTS = (
    llama_adapter(
        "apertus",
        APERTUS,
        _apertus_body,
        buffers=(*OLD_BUFFERS, _constant("beta"), _constant("eps")),
    ),
    llama_adapter("hunyuan_v1_dense", HUNYUAN, _hunyuan_body),
)
