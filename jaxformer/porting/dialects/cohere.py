"""Hugging Face's ``cohere`` and ``cohere2``: Command R and R7B, parallel branches with one norm."""

from jaxformer.porting.dialects.common.factors import FACTOR
from jaxformer.porting.dialects.common.layer_patterns import RotaryInWindows
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED,
    HEAD_WIDTH,
    NO_FEED_FORWARD_BIAS,
    body,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Checked,
    Fixed,
    Mapped,
    Values,
    fixed,
    unsupported,
)
from jaxformer.transformer_lm import TransformerLM

STACK = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, eps="layer_norm_eps"),
    GATED,
    *NO_FEED_FORWARD_BIAS,
    Mapped("logit_scale", "logit_scale", 0.0625, FACTOR),
    *fixed(
        norm="layer_norm",
        norm_bias=False,
        block="parallel",
        shared_norm=True,
        rotary_interleaved=True,
    ),
)
COHERE = (
    *STACK,
    Mapped("use_qk_norm", "query_key_norm", False, BOOLEAN),
    Fixed("query_key_norm_over", "own_head"),
    RotaryPositions(base=5e5),
)


def _has_window(values: Values) -> None:
    """Checks that there is a window, without which transformers cannot run the model."""
    if values.get("sliding_window") is None:
        raise unsupported("sliding_window", "be a number", None)


COHERE2 = (*STACK, RotaryInWindows(), Checked(_has_window))


def _body(module: TransformerLM) -> Rules:
    return body(module, neighbours=True, attention_norm="input_layernorm")


DIALECTS = (llama_adapter("cohere", COHERE, _body), llama_adapter("cohere2", COHERE2, _body))
