"""GPT-NeoX and its kin: rotary positions in a part of each head, and layer norms.

- ``gpt_neox``: GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373).
- ``persimmon``: Persimmon-8B by Adept, with norms of queries and keys.
- ``phi``: Phi-1, 1.5 and 2 (arXiv 2306.11644), parallel branches with one norm.
"""

from jaxformer.porting.dialects.common.buffers import causal_mask, inverse_frequencies, masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    KEY_VALUE_HEADS,
    SIZES,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.common.stacks import fused_stack, rotated, stack_rules
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import Rules, names
from jaxformer.porting.mapping.settings import BOOLEAN, Flag, Mapped, Required, fixed
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

STACK = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    ATTENTION_DROPOUT,
)
GPT_NEOX = (
    *STACK,
    RotaryPositions(0.25, "rotary_emb_base", "rotary_pct"),
    # As other families call these two, and as they are written here too.
    Required("rope_theta", lambda values: values["rotary_base"]),
    Required("partial_rotary_factor", lambda values: values["rotary_fraction"]),
    Mapped("use_parallel_residual", "block", True, Flag("parallel", "pre_norm")),
    Mapped("attention_bias", ("qkv_bias", "output_bias"), True, BOOLEAN),
    Mapped("hidden_dropout", ("residual_dropout", "embedding_dropout"), 0.0),
    Inert(("is_decoder",)),
)
PERSIMMON = (
    *STACK,
    RotaryPositions(fraction=0.5),
    Mapped("hidden_dropout", "feed_forward_dropout", 0.0),
    Mapped("qk_layernorm", "query_key_norm", True, BOOLEAN),
)
PHI = (
    *STACK,
    RotaryPositions(fraction=0.5),
    KEY_VALUE_HEADS,
    Mapped("qk_layernorm", "query_key_norm", False, BOOLEAN),
    Mapped("embd_pdrop", "embedding_dropout", 0.0),
    Mapped("resid_pdrop", "residual_dropout", 0.0),
    # Its class always has these biases.
    Inert(("attention_bias",)),
    *fixed(block="parallel", shared_norm=True, head_bias=True),
)


def _neox_body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "layers.*",
        "attention",
        token_embedding="embed_in",
        final_norm="final_layer_norm",
    )


def _persimmon_body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "layers.*",
        "self_attn",
        token_embedding="embed_tokens",
        final_norm="final_layernorm",
    )


def _phi_body(module: TransformerLM) -> Rules:
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


def _frequencies(attention: str) -> Buffer:
    """Returns the buffer of rotary frequencies in attentions of this name."""
    return Buffer(f"layers.*.{attention}.rotary_emb.inv_freq", inverse_frequencies, written=False)


DIALECTS = (
    language_model(
        "gpt_neox",
        GPT_NEOX,
        _neox_body,
        # Only transformers 5 reads the head by the name that it has there.
        old_names={r"^embed_out\.": "lm_head."},
        published_names={r"^lm_head\.": "embed_out."},
        buffers=(
            Buffer("layers.*.attention.bias", causal_mask, written=False),
            Buffer("layers.*.attention.masked_bias", masked_score(-1e9), written=False),
            _frequencies("attention"),
        ),
    ),
    language_model("persimmon", PERSIMMON, _persimmon_body),
    language_model(
        "phi",
        PHI,
        _phi_body,
        buffers=(_frequencies("self_attn"),),
        translated=frozenset({"interleaved"}),
    ),
)
