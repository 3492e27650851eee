"""Hugging Face's ``gemma`` and ``gemma2`` (arXiv 2403.08295 and 2408.00118).

Token embeddings are multiplied by sqrt(D). In bfloat16 transformers rounds that factor to bfloat16
first (sqrt(3072) = 55.43 becomes 55.5), which is 0.1 % away from its own float32; here it is not.
"""

import math
from collections.abc import Callable
from typing import Any

from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    GATED_ACTIVATIONS,
    SlidingWindow,
    even_head_width,
    usual_sizes,
)
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    OLD_BUFFERS,
    body,
    stack,
    two_norm_body,
)
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import (
    Checked,
    Choices,
    Conversion,
    Fixed,
    Mapped,
    Repeated,
    Required,
    Row,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

# The first Gemma's files say gelu where they mean its tanh approximation.
FIRST_ACTIVATIONS = Choices(
    {
        source: "geglu_tanh" if target == "geglu" else target
        for source, target in {
            "gelu_pytorch_tanh": "geglu_tanh",
            **GATED_ACTIVATIONS.table,
        }.items()
    }
)
# Scores are multiplied by 1/sqrt of this number.
QUERY_SCALAR = Conversion(
    lambda number, values: 1 / math.sqrt(number),
    lambda scale, config: config.head_width if scale is None else round(scale**-2),
)
STACK = (
    Required("use_bidirectional_attention", False),
    *stack(
        Mapped("head_dim", "head_dim", 256, written_from="head_width"),
        ATTENTION_BIAS,
    ),
    Fixed("norm_unit_offset", True),
    Fixed("embedding_scale", lambda source_model, values: math.sqrt(values["d_model"])),
    Fixed("feed_forward_bias", False),
)


def _alternating(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns Gemma 2's types of layers."""
    return [("sliding_attention", "full_attention")[layer % 2] for layer in range(num_layers)]


GEMMA = (
    *STACK,
    Mapped("hidden_act", "activation", translation=FIRST_ACTIVATIONS),
    # transformers 4 has it go before hidden_act, transformers 5 does not read it.
    Repeated("hidden_activation", "activation", FIRST_ACTIVATIONS),
)
GEMMA2 = (
    *STACK,
    Checked(even_head_width),
    Mapped("hidden_act", "activation", translation=GATED_ACTIVATIONS, is_read=False),
    Mapped("hidden_activation", "activation", translation=GATED_ACTIVATIONS),
    Mapped("query_pre_attn_scalar", "attention_scale", 256, QUERY_SCALAR),
    # null says that there is none.
    Mapped("attn_logit_softcapping", "score_soft_cap", 50.0, is_nullable=True),
    Mapped("final_logit_softcapping", "logit_soft_cap", 30.0, is_nullable=True),
    SlidingWindow(_alternating),
    Inert(("sliding_window_size",)),
    Fixed("branch_output_norm", True),
)


def _four_norm_body(module: TransformerLM) -> Rules:
    return body(
        module,
        attention_norm="input_layernorm",
        attention_output_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_output_norm="post_feedforward_layernorm",
    )


def _adapter(
    name: str,
    start: str,
    settings: tuple[Row, ...],
    rules: Callable[[TransformerLM], Rules],
    **defaults: Any,
) -> StateDictAdapter:
    return language_model(
        name,
        settings,
        rules,
        classes=(f"{start}ForCausalLM", f"{start}Model"),
        prefix="model.",
        tied={"lm_head.weight": "model.embed_tokens.weight"},
        is_tied_by_default=True,
        defaults=defaults,
        buffers=OLD_BUFFERS,
        translated=frozenset({"interleaved"}),
    )


DIALECTS = (
    _adapter(
        "gemma",
        "Gemma",
        GEMMA,
        two_norm_body,
        **usual_sizes(256000, 3072, 24576, 28, 16, 8192, "gelu_pytorch_tanh"),
        num_key_value_heads=16,
    ),
    _adapter(
        "gemma2",
        "Gemma2",
        GEMMA2,
        _four_norm_body,
        **usual_sizes(256000, 2304, 9216, 26, 8, 8192, "gelu_pytorch_tanh"),
        hidden_activation="gelu_pytorch_tanh",
        num_key_value_heads=4,
    ),
)
