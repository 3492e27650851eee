"""Models of other JAX packages, beside the PyTorch models whose weights they read."""

import tempfile
from functools import partial

from benchmarks.wild import inputs
from benchmarks.wild.settings import Pair, Setting, perturb

WIDTH = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
BERT = WIDTH | {
    "vocab_size": inputs.VOCAB, "intermediate_size": 40, "max_position_embeddings": 32,
    "pad_token_id": 0,
}  # fmt: skip
LLAMA = BERT | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
# Classes of transformers, as their name there, with the settings of a small model and odd ones.
KERAS_HUB = {
    "Bert": ("BertModel", BERT, {
        "tanh GELU": {"hidden_act": "gelu_new"}, "eps 1e-3": {"layer_norm_eps": 1e-3},
    }),
    "DistilBert": ("DistilBertModel", {
        "vocab_size": inputs.VOCAB, "dim": 24, "n_layers": 2, "n_heads": 3, "hidden_dim": 40,
        "max_position_embeddings": 32,
    }, {"ReLU": {"activation": "relu"}}),
    "Albert": ("AlbertModel", BERT | {"embedding_size": 12}, {
        "erf GELU": {"hidden_act": "gelu"},
    }),
    "Roberta": ("RobertaModel", BERT | {"pad_token_id": 1}, {"eps 1e-3": {"layer_norm_eps": 1e-3}}),
    "GPT2": ("GPT2Model", {
        "vocab_size": inputs.VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 32,
    }, {"ReLU": {"activation_function": "relu"}}),
    "Llama": ("LlamaModel", LLAMA, {"eps 1e-3, base 500,000": {
        "rms_norm_eps": 1e-3, "rope_theta": 500000.0,
    }}),
    "Mistral": ("MistralModel", LLAMA, {"window of 4": {"sliding_window": 4}}),
    "Gemma": ("GemmaModel", LLAMA | {"head_dim": 10, "num_key_value_heads": 1}, {
        "eps 1e-3": {"rms_norm_eps": 1e-3},
    }),
    "Gemma2": ("Gemma2Model", LLAMA | {"query_pre_attn_scalar": 7, "sliding_window": 4}, {}),
    "Qwen2": ("Qwen2Model", LLAMA, {}),
    "Qwen3": ("Qwen3Model", LLAMA, {}),
    "ViT": ("ViTModel", WIDTH | {"intermediate_size": 40, "image_size": 16, "patch_size": 4}, {
        "tanh GELU": {"hidden_act": "gelu_new"},
    }),
    "Dinov2": ("Dinov2Model", WIDTH | {"image_size": 16, "patch_size": 4}, {}),
}  # fmt: skip


def settings():
    """Yields every setting of these packages."""
    for family, (name, base, odd) in KERAS_HUB.items():
        for setting, changes in {"as usual": {}, **odd}.items():
            make = partial(_keras_hub, name, base | changes)
            modes = {"forward": make}
            if not changes and "image_size" not in base:
                modes |= {f"padding {s}": partial(make, s) for s in ("right", "left")}
            yield Setting("keras-hub", family, setting, modes)
    for setting, changes in {"as usual": {}, "dropped tokens": {"token_dropout": True}}.items():
        yield Setting("esm2quinox", "ESM2", setting, {
            "forward": partial(_esm2, changes, False),
            "padding right": partial(_esm2, changes, True),
        })  # fmt: skip
    for setting, changes in {
        "as usual": {},
        "eps 1e-6": {"eps": 1e-6},
        "eps 1e-6, erf GELU": {"eps": 1e-6, "act_layer": "exactgelu"},
    }.items():
        yield Setting(
            "equimo", "VisionTransformer", setting, {"forward": partial(_equimo, changes)}
        )


def _keras_hub(name, config, side=""):
    import json
    from pathlib import Path

    import keras_hub
    import transformers

    from benchmarks.wild.hugging_face import First

    made = getattr(transformers, f"{name.removesuffix('Model')}Config")(**config)
    made._attn_implementation = "eager"
    model = perturb(getattr(transformers, name)(made))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        # Files of a tokenizer are read first; a body has none.
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [name]}))
        keras = keras_hub.models.Backbone.from_preset(folder)
    params = {v.path: v.value for v in keras.trainable_variables}
    others = [v.value for v in keras.non_trainable_variables]

    def call(params, **given):
        result, _ = keras.stateless_call(list(params.values()), others, given, training=False)
        return result.get("sequence_output") if isinstance(result, dict) else result

    if "image_size" in config:
        images = inputs.images(config["image_size"])
        own = keras.input
        key = next(iter(own)) if isinstance(own, dict) else "images"
        return Pair(
            First(model), (call, params), {"pixel_values": images},
            {key: images.transpose(0, 2, 3, 1)},
        )  # fmt: skip
    ids, mask = inputs.padded_tokens(side, config.get("pad_token_id", 0))
    own = {"token_ids": ids, "padding_mask": mask}
    if "segment_ids" in keras.input:
        own["segment_ids"] = ids * 0
    return Pair(
        First(model), (call, params), {"input_ids": ids, "attention_mask": mask}, own,
        None if mask.all() else mask == 1,
    )  # fmt: skip


def _esm2(changes, is_padded):
    import equinox
    import esm
    import esm2quinox
    import jax
    import torch

    model = perturb(esm.ESM2(**{
        "num_layers": 2, "embed_dim": 24, "attention_heads": 3, "token_dropout": False, **changes,
    }))  # fmt: skip

    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, tokens):
            return self.model(tokens)["logits"]

    ids = inputs.tokens(vocab=24)
    ids[:, 4] = 32  # the mask
    if is_padded:
        ids[1, -inputs.PADDED :] = 1
    arrays, static = equinox.partition(esm2quinox.from_torch(model), equinox.is_array)
    leaves, definition = jax.tree.flatten(arrays)

    def call(leaves, tokens):
        module = equinox.combine(jax.tree.unflatten(definition, leaves), static)
        return jax.vmap(module)(tokens).logits

    return Pair(Logits(), (call, leaves), {"tokens": ids}, None, ids != 1)


def _equimo(changes):
    import equinox
    import jax
    import timm
    from equimo.conversion.utils import convert_params_from_torch
    from equimo.models.vit import VisionTransformer

    model = perturb(timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=7,
    ))  # fmt: skip
    # timm's attention in steps, not in one operator.
    for block in model.blocks:
        block.attn.fused_attn = False
    own = VisionTransformer(
        img_size=16, in_channels=3, dim=24, patch_size=4, num_heads=3, depths=[2], num_classes=7,
        reg_tokens=0, global_pool="token", key=jax.random.key(0), **changes,
    )  # fmt: skip
    names = {
        "blocks.0.blocks.": "blocks.", "prenorm": "norm1", ".norm.": ".norm2.",
        "global_pos_embed.weight": "pos_embed",
    }  # fmt: skip
    loaded = convert_params_from_torch(
        own, names, {"patch_embed.proj.bias": ["after", 2]}, {"pos_embed": 0, "cls_token": 0},
        [], [], source="custom", torch_model=model,
    )  # fmt: skip
    own = equinox.combine(loaded, equinox.partition(own, equinox.is_array)[1])
    arrays, static = equinox.partition(equinox.nn.inference_mode(own), equinox.is_array)
    leaves, definition = jax.tree.flatten(arrays)

    def call(leaves, x):
        module = equinox.combine(jax.tree.unflatten(definition, leaves), static)
        return jax.vmap(lambda image: module(image, jax.random.key(0)))(x)

    return Pair(model, (call, leaves), {"x": inputs.images()})
