"""Hugging Face's ``olmo``, ``olmo2``, ``olmo3`` (arXiv 2402.00838, 2501.00656) and ``exaone4``.

All but the first normalise what the branches of a block add.
"""

from jaxformer.porting.dialects.common.hugging_face_settings import SlidingWindow
from jaxformer.porting.dialects.common.layer_patterns import RotaryInWindows, every_fourth_full
from jaxformer.porting.dialects.common.rotary_settings import RotaryByLayerType, RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED,
    HEAD_WIDTH,
    NO_ATTENTION_BIAS,
    NO_FEED_FORWARD_BIAS,
    body,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import Fixed, Mapped, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

OLD_ROTARY = RotaryPositions(has_two_fields=True)
OLMO = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=OLD_ROTARY),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    Mapped("clip_qkv", "qkv_clip", None),
    # Its norms have neither scale nor bias, and no setting.
    Inert(("rms_norm_eps", "layer_norm_eps")),
    *fixed(norm="layer_norm", norm_eps=1e-5, norm_scale=False, norm_bias=False),
)
OUTPUT_NORMS = (
    GATED,
    *NO_FEED_FORWARD_BIAS,
    *fixed(block="output_norm", query_key_norm=True),
)
OLMO2 = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=OLD_ROTARY),
    *OUTPUT_NORMS,
    Fixed("query_key_norm_over", "all_heads"),
)
OLMO3 = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, rotary=None),
    SlidingWindow(every_fourth_full),
    RotaryByLayerType(base=5e5, window_base=5e5),
    *OUTPUT_NORMS,
    Fixed("query_key_norm_over", "all_heads"),
)
EXAONE4 = (
    *stack(HEAD_WIDTH, *NO_ATTENTION_BIAS),
    *OUTPUT_NORMS,
    RotaryInWindows(),
)


def output_norm_body(module: TransformerLM) -> Rules:
    """Returns the rules of the stack whose blocks normalise what their two branches add."""
    return body(
        module,
        attention_norm="post_attention_layernorm",
        feed_forward_norm="post_feedforward_layernorm",
    )


DIALECTS = (
    llama_adapter("olmo", OLMO),
    llama_adapter("olmo2", OLMO2, output_norm_body),
    llama_adapter("olmo3", OLMO3, output_norm_body),
    llama_adapter("exaone4", EXAONE4, output_norm_body),
)
