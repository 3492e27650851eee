"""Hugging Face's ``gptj`` and ``codegen``: parallel branches with one norm, pairs of neighbours.

GPT-J-6B, and CodeGen (arXiv 2203.13474), whose queries, values and keys are in one array.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxformer.errors import UsageError
from jaxformer.porting.dialects.common.buffers import causal_mask, masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model, rotated, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import even_head_width
from jaxformer.porting.dialects.gpt2 import STACK
from jaxformer.porting.mapping.adapter import Buffer, StateDictAdapter
from jaxformer.porting.mapping.packings import FusedByHead
from jaxformer.porting.mapping.rules import Rule, Rules, names
from jaxformer.porting.mapping.settings import (
    Checked,
    Conversion,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
)
from jaxformer.transformer_lm import TransformerLM

# CodeGen was trained on this many devices, each of which has its share of the heads.
CODEGEN_SHARES = 4


def _fraction(width: int, values: Values) -> float:
    """Returns the share of a head that is turned, of which the head's width makes ``width``."""
    head_width = even_head_width(values)
    fraction = width / head_width
    return fraction if int(head_width * fraction) == width else math.nextafter(fraction, math.inf)


ROTARY_WIDTH = Conversion(_fraction, lambda fraction, config: int(config.head_width * fraction))
SETTINGS = (
    *STACK,
    Mapped("rotary_dim", "rotary_fraction", translation=ROTARY_WIDTH),
    Required("rotary", True),
    Required("scale_attn_weights", True),
    *fixed(
        positions="rotary",
        rotary_interleaved=True,
        block="parallel",
        shared_norm=True,
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
    ),
)


def _check_shares(values: Values) -> None:
    if values["num_heads"] % CODEGEN_SHARES:
        raise UsageError(
            f"num_attention_heads must be divisible by {CODEGEN_SHARES}: got {values['num_heads']}"
        )


def _separate(module: TransformerLM) -> Rules:
    queries_and_keys = {"q_proj": "q_proj", "k_proj": "k_proj"}
    return (*rotated(module, queries_and_keys, neighbours=True), *names(v_proj="v_proj"))


def _fused(module: TransformerLM) -> Rules:
    return (Rule(("q_proj", "v_proj", "k_proj"), ("qkv_proj",), FusedByHead(CODEGEN_SHARES)),)


def _adapter(
    name: str,
    settings: tuple[Row, ...],
    projections: Callable[[TransformerLM], Rules],
    mask: str,
    **more: Any,
) -> StateDictAdapter:
    def body(module: TransformerLM) -> Rules:
        return stack_rules(
            "h.*",
            ("attn", (*projections(module), *names(o_proj="out_proj"))),
            ("mlp", names(up_proj="fc_in", down_proj="fc_out")),
            {"attention_norm": "ln_1"},
            token_embedding="wte",
            final_norm="ln_f",
        )

    return language_model(
        name,
        settings,
        body,
        buffers=(
            Buffer(f"h.*.attn.{mask}", causal_mask, written=False),
            Buffer("h.*.attn.masked_bias", masked_score(-1e9), written=False),
        ),
        **more,
    )


DIALECTS = (
    _adapter("gptj", SETTINGS, _separate, "bias", translated=frozenset({"interleaved"})),
    _adapter("codegen", (*SETTINGS, Checked(_check_shares)), _fused, "causal_mask"),
)
