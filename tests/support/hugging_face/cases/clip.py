"""The halves of CLIP and SigLIP."""

from tests.support.hugging_face.case import SIZES, Case

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

CASES = {
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
