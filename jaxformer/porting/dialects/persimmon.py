"""Hugging Face's ``persimmon``: Persimmon-8B by Adept, GPT-NeoX with norms of queries and keys."""

from jaxformer.porting.dialects.common.hugging_face import fused_stack, language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    SIZES,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import BOOLEAN, Mapped
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "layers.*",
        "self_attn",
        token_embedding="embed_tokens",
        final_norm="final_layernorm",
    )


SETTINGS = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    ATTENTION_DROPOUT,
    Mapped("hidden_dropout", "feed_forward_dropout", 0.0),
    RotaryPositions(fraction=0.5),
    # What readers before transformers 5 take in place of rope_parameters.
    Mapped("partial_rotary_factor", "rotary_fraction", is_read=False),
    Mapped("qk_layernorm", "query_key_norm", True, BOOLEAN),
)


DIALECTS = (language_model("persimmon", SETTINGS, _body),)
