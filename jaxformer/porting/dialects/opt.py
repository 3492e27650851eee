"""Hugging Face's ``opt``, ``biogpt`` and ``xglm``; position t has row t + 2 of the table.

OPT (arXiv 2205.01068) and BioGPT (arXiv 2210.10341) learn the table, XGLM (arXiv 2112.10668) has
sinusoids.
"""

from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    SIZES,
    even_head_width,
    narrow_embedding,
    scaled_embedding,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Choices,
    Conversion,
    Fixed,
    Flag,
    Mapped,
    Required,
    fixed,
)
from jaxformer.porting.mapping.unread_settings import Inert


def body(final_norm: str, **more: str) -> Rules:
    """Returns the rules of a stack, from the name of its final norm and further pairs of names."""
    return stack_rules(
        "layers.*",
        (
            "self_attn",
            names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj"),
        ),
        ("", names(up_proj="fc1", down_proj="fc2")),
        {"attention_norm": "self_attn_layer_norm", "feed_forward_norm": "final_layer_norm"},
        token_embedding="embed_tokens",
        position_embedding="embed_positions",
        final_norm=final_norm,
        **more,
    )


# Only a pre-norm model has a final norm, and some of those are without.
FINAL_NORM = Conversion(
    lambda is_removed, values: values["block"] == "pre_norm" and not is_removed,
    lambda final_norm, config: config.block.block == "pre_norm" and not final_norm,
)
SCALED_EMBEDDING = scaled_embedding(True)
# Of training alone: the share of whole layers that are dropped.
LAYER_DROP = Required("layerdrop", 0.0)
OPT = (
    *SIZES,
    narrow_embedding("word_embed_proj_dim"),
    Fixed("projected_embeddings", "tokens"),
    Mapped("ffn_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    Mapped("do_layer_norm_before", "block", True, Flag("pre_norm", "post_norm")),
    Mapped("_remove_final_layer_norm", "final_norm", False, FINAL_NORM),
    Mapped("enable_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), True, BOOLEAN),
    Required("layer_norm_elementwise_affine", True, is_written=True),
    ATTENTION_DROPOUT,
    Mapped("dropout", "residual_dropout", 0.0),
    LAYER_DROP,
    # transformers has no dropout there, and ffn_dim is the width that it reads.
    Inert(("activation_dropout", "intermediate_size")),
    Fixed("position_offset", 2),
)
BIOGPT = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    SCALED_EMBEDDING,
    Mapped("attention_probs_dropout_prob", "attention_dropout", 0.0),
    Mapped("hidden_dropout_prob", ("residual_dropout", "embedding_dropout"), 0.0),
    Mapped("activation_dropout", "hidden_dropout", 0.0),
    LAYER_DROP,
    # Its norms add 1e-5 whatever it is.
    Inert(("layer_norm_eps",)),
    Fixed("position_offset", 2),
)
XGLM = (
    Mapped(("d_model", "hidden_size"), "d_model"),
    Mapped(("attention_heads", "num_attention_heads"), "num_heads"),
    Required("head_dim", even_head_width),
    Mapped(("num_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("ffn_dim", "d_ff", written_from="feed_forward_width"),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    SCALED_EMBEDDING,
    ATTENTION_DROPOUT,
    Mapped("dropout", ("residual_dropout", "embedding_dropout"), 0.0),
    Mapped("activation_dropout", "hidden_dropout", 0.0),
    LAYER_DROP,
    Required("add_cross_attention", False),
    # The row of this id is zero in the table of sinusoids; no position has the first two.
    Mapped(
        "pad_token_id",
        "position_offset",
        1,
        Choices({None: 2, 0: 2, 1: 2}),
        is_nullable=True,
    ),
    *fixed(positions="sinusoidal", sinusoid_halves=True),
)


DIALECTS = (
    language_model(
        "opt",
        OPT,
        under(
            "",
            "decoder",
            body(
                "final_layer_norm",
                embedding_projection="project_in",
                output_projection="project_out",
            ),
        ),
    ),
    language_model(
        "biogpt",
        BIOGPT,
        body("layer_norm"),
        head=names(lm_head="output_projection"),
        outside=("output_projection.",),
    ),
    language_model(
        "xglm",
        XGLM,
        body("layer_norm"),
    ),
)
