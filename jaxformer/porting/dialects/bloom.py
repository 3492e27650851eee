"""Hugging Face's ``bloom``: BLOOM (arXiv 2211.05100), with ALiBi and a norm on the embeddings."""

from jaxformer.porting.dialects.common.hugging_face import fused_stack, language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.mapping.rules import Rules
from jaxformer.porting.mapping.settings import Fixed, Mapped, Required, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "h.*",
        "self_attention",
        token_embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
    )


SETTINGS = (
    Mapped(("hidden_size", "n_embed"), "d_model"),
    Mapped(("n_head", "num_attention_heads"), "num_heads"),
    Required("head_dim", even_head_width),
    Mapped(("n_layer", "num_hidden_layers"), "num_layers"),
    # ALiBi has no table that would end; this is the length that the model was trained on.
    Mapped("seq_length", "context_length", 2048),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Required("apply_residual_connection_post_layernorm", False, is_written=True),
    ATTENTION_DROPOUT,
    Mapped("hidden_dropout", "residual_dropout", 0.0),
    Required("n_embed", lambda values: values["d_model"]),
    # With pretraining_tp it adds the parts of a product, and leaves out the bias.
    Required("slow_but_exact", False),
    # How it was trained, in the words of Megatron.
    Inert(
        (
            "pretraining_tp", "attention_softmax_in_fp32", "bias_dropout_fusion", "offset_alibi",
            "masked_softmax_fusion", "skip_bias_add", "skip_bias_add_qkv",
        )
    ),
    Fixed("d_ff", lambda source_model, values: 4 * values["d_model"]),
    *fixed(activation="gelu_bloom", positions="alibi", embedding_norm=True),
)  # fmt: skip


DIALECTS = (language_model("bloom", SETTINGS, _body),)
