"""Hugging Face's ``vit``, ``deit`` and ``dinov2``: models that see, and sort images into classes.

- ``vit`` (arXiv 2010.11929): a class token before the patches, learned positions.
- ``deit`` (arXiv 2012.12877): a second token, for distillation, with a head of its own or without.
- ``dinov2`` (arXiv 2304.07193): trained factors of what a branch adds, and a row for masked
  patches. Classes come from the first token and the mean of the patches. The giant has a gated
  feed-forward, whose two projections lie in one array in files.

transformers 5 has other names for the layers than 4 and than published files: folders get the older
names, which both read. Images have the size of the config: positions are not interpolated.
"""

import re
from collections.abc import Callable
from typing import Any

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
from jaxformer.porting.dialects.common.stacks import stack_rules
from jaxformer.porting.mapping.adapter import StateDictAdapter
from jaxformer.porting.mapping.packings import Fused, Reshaped
from jaxformer.porting.mapping.rules import Rule, Rules, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    FLOAT,
    Checked,
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
GATED_FEED_FORWARD = names(gate_proj="gate_proj", up_proj="up_proj", down_proj="down_proj")
GATED_IN_FILES = (
    Rule(("gate_proj", "up_proj"), ("weights_in",), Fused()),
    *names(down_proj="weights_out"),
)


def _dino_stack(feed_forward: Rules) -> Rules:
    return (
        *stack_rules(
            "encoder.layer.*",
            ("attention", PROJECTIONS),
            ("mlp", feed_forward),
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


class FeedForwardOfDino(Row):
    """The width of the feed-forward, and whether it is gated: it then has two thirds of the width.

    They are rounded up to a multiple of 8.
    """

    def read(self, source_model: SourceModel, values: Values) -> dict[str, Any]:
        """Gives the width, and the activation where it is gated."""
        ratio = source_model.setting("mlp_ratio", default=4)
        if type(ratio) not in (int, float) or int(values["d_model"] * ratio) < 1:
            raise unsupported("mlp_ratio", "be a number above 0", ratio)
        is_gated = source_model.setting("use_swiglu_ffn", default=False)
        if type(is_gated) is not bool:
            raise unsupported("use_swiglu_ffn", "be true or false", is_gated)
        if not is_gated:
            return {"d_ff": int(values["d_model"] * ratio)}
        return {"activation": "swiglu", "d_ff": _gated_width(values["d_model"], ratio)}

    def write(self, config: Any) -> dict[str, Any]:
        """Gives both; of the ratios that mean the width a whole number, if there is one."""
        width, model_width = config.feed_forward_width, config.d_model
        is_gated = config.feed_forward.is_gated
        whole = width * 3 // 2 if is_gated else width
        ratios = (whole // model_width, whole / model_width, (whole + 1) / model_width)
        fitting = [
            ratio
            for ratio in ratios
            if (_gated_width(model_width, ratio) if is_gated else int(model_width * ratio)) == width
        ]
        # Without any the class is built with another width, which the export then names.
        return {"mlp_ratio": next(iter(fitting), ratios[0]), "use_swiglu_ffn": is_gated}


def _gated_width(model_width: int, ratio: float) -> int:
    return (int(int(model_width * ratio) * 2 / 3) + 7) // 8 * 8


DINO = (
    Checked(_check_square),
    FeedForwardOfDino(),
    Mapped("layer_norm_eps", "norm_eps", 1e-6),
    Mapped("hidden_dropout_prob", "embedding_dropout", 0.0),
    Mapped("layerscale_value", "layer_scale", 1.0, FLOAT),
    Mapped("use_mask_token", "mask_token", True, BOOLEAN),
    # Whole branches are dropped while training.
    Required("drop_path_rate", 0.0),
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
    name: str,
    settings: tuple[Row, ...],
    stack: Callable[[VisionTransformer, bool], Rules],
    layers: str,
    inner: dict[str, str],
    **more: Any,
) -> StateDictAdapter:
    """Returns the adapter of a type.

    Args:
        name: the dialect's.
        settings: its table.
        stack: returns the rules of its blocks, as in the class or, if that is asked for, in files.
        layers: what transformers 5 calls them.
        inner: names within a block: of transformers 5, and of files.
        more: see ``image_model``.
    """
    of_class, of_file = rf"\b{layers}\.(\d+)\.", r"\bencoder\.layer\.(\d+)\."
    pairs = {**inner, "": ""} if layers != "encoder.layer" else inner
    published = {of_class + re.escape(n): rf"encoder.layer.\1.{f}" for n, f in pairs.items()}
    older = {of_file + re.escape(f): rf"{layers}.\1.{n}" for n, f in pairs.items()}
    return image_model(
        name,
        settings,
        lambda module: (*_embeddings(module), *stack(module, False)),
        published=lambda module: (*_embeddings(module), *stack(module, True)),
        old_names=older,
        published_names=published,
        **more,
    )


def _vit_stack(module: VisionTransformer, in_files: bool) -> Rules:
    return VIT_STACK


def _stack_of_dino(module: VisionTransformer, in_files: bool) -> Rules:
    if not module.config.feed_forward.is_gated:
        return _dino_stack(FEED_FORWARD)
    return _dino_stack(GATED_IN_FILES if in_files else GATED_FEED_FORWARD)


DIALECTS = (
    _adapter("vit", _settings(*VIT), _vit_stack, "layers", VIT_NAMES),
    _adapter(
        "deit",
        _settings(*VIT, distillation_token=True),
        _vit_stack,
        "layers",
        VIT_NAMES,
        heads=("cls_classifier", "distillation_classifier"),
    ),
    _adapter(
        "dinov2",
        _settings(*DINO, pooling="first_and_mean"),
        _stack_of_dino,
        "encoder.layer",
        IN_LAYERS,
    ),
)
