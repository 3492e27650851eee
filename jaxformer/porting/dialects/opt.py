"""Hugging Face's ``opt``: OPT (arXiv 2205.01068); position t has row t + 2 of the learned table."""

from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    even_head_width,
    usual_sizes,
)
from jaxformer.porting.mapping.rules import names, under
from jaxformer.porting.mapping.settings import BOOLEAN, Conversion, Fixed, Flag, Mapped, Required
from jaxformer.porting.mapping.unread_settings import Inert

BLOCK = (
    *under(
        "attention",
        "self_attn",
        names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj"),
    ),
    *under("feed_forward", "", names(up_proj="fc1", down_proj="fc2")),
    *names(attention_norm="self_attn_layer_norm", feed_forward_norm="final_layer_norm"),
)
BODY = under(
    "",
    "decoder",
    (
        *names(
            token_embedding="embed_tokens",
            position_embedding="embed_positions",
            final_norm="final_layer_norm",
        ),
        *under("blocks.*", "layers.*", BLOCK),
    ),
)


# Only a pre-norm model has a final norm, and some of those are without.
FINAL_NORM = Conversion(
    lambda is_removed, values: values["block"] == "pre_norm" and not is_removed,
    lambda final_norm, config: config.block.block == "pre_norm" and not final_norm,
)
SETTINGS = (
    Mapped("hidden_size", "d_model"),
    Mapped("word_embed_proj_dim", "d_model", is_read=False),
    Mapped("num_attention_heads", "num_heads"),
    Required("head_dim", even_head_width),
    Required("word_embed_proj_dim", lambda values: values["d_model"]),
    Mapped("num_hidden_layers", "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("ffn_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    Mapped("do_layer_norm_before", "block", True, Flag("pre_norm", "post_norm")),
    Mapped("_remove_final_layer_norm", "final_norm", False, FINAL_NORM),
    Mapped("enable_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), True, BOOLEAN),
    Required("layer_norm_elementwise_affine", True, is_written=True),
    ATTENTION_DROPOUT,
    Mapped("dropout", "residual_dropout", 0.0),
    Required("layerdrop", 0.0),
    # transformers has no dropout there, and ffn_dim is the width that it reads.
    Inert(("activation_dropout", "intermediate_size")),
    Fixed("position_offset", 2),
)


DIALECTS = (
    language_model(
        "opt",
        SETTINGS,
        BODY,
        classes=("OPTForCausalLM", "OPTModel"),
        prefix="model.",
        tied={"lm_head.weight": "model.decoder.embed_tokens.weight"},
        is_tied_by_default=True,
        defaults={
            **usual_sizes(50272, 768, 3072, 12, 12, 2048, "relu"),
            "ffn_dim": 3072,
            "activation_function": "relu",
            "dropout": 0.1,
        },
    ),
)
