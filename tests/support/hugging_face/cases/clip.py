"""CLIP and SigLIP, their halves, and what sees with classes."""

from typing import Any

from tests.support.hugging_face.case import SIZES, VOCAB, Case

VISION = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 44,
    "image_size": 19,
    "patch_size": 3,
    "num_channels": 5,
    "projection_dim": 11,
}
OTHER = {
    **VISION,
    "num_attention_heads": 3,
    "image_size": 13,
    "patch_size": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-3,
    "projection_dim": 7,
}
SIGLIP = {name: value for name, value in VISION.items() if name != "projection_dim"}
TEXT = {**SIZES, "pad_token_id": None}

# The models of a pair have sizes of their own.
IDS: dict[str, Any] = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SIGLIP_PAIR_TEXT = {**SIZES, **IDS, "vocab_size": VOCAB}
PAIR_TEXT = {**SIGLIP_PAIR_TEXT, "eos_token_id": 36, "projection_dim": 11}
PAIR_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 20,
    "image_size": 13,
    "patch_size": 4,
    "num_channels": 5,
    "projection_dim": 11,
}
SIGLIP_PAIR_VISION = {k: v for k, v in PAIR_VISION.items() if k != "projection_dim"}
SIGLIP_PAIR_VISION |= {"hidden_size": 24, "num_attention_heads": 3}


LABELS = {"0": "red", "1": "green", "2": "blue"}
CLASSES = {"id2label": LABELS, "label2id": {label: int(n) for n, label in LABELS.items()}}


def _classifier(kind: str, vision: dict[str, Any], *unused: str, **more: Any) -> Case:
    """A class that keeps what makes the vector of an image, and does not use it."""
    dialect = kind.removesuffix("ForImageClassification").lower()
    settings = {"vision_config": vision, **more}
    return Case(
        dialect, kind, settings, unused=tuple(f"vision_model.{name}." for name in unused),
        without_effect=frozenset({"vision_config.projection_dim"}),
    )  # fmt: skip


def _case(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> Case:
    settings = {"text_config": text, "vision_config": vision, **more}
    return Case(kind.removesuffix("Model").lower(), kind, settings)


CASES = {
    "clip": _case("CLIPModel", PAIR_TEXT, PAIR_VISION, projection_dim=11),
    "clip highest token gelu": _case(
        "CLIPModel",
        {
            **PAIR_TEXT,
            "num_attention_heads": 3,
            "eos_token_id": 2,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-3,
            "projection_dim": 7,
        },
        {**PAIR_VISION, "hidden_act": "relu", "layer_norm_eps": 1e-4, "projection_dim": 7},
        projection_dim=7,
    ),
    "siglip": _case(
        "SiglipModel", {**SIGLIP_PAIR_TEXT, "layer_norm_eps": 1e-5}, SIGLIP_PAIR_VISION
    ),
    "siglip relu": _case(
        "SiglipModel",
        {**SIGLIP_PAIR_TEXT, "num_attention_heads": 3, "hidden_act": "relu"},
        {**SIGLIP_PAIR_VISION, "hidden_act": "gelu", "image_size": 19, "patch_size": 5},
    ),
    "clip classes": _classifier(
        "CLIPForImageClassification", PAIR_VISION, "post_layernorm", **CLASSES
    ),
    "clip classes gelu": _classifier(
        "CLIPForImageClassification", {**OTHER, "patch_size": 5}, "post_layernorm"
    ),
    "siglip classes": _classifier(
        "SiglipForImageClassification", SIGLIP_PAIR_VISION, "head", **CLASSES
    ),
    "siglip classes no vector": _classifier(
        "SiglipForImageClassification",
        {**SIGLIP, "hidden_act": "relu", "image_size": 13, "vision_use_head": False},
    ),
    "clip vision": Case("clip_vision_model", "CLIPVisionModelWithProjection", VISION),
    "clip vision gelu": Case("clip_vision_model", "CLIPVisionModelWithProjection", OTHER),
    "clip vision body": Case(
        "clip_vision_model", "CLIPVisionModel", {**VISION, "projection_dim": 512}
    ),
    "siglip vision": Case(
        "siglip_vision_model", "SiglipVisionModel", {**SIGLIP, "layer_norm_eps": 1e-5}
    ),
    "siglip vision relu": Case(
        "siglip_vision_model",
        "SiglipVisionModel",
        {**SIGLIP, "hidden_act": "relu", "num_attention_heads": 3, "image_size": 13},
    ),
    "siglip vision no vector": Case(
        "siglip_vision_model", "SiglipVisionModel", {**SIGLIP, "vision_use_head": False}
    ),
    "clip text": Case("clip_text_model", "CLIPTextModel", {**TEXT, "eos_token_id": 36}),
    "clip text gelu": Case(
        "clip_text_model",
        "CLIPTextModel",
        {
            **TEXT,
            "eos_token_id": 36,
            "hidden_act": "gelu",
            "num_attention_heads": 3,
            "layer_norm_eps": 1e-3,
        },
    ),
    "siglip text": Case("siglip_text_model", "SiglipTextModel", {**TEXT, "layer_norm_eps": 1e-5}),
    "siglip text relu": Case(
        "siglip_text_model",
        "SiglipTextModel",
        {**TEXT, "hidden_act": "relu", "num_attention_heads": 3, "intermediate_size": 29},
    ),
}
