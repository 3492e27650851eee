"""Models of other JAX packages, beside the PyTorch models whose weights they read."""

from functools import partial

from benchmarks.wild import inputs
from benchmarks.wild.settings import Pair, Setting, perturb


def settings():
    """Yields every setting of these packages."""
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
