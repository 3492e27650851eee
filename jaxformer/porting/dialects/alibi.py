"""Families with ALiBi: ``bloom``, ``mpt`` and ``falcon``.

- BLOOM (arXiv 2211.05100) has a norm on the embeddings.
- MPT by MosaicML is without any bias. transformers' class leaves many settings of the original code
  unread. A file in which they have another value than the class takes for granted is rejected: the
  class would compute something else than the model was trained to.
- Falcon (arXiv 2311.16867) is in its three layouts. Falcon-RW has ALiBi, and branches one after
  the other; Falcon-7B has rotary positions, parallel branches with one norm, and one key/value head
  for all; the newer Falcon-40B has two norms, and groups of heads. In training, transformers drops
  entries of weights only where there is ALiBi, and entries of the sum of two parallel branches;
  here they are dropped everywhere, and of each branch by itself.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.dialects.common.known_settings import DEFAULTS, SHARED
from jaxformer.porting.dialects.common.rotary_settings import RotaryPositions
from jaxformer.porting.dialects.common.stacks import fused_stack, stack_rules
from jaxformer.porting.mapping.packings import Fused
from jaxformer.porting.mapping.rules import Rule, Rules, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Checked,
    Conversion,
    Fixed,
    Flag,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    read_settings,
    unsupported,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert, check_all_read
from jaxformer.transformer_lm import TransformerLM


def _bloom_body(module: TransformerLM) -> Rules:
    return fused_stack(
        module,
        "h.*",
        "self_attention",
        token_embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
    )


BLOOM = (
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


@dataclass(frozen=True)
class Nested(Row):
    """Settings that are inside of another one.

    Attributes:
        source: its name.
        rows: of what is inside.
    """

    source: str
    rows: tuple[Row, ...]

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of all rows."""
        given = source_model.setting(self.source, default={})
        if not isinstance(given, Mapping):
            raise unsupported(self.source, "be an object", given)
        inner = SourceModel({}, kind=self.source, config=given, ignore=source_model.ignore)
        fields = read_settings(self.rows, inner, values)
        check_all_read(inner, DEFAULTS, self.source)
        return fields

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the settings of all rows."""
        return {self.source: write_settings(self.rows, config)}


QKV = Rule(("q_proj", "k_proj", "v_proj"), ("Wqkv",), Fused())
MPT_BODY = stack_rules(
    "blocks.*",
    ("attn", (QKV, *names(o_proj="out_proj"))),
    ("ffn", names(up_proj="up_proj", down_proj="down_proj")),
    {"attention_norm": "norm_1", "feed_forward_norm": "norm_2"},
    token_embedding="wte",
    final_norm="norm_f",
)
# transformers 5 takes no zero that is not an integer.
RATE = Conversion(
    lambda rate, values: float(rate), lambda rate, config: int(rate) if rate == int(rate) else rate
)
ATTENTION = (
    Mapped("attn_pdrop", ("attention_dropout", "residual_dropout"), 0, RATE),
    # Zero bounds nothing.
    Mapped("clip_qkv", "qkv_clip", None, Conversion(lambda bound, values: bound or None)),
    Mapped("softmax_scale", "attention_scale", None),
    Required("attn_type", "multihead_attention"),
    Required("alibi", True),
    Required("alibi_bias_max", 8),
    Required("prefix_lm", False),
    Required("qk_ln", False),
    Required("attn_uses_sequence_id", False),
    Inert(("attn_impl",)),
    *SHARED,
)
MPT = (
    Mapped(("d_model", "hidden_size"), "d_model"),
    Mapped(("n_heads", "num_attention_heads"), "num_heads"),
    Checked(even_head_width),
    Mapped(("n_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_seq_len", "context_length"),
    Nested("attn_config", ATTENTION),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Required("expansion_ratio", 4),
    Required("no_bias", True),
    Required("norm_type", "low_precision_layernorm"),
    Required("logit_scale", None, is_nullable=True),
    # Learned positions are there only without ALiBi. What follows is about training and loading.
    Inert(
        (
            "learned_pos_emb", "emb_pdrop", "resid_pdrop", "embedding_fraction", "init_device",
            "init_config", "tokenizer_name", "verbose",
        )
    ),
    Fixed("d_ff", lambda source_model, values: 4 * values["d_model"]),
    *fixed(positions="alibi", qkv_bias=False, output_bias=False),
    *fixed(feed_forward_bias=False, norm_bias=False),
)  # fmt: skip


def _falcon_body(module: TransformerLM) -> Rules:
    norms = None
    if module.config.block.block == "parallel" and not module.config.block.shared_norm:
        norms = {"attention_norm": "ln_attn", "feed_forward_norm": "ln_mlp"}
    return fused_stack(
        module, "h.*", "self_attention", norms, token_embedding="word_embeddings", final_norm="ln_f"
    )


@dataclass(frozen=True)
class FalconLayout(Row):
    """How many heads, norms and branches at once a block has, as four settings say together."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the number of key/value heads, the kind of block, and whether it has one norm."""
        # Null is false in all of these.
        is_new = bool(source_model.nullable("new_decoder_architecture", False))
        is_parallel = bool(source_model.nullable("parallel_attn", True))
        is_shared = bool(source_model.nullable("multi_query", True))
        norms = source_model.nullable("num_ln_in_parallel_attn")
        num_heads = values["num_heads"]
        heads = source_model.setting("num_kv_heads", default=num_heads)
        if is_new and not is_parallel:
            raise unsupported("parallel_attn", "be True with new_decoder_architecture", False)
        if is_parallel and norms not in ((None, 1, 2) if is_new else (None, 1)):
            words = "be 1 or 2 with new_decoder_architecture, and otherwise 1"
            raise unsupported("num_ln_in_parallel_attn", words, norms)
        if not is_new and not is_shared and heads != num_heads:
            raise unsupported("num_kv_heads", "be num_attention_heads without multi_query", heads)
        return {
            "num_kv_heads": heads if is_new else 1 if is_shared else num_heads,
            "block": "parallel" if is_parallel else "pre_norm",
            "shared_norm": is_parallel and not (is_new and norms != 1),
        }

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the four settings: the older layout where it can hold the model."""
        heads, is_parallel = config.key_value_heads, config.block.block == "parallel"
        norms = 2 if is_parallel and not config.block.shared_norm else 1
        is_new = norms == 2 or heads not in (1, config.attention.num_heads)
        return {
            "new_decoder_architecture": is_new,
            "parallel_attn": is_parallel,
            "multi_query": is_new or heads == 1,
            "num_ln_in_parallel_attn": norms if is_new else None,
            "num_kv_heads": heads if is_new else config.attention.num_heads,
        }


def _has_alibi(values: Values) -> bool:
    return bool(values["positions"] == "alibi")


@dataclass(frozen=True)
class FalconBias(Row):
    """How much of ALiBi's bias is added to scores: before they are scaled, in ``eager`` twice.

    The second time is by the mask, to which transformers adds the bias for its other paths.
    """

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the factor, by the path that the config or the module names; usually ``sdpa``."""
        config = getattr(source_model.module, "config", None)
        names = ("attn_implementation", "_attn_implementation")
        of_module = getattr(config, "_attn_implementation", None)
        path = source_model.setting(*names, default=of_module)
        if not _has_alibi(values):
            return {"alibi_scale": 1.0}
        return {"alibi_scale": (2 if path == "eager" else 1) / math.sqrt(even_head_width(values))}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Names the path where it is the unusual one."""
        is_alibi = config.position.positions == "alibi"
        is_twice = is_alibi and config.position.alibi_scale == 2 / math.sqrt(config.head_width)
        return {"attn_implementation": "eager"} if is_twice else {}


FALCON = (
    Mapped(("hidden_size", "n_embed"), "d_model"),
    Mapped("num_attention_heads", "num_heads"),
    Required("head_dim", even_head_width),
    Mapped("num_hidden_layers", "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    FalconLayout(),
    Mapped(
        "ffn_hidden_size",
        "d_ff",
        lambda source_model, values: 4 * values["d_model"],
        written_from="feed_forward_width",
    ),
    Mapped("activation", "activation", "gelu", ACTIVATIONS),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    Mapped(
        "bias", ("qkv_bias", "output_bias", "feed_forward_bias"), False, BOOLEAN, is_nullable=True
    ),
    RotaryPositions(),
    Mapped("alibi", "positions", False, Flag("alibi", "rotary"), is_nullable=True),
    FalconBias(),
    Fixed("alibi_in_bfloat16", lambda source_model, values: _has_alibi(values)),
    ATTENTION_DROPOUT,
    Mapped("hidden_dropout", "residual_dropout", 0.0),
    Required("apply_residual_connection_post_layernorm", False),
    # The width of the feed-forward again.
    Inert(("ff_factor",)),
)


DIALECTS = (
    language_model("bloom", BLOOM, _bloom_body),
    language_model("mpt", MPT, MPT_BODY),
    language_model("falcon", FALCON, _falcon_body),
)
