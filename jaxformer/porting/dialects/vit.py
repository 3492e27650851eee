"""Hugging Face's ``vit``, ``deit`` and ``dinov2``: models that see, and sort images into classes.

- ``vit`` (arXiv 2010.11929): a class token before the patches, learned positions.
- ``deit`` (arXiv 2012.12877): a second token, for distillation. Of its classes with two heads, one
  for each token, the body is ported.
- ``dinov2`` (arXiv 2304.07193): trained factors of what a branch adds, and a row for masked
  patches. Classes come from the first token and the mean of the patches.

transformers 5 has other names for the layers than 4 and than published files: folders get the older
names, which both read. Images have the size of the config: positions are not interpolated.
"""

import re
from typing import Any

from jaxformer.porting.dialects.common.hugging_face import stack_rules
from jaxformer.porting.dialects.common.hugging_face_images import (
    IMAGES,
    Labels,
    Tokens,
    image_model,
    patch_rules,
    row_rules,
)
from jaxformer.porting.dialects.common.hugging_face_settings import (
    ACTIVATIONS,
    FEED_FORWARD_WIDTH,
    SIZES,
)
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.packings import Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    FLOAT,
    Checked,
    Conversion,
    Fixed,
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

PROJECTIONS = names(q_proj="q_proj", k_proj="k_proj", v_proj="v_proj", o_proj="o_proj")
FEED_FORWARD = names(up_proj="fc1", down_proj="fc2")
VIT_STACK = stack_rules(
    "layers.*",
    ("attention", PROJECTIONS),
    ("mlp", FEED_FORWARD),
    {"attention_norm": "layernorm_before", "feed_forward_norm": "layernorm_after"},
    final_norm="layernorm",
    pooler="pooler.dense",
)
DINO_STACK = (
    *stack_rules(
        "encoder.layer.*",
        ("attention", PROJECTIONS),
        ("mlp", FEED_FORWARD),
        {"attention_norm": "norm1", "feed_forward_norm": "norm2"},
        final_norm="layernorm",
    ),
    *under(
        "blocks.*",
        "encoder.layer.*",
        (
            Rule(("attention_output_norm.scale",), ("layer_scale1.lambda1",)),
            Rule(("feed_forward_output_norm.scale",), ("layer_scale2.lambda1",)),
        ),
    ),
)


def _embeddings(module: VisionTransformer) -> Rules:
    positions = (1, module.config.context_length, module.config.d_model)
    return (
        *under("patch_embedding", "embeddings.patch_embeddings", patch_rules(module, "projection")),
        *row_rules(
            module,
            class_token="embeddings.cls_token",
            distillation_token="embeddings.distillation_token",
        ),
        *row_rules(module, 2, mask_token="embeddings.mask_token"),
        Rule(
            ("position_embedding.embedding",),
            ("embeddings.position_embeddings",),
            Reshaped(positions),
        ),
    )


def _has_pooler(source_model: SourceModel, values: Values) -> bool:
    return source_model.kind.endswith("Model") and source_model.has("pooler")


def _settings(*more: Row, **kind: Any) -> tuple[Row, ...]:
    """Returns the table of a type: rows that it has beside the shared ones, and fixed fields."""
    return (
        *SIZES[:-1],
        *IMAGES,
        Mapped("num_channels", "num_channels", 3),
        Mapped("hidden_act", "activation", translation=ACTIVATIONS),
        Mapped("qkv_bias", "qkv_bias", True, BOOLEAN),
        Mapped("attention_probs_dropout_prob", "attention_dropout", 0.0),
        Labels(),
        *more,
        *fixed(**kind),
        Tokens(),
    )


VIT = (
    FEED_FORWARD_WIDTH,
    Mapped("layer_norm_eps", "norm_eps", 1e-12),
    Mapped("hidden_dropout_prob", ("residual_dropout", "embedding_dropout"), 0.0),
    Required("pooler_output_size", lambda values: values["d_model"]),
    Required("pooler_act", "tanh"),
    Fixed("image_pooler", _has_pooler),
    # Of a head for another task.
    Inert(("encoder_stride",)),
)


def _check_square(values: Values) -> None:
    """Rejects images that are not square, for which DINOv2 interpolates positions."""
    height, width = values["image_height"], values["image_width"]
    if height != width:
        raise unsupported("image_size", "be of square images", [height, width])


DINO = (
    Checked(_check_square),
    Mapped(
        "mlp_ratio",
        "d_ff",
        4,
        Conversion(
            lambda ratio, values: int(values["d_model"] * ratio),
            lambda width, config: width // config.d_model
            if width % config.d_model == 0
            else width / config.d_model,
        ),
        written_from="feed_forward_width",
    ),
    Mapped("layer_norm_eps", "norm_eps", 1e-6),
    Mapped("hidden_dropout_prob", "embedding_dropout", 0.0),
    Mapped("layerscale_value", "layer_scale", 1.0, FLOAT),
    Mapped("use_mask_token", "mask_token", True, BOOLEAN),
    # Whole branches are dropped while training.
    Required("drop_path_rate", 0.0),
    Required("use_swiglu_ffn", False),
    # Of what is made of several layers, for other models.
    Inert(
        (
            "apply_layernorm", "reshape_hidden_states", "stage_names", "out_features",
            "out_indices", "_out_features", "_out_indices",
        )
    ),
)  # fmt: skip
# The names of transformers 5, and what is written.
IN_LAYERS = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}
VIT_NAMES = {**IN_LAYERS, "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}


def _adapter(
    name: str, settings: tuple[Row, ...], stack: Rules, layers: str, inner: dict[str, str]
) -> StateDictAdapter:
    """Returns the adapter of a type.

    Args:
        name: the dialect's.
        settings: its table.
        stack: rules of its blocks.
        layers: what transformers 5 calls them.
        inner: names within a block: of transformers 5, and of files.
    """
    of_class, of_file = rf"\b{layers}\.(\d+)\.", r"\bencoder\.layer\.(\d+)\."
    pairs = {**inner, "": ""} if layers != "encoder.layer" else inner
    published = {of_class + re.escape(n): rf"encoder.layer.\1.{f}" for n, f in pairs.items()}
    older = {of_file + re.escape(f): rf"{layers}.\1.{n}" for n, f in pairs.items()}
    return image_model(
        name,
        settings,
        lambda module: (*_embeddings(module), *stack),
        old_names=older,
        published_names=published,
    )


DIALECTS = (
    _adapter("vit", _settings(*VIT), VIT_STACK, "layers", VIT_NAMES),
    _adapter("deit", _settings(*VIT, distillation_token=True), VIT_STACK, "layers", VIT_NAMES),
    _adapter(
        "dinov2",
        _settings(*DINO, pooling="first_and_mean"),
        DINO_STACK,
        "encoder.layer",
        IN_LAYERS,
    ),
)
