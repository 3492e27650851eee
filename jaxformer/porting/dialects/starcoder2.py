"""Hugging Face's ``starcoder2``, ``stablelm`` and ``nemotron``: Llama's stack with layer norms.

StarCoder 2 (arXiv 2402.19173), StableLM (arXiv 2402.17834) and Nemotron (arXiv 2402.16819).
"""

import functools

from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ACTIVATIONS_OF_TORCH,
    even_head_width,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED,
    llama_adapter,
    stack,
    two_norm_body,
)
from jaxformer.porting.mapping.packings import RowPerHead
from jaxformer.porting.mapping.rules import Rule, Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Fixed,
    Flag,
    Mapped,
    Required,
    fixed,
)
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

LAYER_NORM = Fixed("norm", "layer_norm")
# What readers before transformers 5 take in place of rope_parameters.
OLD_FRACTION = Mapped("partial_rotary_factor", "rotary_fraction", is_read=False)
HEAD_WIDTH = Mapped(
    "head_dim",
    "head_dim",
    lambda source_model, values: values["d_model"] // values["num_heads"],
    written_from="head_width",
)
STARCODER2 = (
    *stack(HEAD_WIDTH, eps="norm_epsilon"),
    LAYER_NORM,
    Mapped("hidden_act", "activation", translation=ACTIVATIONS_OF_TORCH),
    Mapped("use_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), True, BOOLEAN),
    Mapped("sliding_window", "sliding_window", None, is_nullable=True),
    Mapped("residual_dropout", ("feed_forward_dropout", "output_dropout"), 0.0),
    Mapped("embedding_dropout", "embedding_dropout", 0.0),
    Required("mlp_type", "default"),
    Required("norm_type", "layer_norm"),
    Required("scale_attn_weights", True),
    # What the class has other names for, and in which dtype scores are computed.
    Inert(
        (
            "activation_function", "layer_norm_epsilon", "attention_softmax_in_fp32",
            "scale_attention_softmax_in_fp32",
        )
    ),
)  # fmt: skip
STABLELM = (
    *stack(HEAD_WIDTH, eps="layer_norm_eps", rotary=RotaryPositions(fraction=0.25)),
    Required("head_dim", even_head_width),
    OLD_FRACTION,
    LAYER_NORM,
    GATED,
    Mapped("use_qkv_bias", "qkv_bias", False, BOOLEAN),
    *fixed(output_bias=False, feed_forward_bias=False),
    Mapped("use_parallel_residual", "block", False, Flag("parallel", "pre_norm")),
    Fixed("shared_norm", lambda source_model, values: values["block"] == "parallel"),
    Mapped("qk_layernorm", "query_key_norm", False, BOOLEAN),
    *fixed(query_key_norm_over="own_head", query_key_norm_bias=False),
    Mapped("hidden_dropout", "feed_forward_dropout", 0.0),
)
NEMOTRON = (
    *stack(HEAD_WIDTH, ATTENTION_BIAS, eps="norm_eps", rotary=RotaryPositions(fraction=0.5)),
    OLD_FRACTION,
    LAYER_NORM,
    Fixed("norm_unit_offset", True),
    Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    Mapped("mlp_bias", "feed_forward_bias", False, BOOLEAN),
)


def _stablelm_body(module: TransformerLM) -> Rules:
    attention = module.config.attention
    heads = {"q": attention.num_heads, "k": module.config.key_value_heads}
    norms = (
        Rule((f"{x}_norm",), (f"{x}_layernorm.norms.#",), RowPerHead(n)) for x, n in heads.items()
    )
    projections = names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj")
    return two_norm_body(module, qkv=(*projections, *norms))


DIALECTS = (
    llama_adapter(
        "starcoder2",
        STARCODER2,
        functools.partial(two_norm_body, feed_forward=names(up_proj="c_fc", down_proj="c_proj")),
    ),
    llama_adapter("stablelm", STABLELM, _stablelm_body, translated=frozenset()),
    llama_adapter("nemotron", NEMOTRON),
)
