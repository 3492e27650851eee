"""Kin of Llama with other norms: layer norms, norms of what branches add, or one for two branches.

- ``olmo``, ``olmo2``, ``olmo3`` (arXiv 2402.00838, 2501.00656) and ``exaone4``: all but the first
  normalise what the branches of a block add.
- ``cohere``, ``cohere2``: Command R and R7B, parallel branches with one norm.
- ``starcoder2``, ``stablelm`` and ``nemotron`` (arXiv 2402.19173, 2402.17834, 2402.16819): layer
  norms.
"""

from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ACTIVATIONS_OF_TORCH,
    FACTOR,
    even_head_width,
)
from jaxformer.porting.dialects.common.layer_patterns import (
    RotaryInWindows,
    SlidingWindow,
    every_full,
)
from jaxformer.porting.dialects.common.rotary_settings import RotaryByLayerType, RotaryPositions
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    NO_BIASES,
    NO_FEED_FORWARD_BIAS,
    head_width,
    llama_adapter,
    stack,
)
from jaxformer.porting.mapping.packings import RowPerHead
from jaxformer.porting.mapping.rules import Rule, Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Checked,
    Fixed,
    Flag,
    Mapped,
    Required,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.transformer_lm import TransformerLM

ATTENTION_BIAS_ALONE = (ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS)
OLD_ROTARY = RotaryPositions(has_two_fields=True)
OLMO = stack(
    Mapped("clip_qkv", "qkv_clip", None),
    # Its norms have neither scale nor bias, and no setting.
    Inert(("rms_norm_eps", "layer_norm_eps")),
    *fixed(norm="layer_norm", norm_eps=1e-5, norm_scale=False, norm_bias=False),
    biases=ATTENTION_BIAS_ALONE,
    rotary=OLD_ROTARY,
)
OUTPUT_NORMS = fixed(block="output_norm", query_key_norm=True)
NORMS_OF_ALL_HEADS = (*OUTPUT_NORMS, Fixed("query_key_norm_over", "all_heads"))
OLMO2 = stack(*NORMS_OF_ALL_HEADS, biases=ATTENTION_BIAS_ALONE, rotary=OLD_ROTARY)
OLMO3 = stack(
    SlidingWindow(every_full(4)),
    RotaryByLayerType(base=5e5, window_base=5e5),
    *NORMS_OF_ALL_HEADS,
    biases=ATTENTION_BIAS_ALONE,
    rotary=None,
)
EXAONE4 = stack(*OUTPUT_NORMS, RotaryInWindows(), biases=NO_BIASES)
OF_WHAT_BRANCHES_ADD = {
    "attention_norm": "post_attention_layernorm",
    "feed_forward_norm": "post_feedforward_layernorm",
}
COMMAND_R = stack(
    Mapped("logit_scale", "logit_scale", 0.0625, FACTOR),
    *fixed(norm="layer_norm", norm_bias=False, block="parallel", shared_norm=True),
    biases=ATTENTION_BIAS_ALONE,
    eps="layer_norm_eps",
)
COHERE = (
    *COMMAND_R,
    Mapped("use_qk_norm", "query_key_norm", False, BOOLEAN),
    Fixed("query_key_norm_over", "own_head"),
    RotaryPositions(base=5e5),
)


def _has_window(values: Values) -> None:
    """Checks that there is a window, without which transformers cannot run the model."""
    if values.get("sliding_window") is None:
        raise unsupported("sliding_window", "be a number", None)


COHERE2 = (*COMMAND_R, RotaryInWindows(), Checked(_has_window))
ONE_NORM = {"attention_norm": "input_layernorm"}
LAYER_NORM = Fixed("norm", "layer_norm")
HEAD_WIDTH = head_width(lambda source_model, values: values["d_model"] // values["num_heads"])
STARCODER2 = stack(
    LAYER_NORM,
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
    heads=HEAD_WIDTH,
    biases=(Mapped("use_bias", ("qkv_bias", "output_bias", "feed_forward_bias"), True, BOOLEAN),),
    activation=Mapped("hidden_act", "activation", translation=ACTIVATIONS_OF_TORCH),
    eps="norm_epsilon",
)  # fmt: skip
STABLELM = stack(
    Required("head_dim", even_head_width),
    LAYER_NORM,
    Mapped("use_parallel_residual", "block", False, Flag("parallel", "pre_norm")),
    Fixed("shared_norm", lambda source_model, values: values["block"] == "parallel"),
    Mapped("qk_layernorm", "query_key_norm", False, BOOLEAN),
    *fixed(query_key_norm_over="own_head", query_key_norm_bias=False),
    Mapped("hidden_dropout", "feed_forward_dropout", 0.0),
    heads=HEAD_WIDTH,
    biases=(
        Mapped("use_qkv_bias", "qkv_bias", False, BOOLEAN),
        *fixed(output_bias=False, feed_forward_bias=False),
    ),
    eps="layer_norm_eps",
    rotary=RotaryPositions(fraction=0.25),
)
NEMOTRON = stack(
    LAYER_NORM,
    Fixed("norm_unit_offset", True),
    heads=HEAD_WIDTH,
    activation=Mapped("hidden_act", "activation", translation=ACTIVATIONS),
    eps="norm_eps",
    rotary=RotaryPositions(fraction=0.5),
)


def _stablelm_qkv(module: TransformerLM) -> Rules:
    """Returns the rules of an attention with a norm for each head."""
    attention = module.config.attention
    heads = {"q": attention.num_heads, "k": module.config.key_value_heads}
    norms = (
        Rule((f"{x}_norm",), (f"{x}_layernorm.norms.#",), RowPerHead(n)) for x, n in heads.items()
    )
    return (*names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj"), *norms)


DIALECTS = (
    llama_adapter("olmo", OLMO),
    llama_adapter("olmo2", OLMO2, norms=OF_WHAT_BRANCHES_ADD),
    llama_adapter("olmo3", OLMO3, norms=OF_WHAT_BRANCHES_ADD),
    llama_adapter("exaone4", EXAONE4, norms=OF_WHAT_BRANCHES_ADD),
    llama_adapter("cohere", COHERE, neighbours=True, norms=ONE_NORM),
    llama_adapter("cohere2", COHERE2, neighbours=True, norms=ONE_NORM),
    llama_adapter("starcoder2", STARCODER2, feed_forward=names(up_proj="c_fc", down_proj="c_proj")),
    llama_adapter("stablelm", STABLELM, qkv=_stablelm_qkv, translated=frozenset()),
    llama_adapter("nemotron", NEMOTRON),
)
