"""Hugging Face's ``gpt_neox``: GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373)."""

from jaxformer.porting.dialects.common.buffers import causal_mask, inverse_frequencies, masked_score
from jaxformer.porting.dialects.common.hugging_face import fused_stack, language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    SIZES,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import BOOLEAN, Flag, Mapped, Required
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "layers.*",
        "attention",
        token_embedding="embed_in",
        final_norm="final_layer_norm",
    )


SETTINGS = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    ATTENTION_DROPOUT,
    RotaryPositions(0.25, "rotary_emb_base", "rotary_pct"),
    # As other families call these two, and as they are written here too.
    Required("rope_theta", lambda values: values["rotary_base"]),
    Required("partial_rotary_factor", lambda values: values["rotary_fraction"]),
    Mapped("use_parallel_residual", "block", True, Flag("parallel", "pre_norm")),
    Mapped("attention_bias", ("qkv_bias", "output_bias"), True, BOOLEAN),
    Mapped("hidden_dropout", ("residual_dropout", "embedding_dropout"), 0.0),
    # What readers before transformers 5 take in place of rope_parameters.
    Mapped("rotary_emb_base", "rotary_base", is_read=False),
    Mapped("rotary_pct", "rotary_fraction", is_read=False),
    Inert(("is_decoder",)),
)


DIALECTS = (
    language_model(
        "gpt_neox",
        SETTINGS,
        _body,
        # Only transformers 5 reads the head by the name that it has there.
        old_names={r"^embed_out\.": "lm_head."},
        published_names={r"^lm_head\.": "embed_out."},
        buffers=(
            Buffer("layers.*.attention.bias", causal_mask, written=False),
            Buffer("layers.*.attention.masked_bias", masked_score(-1e9), written=False),
            Buffer("layers.*.attention.rotary_emb.inv_freq", inverse_frequencies, written=False),
        ),
    ),
)
