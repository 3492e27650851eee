"""Dialect ``nanogpt``: Karpathy's nanoGPT, whose ckpt.pt has the arrays and ``model_args``."""

from collections.abc import Callable
from typing import Any

import numpy as np
from flax import nnx

from jaxformer.config import TransformerLMConfig
from jaxformer.porting.dialects.common.reading import alike, demand_activation, layer_norm, one_eps
from jaxformer.porting.mapping.adapter import Buffer, ModuleMapping, StateDictAdapter
from jaxformer.porting.mapping.packings import Fused, Shape
from jaxformer.porting.mapping.rules import Rule, names, under
from jaxformer.porting.mapping.settings import (
    BOOLEAN,
    Mapped,
    Values,
    read_settings,
    write_settings,
)
from jaxformer.porting.mapping.source_model import SourceModel
from jaxformer.transformer_lm import TransformerLM

BLOCK = (
    Rule(("attention.q_proj", "attention.k_proj", "attention.v_proj"), ("attn.c_attn",), Fused()),
    *names(
        {
            "attention.o_proj": "attn.c_proj",
            "feed_forward.up_proj": "mlp.c_fc",
            "feed_forward.down_proj": "mlp.c_proj",
        },
        attention_norm="ln_1",
        feed_forward_norm="ln_2",
    ),
)
RULES = under(
    "",
    "transformer",
    (
        *names(token_embedding="wte", position_embedding="wpe", final_norm="ln_f"),
        *under("blocks.*", "h.*", BLOCK),
    ),
)


BIASES = ("norm_bias", "qkv_bias", "output_bias", "feed_forward_bias")


def _shown(field: str) -> Callable[[SourceModel, Values], Any]:
    """Returns the default of a setting: what the layers show of a field."""
    return lambda source_model, values: values[field]


def _size(embedding: str) -> Callable[[SourceModel, Values], int]:
    """Returns the default of a setting: how many rows an embedding has."""
    name = f"transformer.{embedding}.weight"
    return lambda source_model, values: source_model.shape(name, 2)[0]


def _has_biases(source_model: SourceModel) -> bool:
    """Whether there are biases; old checkpoints have them and no such setting."""
    return any(
        name.endswith(("ln_1.bias", "ln_f.bias", "c_fc.bias")) for name in source_model.shapes
    )


# The ``model_args``; what they do not have the arrays and modules show.
SETTINGS = (
    Mapped(
        "n_layer",
        "num_layers",
        lambda source_model, values: source_model.count("transformer.h"),
    ),
    Mapped("n_head", "num_heads", _shown("num_heads")),
    Mapped("n_embd", "d_model", _shown("d_model")),
    Mapped("block_size", "context_length", _size("wpe")),
    # One setting decides on all biases.
    Mapped("bias", BIASES, lambda source_model, values: _has_biases(source_model), BOOLEAN),
    Mapped("vocab_size", "vocab_size", _size("wte")),
    Mapped(
        "dropout",
        "embedding_dropout",
        lambda source_model, values: source_model.child("transformer.drop").dropout(),
    ),
)


def _layer_settings(source_model: SourceModel) -> dict[str, Any]:
    attention, mlp = source_model.child("attn"), source_model.child("mlp")
    d_model = attention.shape("c_proj.weight", 2)[1]
    return {
        "d_model": d_model,
        "num_heads": attention.num_heads(d_model),
        "activation": demand_activation(mlp, "gelu", "gelu"),
        "norm_eps": one_eps(source_model, "ln_1", "ln_2"),
        "attention_dropout": source_model.child("attn.attn_dropout").dropout(),
        "output_dropout": source_model.child("attn.resid_dropout").dropout(),
        "feed_forward_dropout": mlp.dropout(),
    }


def _model(source_model: SourceModel, rngs: nnx.Rngs) -> TransformerLM:
    layers = alike(source_model.child("transformer").children("h"), _layer_settings)
    fields = read_settings(SETTINGS, source_model, layers)
    model = TransformerLM(TransformerLMConfig(**fields), rngs=rngs)
    use_bias = fields["norm_bias"]
    model.final_norm = layer_norm(source_model, "transformer.ln_f", use_bias=use_bias)
    return model


def _mask(module: TransformerLM, shape: Shape | None) -> np.ndarray:
    """Returns the causal mask that layers keep where PyTorch has no fused attention."""
    length = module.config.context_length
    return np.tril(np.ones((1, 1, length, length), np.float32))


DIALECTS = (
    StateDictAdapter(
        "nanogpt",
        (
            ModuleMapping(
                ("GPT",),
                TransformerLM,
                _model,
                RULES,
                aliases={"lm_head.weight": "transformer.wte.weight"},
                buffers=(Buffer("transformer.h.*.attn.bias", _mask, written=False),),
                settings=lambda module: write_settings(SETTINGS, module.config),
            ),
        ),
    ),
)
