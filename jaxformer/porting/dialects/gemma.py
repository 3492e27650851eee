"""Hugging Face's ``gemma``, ``gemma2``, ``gemma3_text`` (arXiv 2403.08295, 2408.00118, 2503.19786).

Token embeddings are multiplied by sqrt(D). In bfloat16 transformers rounds that factor to bfloat16
first (sqrt(3072) = 55.43 becomes 55.5), which is 0.1 % away from its own float32; here it is not.
"""

import math

from jaxformer.porting.dialects.common.hugging_face_settings import (
    GATED_ACTIVATIONS,
    SlidingWindow,
    even_head_width,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryByLayerType
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    body,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import (
    Checked,
    Choices,
    Conversion,
    Fixed,
    Mapped,
    Repeated,
    Required,
    fixed,
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
HEAD_WIDTH = Mapped("head_dim", "head_dim", 256, written_from="head_width")
OFFSET_NORMS = (
    Required("use_bidirectional_attention", False),
    Fixed("norm_unit_offset", True),
    Fixed("embedding_scale", lambda source_model, values: math.sqrt(values["d_model"])),
    Fixed("feed_forward_bias", False),
)
STACK = (*stack(HEAD_WIDTH, ATTENTION_BIAS), *OFFSET_NORMS)


def _five_to_one(source_model: SourceModel, num_layers: int) -> list[str]:
    """Returns Gemma 3's types of layers."""
    names = ("sliding_window_pattern", "_sliding_window_pattern")
    every = source_model.setting(*names, default=6)
    return [
        "sliding_attention" if (layer + 1) % every else "full_attention"
        for layer in range(num_layers)
    ]


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
GEMMA3 = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=None),
    *OFFSET_NORMS,
    Checked(even_head_width),
    Mapped("hidden_activation", "activation", translation=GATED_ACTIVATIONS),
    Mapped("query_pre_attn_scalar", "attention_scale", 256, QUERY_SCALAR),
    Mapped("final_logit_softcapping", "logit_soft_cap", None, is_nullable=True),
    SlidingWindow(_five_to_one),
    RotaryByLayerType(base=1e6),
    *fixed(branch_output_norm=True, query_key_norm=True),
    # Its class has the last of these, and does not hand it to the attention.
    Inert(("sliding_window_pattern", "_sliding_window_pattern", "attn_logit_softcapping")),
)


def _four_norm_body(module: TransformerLM) -> Rules:
    return body(
        module,
        attention_norm="input_layernorm",
        attention_output_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_output_norm="post_feedforward_layernorm",
    )


DIALECTS = (
    llama_adapter("gemma", GEMMA),
    llama_adapter("gemma2", GEMMA2, _four_norm_body),
    llama_adapter("gemma3_text", GEMMA3, _four_norm_body),
)
