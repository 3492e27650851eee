"""Hugging Face's ``gpt2``: GPT-2, with (in, out) matrices and one for queries, keys and values."""

from jaxformer.porting.dialects.common.buffers import causal_mask, masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import ACTIVATIONS
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Fused, Rule, names, under, untransposed
from jaxformer.porting.mapping.settings import Mapped, Required
from jaxformer.porting.mapping.unread_settings import Inert

BLOCK = (
    *under(
        "attention",
        "attn",
        untransposed(
            (
                Rule(("q_proj", "k_proj", "v_proj"), ("c_attn",), Fused()),
                *names(o_proj="c_proj"),
            )
        ),
    ),
    *under("feed_forward", "mlp", untransposed(names(up_proj="c_fc", down_proj="c_proj"))),
    *names(attention_norm="ln_1", feed_forward_norm="ln_2"),
)
BODY = (
    *names(token_embedding="wte", position_embedding="wpe", final_norm="ln_f"),
    *under("blocks.*", "h.*", BLOCK),
)


SETTINGS = (
    Required("scale_attn_weights", True),
    Required("scale_attn_by_inverse_layer_idx", False),
    Required("add_cross_attention", False),
    Mapped(("n_embd", "hidden_size"), "d_model"),
    Mapped(("n_head", "num_attention_heads"), "num_heads"),
    Mapped(("n_layer", "num_hidden_layers"), "num_layers"),
    Mapped(("n_positions", "max_position_embeddings"), "context_length"),
    Mapped("n_inner", "d_ff", None),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Mapped("embd_pdrop", "embedding_dropout", 0.0),
    Mapped("attn_pdrop", "attention_dropout", 0.0),
    Mapped("resid_pdrop", ("feed_forward_dropout", "output_dropout"), 0.0),
    # In which dtype the scores are computed.
    Inert(("reorder_and_upcast_attn",)),
    # The length of the context again, and a head for another task.
    Inert(
        (
            "n_ctx", "n_special", "predict_special_tokens", "summary_type", "summary_use_proj",
            "summary_activation", "summary_proj_to_labels", "summary_first_dropout",
        )
    ),
)  # fmt: skip


DIALECTS = (
    language_model(
        "gpt2",
        SETTINGS,
        BODY,
        classes=("GPT2LMHeadModel", "GPT2Model"),
        prefix="transformer.",
        tied={"lm_head.weight": "transformer.wte.weight"},
        is_tied_by_default=True,
        defaults={
            "vocab_size": 50257,
            "n_embd": 768,
            "n_head": 12,
            "n_layer": 12,
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "embd_pdrop": 0.1,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
        },
        buffers=(
            Buffer("h.*.attn.bias", causal_mask, written=False),
            Buffer("h.*.attn.masked_bias", masked_score(-1e4), written=False),
        ),
    ),
)
