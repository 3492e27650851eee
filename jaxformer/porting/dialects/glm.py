"""Hugging Face's ``phi3``, ``glm`` and ``glm4`` (arXiv 2404.14219, 2406.12793): fused arrays.

A gate and what it is multiplied by are one array, in Phi-3 queries, keys and values too.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    GATED,
    HEAD_WIDTH,
    NO_ATTENTION_BIAS,
    NO_FEED_FORWARD_BIAS,
    body,
    llama_adapter,
    stack,
    two_norm_body,
)
from jaxformer.porting.mapping.packings import Fused
from jaxformer.porting.mapping.rules import Rule, Rules, names
from jaxformer.porting.mapping.settings import BOOLEAN, Fixed, Mapped
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


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


QKV = (Rule(("q_proj", "k_proj", "v_proj"), ("qkv_proj",), Fused()),)
GATE = (
    Rule(("gate_proj", "up_proj"), ("gate_up_proj",), Fused()),
    *names(down_proj="down_proj"),
)
# What readers before transformers 5 take in place of rope_parameters.
OLD_FRACTION = Mapped("partial_rotary_factor", "rotary_fraction", is_read=False)
PHI3 = (
    *stack(HEAD_WIDTH, *NO_ATTENTION_BIAS, rotary=Phi3Positions(fraction=1.0)),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    # null says that there is none.
    Mapped("sliding_window", "sliding_window", None, is_nullable=True),
    dataclasses.replace(OLD_FRACTION, omit=1.0),
    # Phi-3's class reads it here alone.
    Mapped(
        "original_max_position_embeddings",
        "rotary_original_context_length",
        is_read=False,
        applies=lambda values: values["rotary_scaling"] == "longrope",
    ),
    Mapped("resid_pdrop", "residual_dropout", 0.0),
    # Its class has no such dropout.
    Inert(("embd_pdrop",)),
)
GLM = (
    *stack(
        Mapped("head_dim", "head_dim", 128, written_from="head_width"),
        Mapped("attention_bias", "qkv_bias", True, BOOLEAN),
        Fixed("output_bias", False),
        rotary=RotaryPositions(fraction=0.5),
    ),
    OLD_FRACTION,
    GATED,
    *NO_FEED_FORWARD_BIAS,
    Fixed("rotary_interleaved", True),
)


def _phi3_body(module: TransformerLM) -> Rules:
    return two_norm_body(module, qkv=QKV, feed_forward=GATE)


def _glm_body(module: TransformerLM) -> Rules:
    return two_norm_body(module, neighbours=True, feed_forward=GATE)


def _glm4_body(module: TransformerLM) -> Rules:
    return body(
        module,
        neighbours=True,
        feed_forward=GATE,
        attention_norm="input_layernorm",
        attention_output_norm="post_self_attn_layernorm",
        feed_forward_norm="post_attention_layernorm",
        feed_forward_output_norm="post_mlp_layernorm",
    )


DIALECTS = (
    llama_adapter(
        "phi3",
        PHI3,
        _phi3_body,
        # Halves and neighbours cannot change places within one array.
        translated=frozenset(),
    ),
    llama_adapter("glm", GLM, _glm_body),
    llama_adapter("glm4", (*GLM, Fixed("branch_output_norm", True)), _glm4_body),
)
