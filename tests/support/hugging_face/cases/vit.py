"""ViT, DeiT and DINOv2."""

from tests.support.hugging_face.case import Case

VIT = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 44,
    "image_size": [15, 22],
    "patch_size": [3, 2],
    "num_channels": 5,
    "layer_norm_eps": 1e-5,
}
LABELS = {name: n for n, name in enumerate(["ant", "bee", "cat", "dog", "emu", "fox", "gnu"])}
CLASSES = {"id2label": {str(n): label for label, n in LABELS.items()}, "label2id": LABELS}
SQUARE = {
    **VIT,
    **CLASSES,
    "num_attention_heads": 3,
    "image_size": 13,
    "patch_size": 4,
    "num_channels": 3,
    "qkv_bias": False,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-3,
}
# DINOv2 takes its positions as they are of square images alone.
DINO = {**VIT, "image_size": 18}
del DINO["intermediate_size"]
DINO_SQUARE = {name: value for name, value in SQUARE.items() if name != "intermediate_size"}

CASES = {
    "vit": Case("vit", "ViTForImageClassification", {**VIT, **CLASSES}),
    "vit square no bias": Case("vit", "ViTForImageClassification", SQUARE),
    "vit body": Case("vit", "ViTModel", VIT),
    "vit body no pooler": Case("vit", "ViTModel", VIT, {"add_pooling_layer": False}),
    "deit": Case("deit", "DeiTForImageClassification", {**VIT, **CLASSES}),
    "deit square no bias": Case("deit", "DeiTForImageClassification", SQUARE),
    "deit two heads": Case("deit", "DeiTForImageClassificationWithTeacher", {**VIT, **CLASSES}),
    "deit body": Case("deit", "DeiTModel", VIT),
    "dinov2": Case(
        "dinov2", "Dinov2ForImageClassification", {**DINO, **CLASSES, "use_mask_token": False}
    ),
    "dinov2 square no bias": Case(
        "dinov2",
        "Dinov2ForImageClassification",
        {**DINO_SQUARE, "mlp_ratio": 3, "use_mask_token": False, "layerscale_value": 0.3},
    ),
    "dinov2 gated": Case(
        "dinov2",
        "Dinov2ForImageClassification",
        {**DINO, **CLASSES, "use_mask_token": False, "use_swiglu_ffn": True, "mlp_ratio": 3},
    ),
    "dinov2 gated body": Case("dinov2", "Dinov2Model", {**DINO, "use_swiglu_ffn": True}),
    "dinov2 body": Case("dinov2", "Dinov2Model", DINO),
}
