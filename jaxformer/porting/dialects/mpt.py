"""Hugging Face's ``mpt``: MPT by MosaicML, with ALiBi, and without any bias.

transformers' class leaves many settings of the original code unread. A file in which they have
another value than the class takes for granted is rejected: the class would compute something else
than the model was trained to.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.hugging_face import language_model, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import even_head_width
from jaxformer.porting.dialects.common.known_settings import DEFAULTS, SHARED
from jaxformer.porting.mapping.packings import Fused
from jaxformer.porting.mapping.rules import Rule, names
from jaxformer.porting.mapping.settings import (
    Checked,
    Conversion,
    Fixed,
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

QKV = Rule(("q_proj", "k_proj", "v_proj"), ("Wqkv",), Fused())
BODY = stack_rules(
    "blocks.*",
    ("attn", (QKV, *names(o_proj="out_proj"))),
    ("ffn", names(up_proj="up_proj", down_proj="down_proj")),
    {"attention_norm": "norm_1", "feed_forward_norm": "norm_2"},
    token_embedding="wte",
    final_norm="norm_f",
)


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
SETTINGS = (
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


DIALECTS = (language_model("mpt", SETTINGS, BODY),)
