"""Hugging Face's ``phi``: Phi-1, 1.5 and 2 (arXiv 2306.11644): parallel branches with one norm."""

from jaxformer.porting.dialects.common.buffers import inverse_frequencies
from jaxformer.porting.dialects.common.hugging_face import language_model, rotated, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    KEY_VALUE_HEADS,
    SIZES,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.settings import BOOLEAN, Mapped, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM


def _body(module: TransformerLM) -> Rules:
    queries_and_keys = {
        "q_proj": "q_proj",
        "k_proj": "k_proj",
        "q_norm": "q_layernorm",
        "k_norm": "k_layernorm",
    }
    attention = (*rotated(module, queries_and_keys), *names(v_proj="v_proj", o_proj="dense"))
    return stack_rules(
        "layers.*",
        ("self_attn", attention),
        ("mlp", names(up_proj="fc1", down_proj="fc2")),
        {"attention_norm": "input_layernorm"},
        token_embedding="embed_tokens",
        final_norm="final_layernorm",
    )


SETTINGS = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    ATTENTION_DROPOUT,
    RotaryPositions(fraction=0.5),
    KEY_VALUE_HEADS,
    Mapped("qk_layernorm", "query_key_norm", False, BOOLEAN),
    Mapped("embd_pdrop", "embedding_dropout", 0.0),
    Mapped("resid_pdrop", "residual_dropout", 0.0),
    # What readers before transformers 5 take in place of rope_parameters.
    Mapped("partial_rotary_factor", "rotary_fraction", is_read=False),
    # Its class always has these biases.
    Inert(("attention_bias",)),
    *fixed(block="parallel", shared_norm=True, head_bias=True),
)


DIALECTS = (
    language_model(
        "phi",
        SETTINGS,
        _body,
        buffers=(
            Buffer("layers.*.self_attn.rotary_emb.inv_freq", inverse_frequencies, written=False),
        ),
        translated=frozenset({"interleaved"}),
    ),
)
