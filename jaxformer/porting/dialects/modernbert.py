"""Hugging Face's ``modernbert`` (arXiv 2412.13663): an encoder whose layers alternate.

Every third layer sees all tokens, the others those nearby, each kind with a rotary base of its
own. Feed-forwards are gated, norms come first and have no bias.
"""

from dataclasses import dataclass
from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.bert import masked_lm_head
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    FEED_FORWARD_WIDTH,
    GATED_ACTIVATIONS,
    SIZES,
)
from jaxformer.porting.dialects.common.rotary_settings import LAYER_TYPES, RotaryByLayerType
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.packings import Fused
from jaxformer.porting.mapping.rules import Rule, names
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Mapped,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert


class LocalAttention(Row):
    """Which layers see all tokens, and how far the others see.

    ``local_attention`` counts the tokens on both sides. Without ``layer_types`` every n-th layer
    sees all, from the first one on, with n ``global_attn_every_n_layers``.
    """

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the window and the layers without it."""
        half = source_model.setting("sliding_window", default=None)
        width = source_model.setting("local_attention", default=128)
        half = width // 2 if half is None else half
        step = source_model.setting("global_attn_every_n_layers", default=3)
        if not isinstance(step, int) or step < 1:
            raise unsupported("global_attn_every_n_layers", "be a whole number above 0", step)
        number = values["num_layers"]
        usual = [LAYER_TYPES[n % step > 0] for n in range(number)]
        types = source_model.setting("layer_types", default=usual)
        if len(types) != number or set(types) - set(LAYER_TYPES):
            raise unsupported("layer_types", f"be {number} of {' or '.join(LAYER_TYPES)}", types)
        full = tuple(n for n, kind in enumerate(types) if kind == LAYER_TYPES[0])
        return {"sliding_window": half + 1, "full_attention_layers": full}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives both forms; the n is right where the layers have one."""
        full, number = config.layers.full_attention_layers, config.num_layers
        steps = range(1, number + 1)
        step = next((n for n in steps if tuple(range(0, number, n)) == full), 3)
        window = config.attention.sliding_window
        return {
            "local_attention": 128 if window is None else 2 * (window - 1),
            "layer_types": [LAYER_TYPES[n not in full] for n in range(number)],
            "global_attn_every_n_layers": step,
        }


@dataclass(frozen=True)
class RotaryByReach(RotaryByLayerType):
    """Rotary positions of both kinds of layers, which ``rope_scaling`` would scale alike."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the fields of rotary positions."""
        older = source_model.setting("rope_scaling", default=None)
        if older:
            raise unsupported("rope_scaling", "stand in rope_parameters", older)
        return super().read(source_model, values)

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Gives the parameters, and both bases as transformers 4 reads them."""
        written = super().write(config)
        return {k: v for k, v in written.items() if k not in ("rope_scaling", "rope_theta")}


BODY = stack_rules(
    "layers.*",
    ("attn", (Rule(("q_proj", "k_proj", "v_proj"), ("Wqkv",), Fused()), *names(o_proj="Wo"))),
    ("mlp", (Rule(("gate_proj", "up_proj"), ("Wi",), Fused()), *names(down_proj="Wo"))),
    {"attention_norm": "attn_norm", "feed_forward_norm": "mlp_norm"},
    token_embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    final_norm="final_norm",
)
SETTINGS = (
    *SIZES,
    FEED_FORWARD_WIDTH,
    LocalAttention(),
    RotaryByReach(
        base=160000.0, base_name="global_rope_theta", window_base_name="local_rope_theta"
    ),
    Mapped("hidden_activation", "activation", translation=GATED_ACTIVATIONS),
    Mapped("classifier_activation", "head_activation", "gelu", ACTIVATIONS),
    Mapped("norm_eps", "norm_eps", 1e-5),
    Mapped("norm_bias", "norm_bias", False, BOOLEAN),
    Mapped("attention_bias", ("qkv_bias", "output_bias"), False, BOOLEAN),
    Mapped("mlp_bias", "feed_forward_bias", False, BOOLEAN),
    Mapped("classifier_bias", "head_transform_bias", False, BOOLEAN),
    Mapped("decoder_bias", "head_bias", True, BOOLEAN),
    Mapped("attention_dropout", ("attention_dropout", "output_dropout"), 0.0),
    Mapped("mlp_dropout", "hidden_dropout", 0.0),
    Mapped("embedding_dropout", "embedding_dropout", 0.0),
    *fixed(causal=False, head="masked_lm", first_norm=False, embedding_norm=True),
    # Of a loss, of heads for other tasks, of kernels, and of old files.
    Inert(
        (
            "sparse_prediction", "sparse_pred_ignore_index", "classifier_pooling",
            "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad",
            "initializer_cutoff_factor", "layer_norm_eps", "position_embedding_type",
        )
    ),
)  # fmt: skip
DIALECTS = (
    language_model(
        "modernbert",
        SETTINGS,
        BODY,
        head=masked_lm_head("head.dense", "head.norm", "decoder"),
        outside=("head.", "decoder."),
        special_tokens=("cls_token_id", "sep_token_id"),
    ),
)
