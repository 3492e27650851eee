"""Hugging Face's ``gpt_neo``: GPT-Neo, with a window in some layers and scores not scaled."""

from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.buffers import masked_score
from jaxformer.porting.dialects.common.hugging_face import language_model, stack_rules
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    ATTENTION_DROPOUT,
    even_head_width,
)
from jaxformer.porting.dialects.gpt2 import NOT_READ
from jaxformer.porting.mapping.adapter import Buffer
from jaxformer.porting.mapping.rules import names
from jaxformer.porting.mapping.settings import (
    Checked,
    Mapped,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel

ATTENTION = names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")
BODY = stack_rules(
    "h.*",
    ("attn.attention", ATTENTION),
    ("mlp", names(up_proj="c_fc", down_proj="c_proj")),
    {"attention_norm": "ln_1", "feed_forward_norm": "ln_2"},
    token_embedding="wte",
    position_embedding="wpe",
    final_norm="ln_f",
)


@dataclass(frozen=True)
class AttentionTypes(Row):
    """Which layers see a window: ``local`` ones; ``global`` ones see all.

    ``attention_types`` has pairs of a pattern and how often it is repeated, ``attention_layers``
    the same for each layer.
    """

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it, or nothing."""
        types = source_model.setting("attention_types", default=[[["global", "local"], 12]])
        window = source_model.setting("window_size", default=256)
        expanded = [kind for pattern, count in types for _ in range(count) for kind in pattern]
        layers = source_model.setting("attention_layers", default=expanded)
        if layers != expanded and "attention_types" in source_model.config:
            raise unsupported("attention_layers", "be what attention_types says", layers)
        if set(layers) - {"global", "local"} or len(layers) != values["num_layers"]:
            count = values["num_layers"]
            raise unsupported("attention_types", f"be global or local for {count} layers", types)
        if "local" not in layers:
            return {}
        full = tuple(n for n, kind in enumerate(layers) if kind == "global")
        return {"sliding_window": window, "full_attention_layers": full}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the window, and the shortest pattern of layers."""
        count, window = config.num_layers, config.attention.sliding_window
        kinds = ["global" if config.window(n) is None else "local" for n in range(count)]
        period = next(n for n in range(1, count + 1) if kinds == kinds[:n] * (count // n))
        return {
            "attention_types": [[kinds[:period], count // period]],
            "window_size": 256 if window is None else window,
        }


SETTINGS = (
    Mapped("hidden_size", "d_model"),
    Mapped(("num_heads", "num_attention_heads"), "num_heads"),
    Checked(even_head_width),
    Mapped(("num_layers", "num_hidden_layers"), "num_layers"),
    Mapped("max_position_embeddings", "context_length"),
    Mapped("intermediate_size", "d_ff", None),
    Mapped("activation_function", "activation", translation=ACTIVATIONS),
    Mapped("layer_norm_epsilon", "norm_eps", 1e-5),
    AttentionTypes(),
    ATTENTION_DROPOUT,
    Mapped("embed_dropout", "embedding_dropout", 0.0),
    Mapped("resid_dropout", ("feed_forward_dropout", "output_dropout"), 0.0),
    NOT_READ,
    *fixed(attention_scale=1.0, qkv_bias=False),
)


DIALECTS = (
    language_model(
        "gpt_neo",
        SETTINGS,
        BODY,
        buffers=(Buffer("h.*.attn.attention.masked_bias", masked_score(-1e9), written=False),),
    ),
)
