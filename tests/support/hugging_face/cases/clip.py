"""CLIP and SigLIP, and their halves."""

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
