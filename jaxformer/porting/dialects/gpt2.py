"""Hugging Face's ``gpt2``, ``openai-gpt`` and ``gpt_bigcode``: queries, keys, values in one matrix.

GPT-2's matrices are (in, out), as those of the GPT before it, which is post-norm. SantaCoder and
StarCoder (arXiv 2301.03988, 2305.06161) have PyTorch's, and one key/value head for all.
"""

from jaxformer.porting.dialects.common.buffers import causal_mask, masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ACTIVATIONS_OF_TORCH,
)
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.packings import Fused, FusedByHead, Packing
from jaxformer.porting.mapping.rules import Rule, Rules, names, untransposed
from jaxformer.porting.mapping.settings import Choices, Conversion, Flag, Mapped, Required, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def body(packing: Packing, tokens: str = "wte", positions: str = "wpe") -> Rules:
    """Returns the rules of the stack, with q, k and v packed so, and matrices (out, in).

    Args:
        packing: of queries, keys and values.
        tokens: the name of the token embedding.
        positions: that of the positions.
    """
    qkv = Rule(("q_proj", "k_proj", "v_proj"), ("c_attn",), packing)
    return stack_rules(
        "h.*",
        ("attn", (qkv, *names(o_proj="c_proj"))),
        ("mlp", names(up_proj="c_fc", down_proj="c_proj")),
        {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"},
        token_embedding=tokens,
        position_embedding=positions,
        final_norm="ln_f",
    )


def _bigcode_body(module: TransformerLM) -> Rules:
    return body(FusedByHead(module.config.key_value_heads))


# The length of the context again, and a head for another task.
NOT_READ = Inert(
    (
        "n_ctx", "intermediate_size", "n_special", "predict_special_tokens", "summary_type",
        "summary_use_proj", "summary_activation", "summary_proj_to_labels",
        "summary_first_dropout",
    )
)  # fmt: skip
SIZES_AND_DROPOUTS = (
    Mapped(("n_embd", "hidden_size"), "d_model"),
    Mapped(("n_head", "num_attention_heads"), "num_heads"),
    Mapped(("n_layer", "num_hidden_layers"), "num_layers"),
    Mapped(("n_positions", "max_position_embeddings"), "context_length"),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Mapped("embd_pdrop", "embedding_dropout", 0.0),
    Mapped("attn_pdrop", "attention_dropout", 0.0),
    Mapped("resid_pdrop", ("feed_forward_dropout", "output_dropout"), 0.0),
    NOT_READ,
)
STACK = (
    *SIZES_AND_DROPOUTS,
    Mapped("n_inner", "d_ff", None),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
)
SETTINGS = (
    Required("scale_attn_weights", True),
    Required("scale_attn_by_inverse_layer_idx", False),
    Required("add_cross_attention", False),
    *STACK,
    # In which dtype the scores are computed.
    Inert(("reorder_and_upcast_attn",)),
)
# OpenAI's gelu is the approximation.
FIRST_ACTIVATIONS = Choices({"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"})
FIRST_SETTINGS = (
    *SIZES_AND_DROPOUTS,
    Mapped("afn", "activation", translation=FIRST_ACTIVATIONS),
    *fixed(block="post_norm", final_norm=False),
)
MULTI_QUERY = Conversion(
    lambda is_shared, values: 1 if is_shared else values["num_heads"],
    lambda num_kv_heads, config: num_kv_heads == 1,
)
BIGCODE_SETTINGS = (
    *STACK,
    Mapped("activation_function", "activation", translation=ACTIVATIONS_OF_TORCH),
    Mapped("multi_query", "num_kv_heads", True, MULTI_QUERY, written_from="key_value_heads"),
    Mapped("scale_attn_weights", "attention_scale", True, Flag(None, 1.0)),
    Required("add_cross_attention", False),
    # multi_query again, in which dtype the scores are computed, and how an early server ran.
    Inert(
        (
            "num_key_value_heads",
            "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "inference_runner",
            "max_batch_size", "max_sequence_length", "pad_key_length", "pre_allocate_kv_cache",
            "validate_runner_input",
        )
    ),
)  # fmt: skip
OLD_BUFFERS = (
    Buffer("h.*.attn.bias", causal_mask, written=False),
    Buffer("h.*.attn.masked_bias", masked_score(-1e4), written=False),
)


DIALECTS = (
    language_model("gpt2", SETTINGS, untransposed(body(Fused())), buffers=OLD_BUFFERS),
    language_model(
        "openai-gpt",
        FIRST_SETTINGS,
        untransposed(body(Fused(), "tokens_embed", "positions_embed")),
        buffers=OLD_BUFFERS,
    ),
    language_model("gpt_bigcode", BIGCODE_SETTINGS, _bigcode_body),
)
