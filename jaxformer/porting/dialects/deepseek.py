"""Hugging Face's ``deepseek_v3`` (arXiv 2412.19437): latent attention, and experts in groups.

Keys and values are made of few numbers a token. Experts are weighed by sigmoids and chosen within
the best groups, by scores to which each expert's own number is added; one or more that are shared
see every token, as one feed-forward. The first layers have no experts.
"""

import math
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.rotary_settings import PARAMETERS, RotaryPositions
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.dialects.experts import (
    IN_ONE_ARRAY,
    OWN_WIDTH,
    USUAL,
    each_by_itself,
    feed_forwards,
)
from jaxformer.porting.dialects.llama import (
    ATTENTION_BIAS,
    GATED_FEED_FORWARD,
    NO_FEED_FORWARD_BIAS,
    OLD_BUFFERS,
    TWO_NORMS,
    stack,
)
from jaxformer.porting.mapping.rules import Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Conversion,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.position_tables import yarn_attention_factor
from jaxformer.transformer_lm import TransformerLM


@dataclass(frozen=True)
class FirstLayersDense(Row):
    """The first layers have no experts."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives those layers, which may be all."""
        count = source_model.setting("first_k_dense_replace", default=3)
        if not isinstance(count, int) or count < 0:
            raise unsupported("first_k_dense_replace", "be a whole number from 0 on", count)
        return {"dense_layers": tuple(range(min(count, values["num_layers"])))}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives how many they are."""
        layers = range(config.num_layers)
        dense = [layer for layer in layers if not config.has_experts(layer)]
        return {"first_k_dense_replace": len(dense)}


def _shared_width(count: Any, values: Values) -> int:
    """Returns the width of the shared experts together."""
    if not isinstance(count, int) or count < 1:
        raise unsupported("n_shared_experts", "be a whole number above 0", count)
    return int(count * values["expert_d_ff"])


def _score_factor(head_dim: int, scaling_factor: float, mscale: float) -> float:
    """Returns what scores are multiplied by where frequencies are scaled."""
    factor = yarn_attention_factor(scaling_factor, mscale)
    return head_dim**-0.5 * factor * factor


def _read_mscale(mscale: float | None, values: Values) -> float | None:
    """Returns what scores are multiplied by; None is 1/sqrt(H)."""
    if not mscale:
        return None
    return _score_factor(values["head_dim"], values["rotary_scaling_factor"], mscale)


def _write_mscale(scale: float, config: TransformerLMConfig) -> float:
    """Returns the shortest number from which ``_read_mscale`` makes this scale, if there is one."""
    width, stretched = config.head_width, config.position.rotary.scaling.rotary_scaling_factor
    if stretched <= 1:
        return 1.0
    exact = (math.sqrt(scale * math.sqrt(width)) - 1) / (0.1 * math.log(stretched))
    rounded = (round(exact, digits) for digits in range(17))
    return next((n for n in rounded if n and _score_factor(width, stretched, n) == scale), exact)


# Where frequencies are scaled, it stretches all scores (arXiv 2309.00071), not tables alone.
MSCALE = Mapped(
    "mscale_all_dim", "attention_scale", None, Conversion(_read_mscale, _write_mscale), omit=None,
    applies=lambda values: values["rotary_scaling"] != "none",
)  # fmt: skip
DEEPSEEK_V3 = stack(
    Mapped(
        "qk_nope_head_dim", "head_dim", 128,
        Conversion(
            lambda still, values: still + values["rotary_head_dim"],
            lambda width, config: config.head_width - config.attention.latent.rotary_head_dim,
        ),
    ),
    Mapped(
        "v_head_dim", "value_head_dim", 128,
        Conversion(
            lambda width, values: width,
            lambda width, config: config.head_width if width is None else width,
        ),
    ),
    Mapped("kv_lora_rank", "latent_width", 512),
    # null says that queries are made of x directly.
    Mapped("q_lora_rank", "query_latent_width", 1536, is_nullable=True),
    Mapped("rope_interleave", "rotary_interleaved", True, BOOLEAN, is_nullable=True),
    # The width of what is turned, and the heads of keys, which are those of queries.
    Required("head_dim", lambda values: values["rotary_head_dim"]),
    Required("num_key_value_heads", lambda values: values["num_heads"]),
    RotaryPositions(rows=(*PARAMETERS, MSCALE)),
    Mapped(("n_routed_experts", "num_local_experts"), "num_experts", 256),
    Mapped("num_experts_per_tok", "experts_per_token", 8),
    FirstLayersDense(),
    OWN_WIDTH,
    Mapped(
        "n_shared_experts", "shared_expert_d_ff", 1,
        Conversion(
            _shared_width, lambda width, config: (width or 0) // config.expert_width
        ),
    ),
    Mapped("n_group", "expert_groups", 8),
    Mapped("topk_group", "groups_per_token", 4),
    Mapped("norm_topk_prob", "normalize_expert_weights", True, BOOLEAN, is_nullable=True),
    Mapped("routed_scaling_factor", "expert_weight_scale", 2.5),
    # Of the files of the first release, where transformers' class has no other kind.
    Required("scoring_func", "sigmoid"),
    Required("topk_method", "noaux_tc"),
    Required("moe_layer_freq", 1),
    *fixed(router="sigmoid", choice_bias=True),
    # A sum of two others; how they were trained and are run; and the layers that predict further
    # tokens, which are not ported.
    Inert(
        (
            "qk_head_dim", "num_mtp_layers", "num_nextn_predict_layers", "output_router_logits",
            "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "ep_size", "pretraining_tp",
        )
    ),
    heads=Mapped("qk_rope_head_dim", "rotary_head_dim", 64),
    biases=(ATTENTION_BIAS, *NO_FEED_FORWARD_BIAS),
    rotary=None,
)  # fmt: skip
ATTENTION = names(
    q_proj="q_proj",
    q_down_proj="q_a_proj",
    q_norm="q_a_layernorm",
    q_up_proj="q_b_proj",
    kv_down_proj="kv_a_proj_with_mqa",
    kv_norm="kv_a_layernorm",
    kv_up_proj="kv_b_proj",
    o_proj="o_proj",
)
AROUND_EXPERTS = names(
    {"router.proj": "gate", "router.choice_bias": "gate.e_score_correction_bias"}
) + under("shared_expert", "shared_experts", GATED_FEED_FORWARD)


def _body(module: TransformerLM, experts: Rules) -> Rules:
    """Returns the rules of the stack, with these of experts."""
    around = stack_rules(
        "layers.*",
        ("self_attn", ATTENTION),
        ("mlp", ()),
        TWO_NORMS,
        token_embedding="embed_tokens",
        final_norm="norm",
    )
    return (*around, *feed_forwards(module, "mlp", (*AROUND_EXPERTS, *experts)))


DIALECTS = (
    language_model(
        "deepseek_v3",
        DEEPSEEK_V3,
        lambda module: _body(module, IN_ONE_ARRAY),
        published=lambda module: _body(module, each_by_itself(module, USUAL)),
        buffers=OLD_BUFFERS,
        # Of the layer behind the last, which predicts the token after the next.
        superfluous=("model.layers.61.*",),
    ),
)
