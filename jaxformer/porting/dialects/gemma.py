"""Hugging Face's ``gemma``, ``gemma2``, ``gemma3_text`` (arXiv 2403.08295, 2408.00118, 2503.19786).

Token embeddings are multiplied by sqrt(D). In bfloat16 transformers rounds that factor to bfloat16
first (sqrt(3072) = 55.43 becomes 55.5), which is 0.1 % away from its own float32; here it is not.
"""

import math
from typing import Any

from jaxformer.porting.dialects.common.hugging_face_settings import (
    GATED_ACTIVATIONS,
    even_head_width,
)
from jaxformer.porting.dialects.common.layer_patterns import SlidingWindow, every_full
from jaxformer.porting.dialects.common.rotary_settings import RotaryByLayerType
from jaxformer.porting.dialects.llama import ATTENTION_BIAS, head_width, llama_adapter, stack
from jaxformer.porting.mapping.settings import (
    Checked,
    Choices,
    Conversion,
    Fixed,
    Mapped,
    Repeated,
    Required,
)
from jaxformer.porting.mapping.unread_settings import Inert

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
OFFSET_NORMS = (
    Required("use_bidirectional_attention", False),
    Fixed("norm_unit_offset", True),
    Fixed("embedding_scale", lambda source_model, values: math.sqrt(values["d_model"])),
)
STACK: dict[str, Any] = {
    "heads": head_width(256),
    "biases": (ATTENTION_BIAS, Fixed("feed_forward_bias", False)),
}
GEMMA = stack(
    *OFFSET_NORMS,
    # transformers 4 has it go before hidden_act, transformers 5 does not read it.
    Repeated("hidden_activation", "activation", FIRST_ACTIVATIONS),
    activation=Mapped("hidden_act", "activation", translation=FIRST_ACTIVATIONS),
    **STACK,
)
# Of the second and the third.
LATER = (
    *OFFSET_NORMS,
    Checked(even_head_width),
    Mapped("query_pre_attn_scalar", "attention_scale", 256, QUERY_SCALAR),
    Fixed("branch_output_norm", True),
)
ACTIVATION = Mapped("hidden_activation", "activation", translation=GATED_ACTIVATIONS)
GEMMA2 = stack(
    *LATER,
    Mapped("hidden_act", "activation", translation=GATED_ACTIVATIONS, is_read=False),
    # null says that there is none.
    Mapped("attn_logit_softcapping", "score_soft_cap", 50.0, is_nullable=True),
    Mapped("final_logit_softcapping", "logit_soft_cap", 30.0, is_nullable=True),
    SlidingWindow(every_full(2)),
    Inert(("sliding_window_size",)),
    activation=ACTIVATION,
    **STACK,
)
GEMMA3 = stack(
    *LATER,
    Mapped("final_logit_softcapping", "logit_soft_cap", None, is_nullable=True),
    SlidingWindow(every_full(6, "sliding_window_pattern")),
    RotaryByLayerType(base=1e6),
    Fixed("query_key_norm", True),
    # Its class sets the second of these by the first, and does not hand the last to the attention.
    Inert(("sliding_window_pattern", "_sliding_window_pattern", "attn_logit_softcapping")),
    activation=ACTIVATION,
    rotary=None,
    **STACK,
)
FOUR_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_output_norm": "post_attention_layernorm",
    "feed_forward_norm": "pre_feedforward_layernorm",
    "feed_forward_output_norm": "post_feedforward_layernorm",
}


DIALECTS = (
    llama_adapter("gemma", GEMMA),
    llama_adapter("gemma2", GEMMA2, norms=FOUR_NORMS),
    llama_adapter("gemma3_text", GEMMA3, norms=FOUR_NORMS),
)
