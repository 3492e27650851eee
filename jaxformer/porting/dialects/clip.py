"""Hugging Face's halves of CLIP (arXiv 2103.00020) and SigLIP (arXiv 2303.15343).

- ``clip_vision_model``: what sees, as a ``VisionTransformer``, with its projection or without.
- ``siglip_vision_model``: what sees, whose vector a trained query gathers.
- ``clip_text_model``: what reads, causal. CLIP takes a text's vector from the token that ends it:
  ``hidden[row, place]``.
- ``siglip_text_model``: what reads, which sees later tokens, with a vector of the last one.

transformers 5 has no start of names in these classes that 4 and the published files have: folders
get it.
"""

from typing import Any

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.buffers import position_ids
from jaxformer.porting.dialects.common.hugging_face import language_model
from jaxformer.porting.dialects.common.hugging_face_images import (
    IMAGES,
    Tokens,
    image_model,
    patch_rules,
    row_rules,
)
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS_OF_TORCH,
    ATTENTION_DROPOUT,
    FEED_FORWARD_WIDTH,
    SIZES,
)
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.packings import Fused, Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    Choices,
    Conversion,
    Flag,
    Mapped,
    Required,
    Row,
    Values,
    fixed,
    unsupported,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.porting.mapping.unread_settings import Inert
from jaxformer.vision_transformer import VisionTransformer

# The tanh approximation by its name in PyTorch, as SigLIP's files have it.
CLIP_ACTIVATIONS = Choices({"quick_gelu": "quick_gelu", **ACTIVATIONS_OF_TORCH.table})
STACK = stack_rules(
    "encoder.layers.*",
    ("self_attn", names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="out_proj")),
    ("mlp", names(up_proj="fc1", down_proj="fc2")),
    {"attention_norm": "layer_norm1", "feed_forward_norm": "layer_norm2"},
)
TEXT_BODY = (
    *names(
        token_embedding="embeddings.token_embedding",
        position_embedding="embeddings.position_embedding",
        final_norm="final_layer_norm",
        pooler="head",
    ),
    *STACK,
)


def vision_body(module: VisionTransformer) -> Rules:
    """Returns the rules of what sees in CLIP."""
    return (
        *under("patch_embedding", "embeddings", patch_rules(module, "patch_embedding")),
        *row_rules(module, 1, class_token="embeddings.class_embedding"),
        *names(
            position_embedding="embeddings.position_embedding",
            embedding_norm="pre_layrnorm",
            pooled_norm="post_layernorm",
        ),
        *STACK,
    )


def siglip_vision_body(module: VisionTransformer) -> Rules:
    """Returns the rules of what sees in SigLIP, with the pooling by a query."""
    pooling = (
        Rule(("query.embedding",), ("probe",), Reshaped((1, 1, module.config.d_model))),
        *under(
            "attention",
            "attention",
            (
                Rule(("q_proj", "k_proj", "v_proj"), ("in_proj",), Fused(), joiner="_"),
                *names(o_proj="out_proj"),
            ),
        ),
        *names(norm="layernorm"),
        *under("feed_forward", "mlp", names(up_proj="fc1", down_proj="fc2")),
    )
    return (
        *under("patch_embedding", "embeddings", patch_rules(module, "patch_embedding")),
        *names(position_embedding="embeddings.position_embedding", final_norm="post_layernorm"),
        *STACK,
        *under("pooling", "head", pooling),
    )


def _published(prefix: str, *starts: str) -> dict[str, str]:
    """Returns what puts the start of names before those of a class without it."""
    return {rf"^(?=({'|'.join(starts)})\.)": prefix}


class LastToken(Row):
    """The token that ends a text: transformers' class does not run without one."""

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives nothing: the caller finds the token."""
        return {}

    def write(self, config: TransformerLMConfig) -> dict[str, Any]:
        """Writes the last id, as CLIP's; a model that came with such a token keeps it."""
        return {"eos_token_id": (config.vocab_size or 1) - 1}


def projection_width(number: Any, values: Values) -> Any:
    """Rejects a projection to nothing."""
    if type(number) is not int or number < 1:
        raise unsupported("projection_dim", "be a whole number above 0", number)
    return number


ENCODER = (
    FEED_FORWARD_WIDTH,
    Mapped("hidden_act", "activation", translation=CLIP_ACTIVATIONS),
    ATTENTION_DROPOUT,
    # Of old files; no version reads it.
    Inert(("dropout",)),
)
CLIP_VISION: tuple[Row, ...] = (
    *SIZES[:-1],
    *ENCODER,
    *IMAGES,
    Mapped("num_channels", "num_channels", 3),
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    Mapped("projection_dim", "num_labels", 512, Conversion(projection_width), omit=0),
    *fixed(
        patch_bias=False, embedding_norm=True, final_norm=False, pooled_norm=True, label_bias=False
    ),
    Tokens(),
)
SIGLIP_VISION: tuple[Row, ...] = (
    *SIZES[:-1],
    *ENCODER,
    *IMAGES,
    Mapped("num_channels", "num_channels", 3),
    Mapped("layer_norm_eps", "norm_eps", 1e-6),
    Mapped("vision_use_head", "pooling", True, Flag("attention", "first")),
    *fixed(class_token=False),
    Tokens(),
)
TEXT = (*SIZES, *ENCODER)
CLIP_TEXT = (
    *TEXT,
    Mapped("layer_norm_eps", "norm_eps", 1e-5),
    LastToken(),
    *fixed(causal=True, pooler=False, head="none"),
    # The width of a projection that is no part of this class.
    Inert(("projection_dim",)),
)
SIGLIP_TEXT = (
    *TEXT,
    Mapped("layer_norm_eps", "norm_eps", 1e-6),
    Required("projection_size", lambda values: values["d_model"]),
    *fixed(causal=False, pooler=True, pooled_token="last", pooler_tanh=False, head="none"),
)
VOCABULARY = (Mapped("vocab_size", "vocab_size"), Inert(("tie_word_embeddings",)))
TEXT_NAMES = _published("text_model.", "embeddings", "encoder", "final_layer_norm", "head")
DIALECTS = (
    image_model(
        "siglip_vision_model",
        SIGLIP_VISION,
        siglip_vision_body,
        published_names=_published(
            "vision_model.", "embeddings", "encoder", "post_layernorm", "head"
        ),
        buffers=(position_ids("embeddings.position_ids"),),
        body_head={"num_labels": 0},
    ),
    image_model(
        "clip_vision_model",
        CLIP_VISION,
        vision_body,
        head="visual_projection",
        published_names=_published(
            "vision_model.", "embeddings", "encoder", "pre_layrnorm", "post_layernorm"
        ),
        buffers=(position_ids("embeddings.position_ids"),),
    ),
    *(
        language_model(
            name,
            settings,
            TEXT_BODY,
            vocabulary=VOCABULARY,
            published_names=TEXT_NAMES,
            buffers=(position_ids("embeddings.position_ids"),),
        )
        for name, settings in (("clip_text_model", CLIP_TEXT), ("siglip_text_model", SIGLIP_TEXT))
    ),
)
